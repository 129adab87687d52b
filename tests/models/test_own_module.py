"""A network of the user as an `Embedder`: its vectors are those of the module called by hand."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F

import nearkin as nk
from nearkin.config import ModelConfig
from nearkin.errors import ConfigError, DataError, RunError

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.3, 0.25)


class Vectors(nn.Module):
    """Images [B, 3, 8, 8] to vectors [B, 5]."""

    def __init__(self, activation=nn.ReLU) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(192, 12), activation(), nn.Linear(12, 5))

    def forward(self, x):
        return self.layers(x)


class Words(nn.Module):
    """Token ids [B, 6] to vectors [B, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)

    def forward(self, ids):
        return self.embedding(ids).mean(1)


def seeded(make, seed=0):
    torch.manual_seed(seed)
    return make()


@pytest.fixture
def images():
    return torch.randint(0, 256, (7, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def by_hand(module, images, mean=MEAN, std=STD):
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (mean, std))
    with torch.no_grad():
        return module.eval()((images / 255 - mean) / std)


def center(image):
    """PIL image -> float [3, 8, 8]: the top left corner, from -1 to 1."""
    return torch.from_numpy(np.asarray(image)[:8, :8].copy()).permute(2, 0, 1) / 127.5 - 1


def test_the_vectors_are_those_of_the_module(images):
    module = seeded(Vectors)
    model = nk.Embedder.wrap(module, (MEAN, STD, 8))
    expected = by_hand(module, images)
    assert (model.dim, model.num_features, model.image_shape) == (5, 5, (3, 8, 8))
    torch.testing.assert_close(model.embed(images, raw=True), expected)
    torch.testing.assert_close(model.embed(images), F.normalize(expected, dim=1))
    torch.testing.assert_close(model.eval()(images), expected)
    ready = (images / 255 - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    torch.testing.assert_close(model.embed(ready, raw=True), expected)  # already normalised


def test_files_and_pil_images(tmp_path, images):
    module = seeded(Vectors)
    model = nk.Embedder.wrap(module, (MEAN, STD, 8))
    Image.fromarray(images[0].permute(1, 2, 0).numpy()).save(tmp_path / "a.png")
    expected = by_hand(module, images[:1])
    torch.testing.assert_close(model.embed([tmp_path / "a.png"], raw=True), expected)
    torch.testing.assert_close(model.embed([Image.open(tmp_path / "a.png")], raw=True), expected)


def test_without_preprocessing_pixels_are_from_0_to_1(images):
    module = seeded(Vectors)
    model = nk.Embedder.wrap(module, image_size=8)
    torch.testing.assert_close(model.embed(images, raw=True), by_hand(module, images, (0.0,) * 3, (1.0,) * 3))


def test_a_head(images):
    module = seeded(Vectors)
    model = nk.Embedder.wrap(module, (MEAN, STD, 8), dim=16)
    layer = model.head.maps[0]
    expected = by_hand(module, images) @ layer.weight.T + layer.bias
    torch.testing.assert_close(model.embed(images, raw=True), expected.detach())
    again = nk.Embedder.wrap(copy.deepcopy(module), (MEAN, STD, 8), dim=16)
    assert again.fingerprint() == model.fingerprint()  # the head does not depend on the global generator


def test_maps_tokens_and_outputs_of_hugging_face(images):
    conv = seeded(lambda: nn.Conv2d(3, 6, 3))
    maps = by_hand(conv, images)
    model = nk.Embedder.wrap(conv, (MEAN, STD, 8))
    torch.testing.assert_close(model.embed(images, raw=True), maps.mean((2, 3)))
    config = ModelConfig(pool="maximum", dim=0)
    model = nk.Embedder.wrap(conv, (MEAN, STD, 8), config=config)
    torch.testing.assert_close(model.embed(images, raw=True), maps.amax((2, 3)))

    class Tower(nn.Module):
        def __init__(self, pooled):
            super().__init__()
            self.conv, self.pooled = conv, pooled

        def forward(self, pixel_values):
            tokens = self.conv(pixel_values).flatten(2).transpose(1, 2)  # [B, T, F]
            return SimpleNamespace(last_hidden_state=tokens, pooler_output=tokens[:, 0] if self.pooled else None)

    model = nk.Embedder.wrap(Tower(pooled=False), (MEAN, STD, 8))
    torch.testing.assert_close(model.embed(images, raw=True), maps.mean((2, 3)))
    model = nk.Embedder.wrap(Tower(pooled=True), (MEAN, STD, 8))
    torch.testing.assert_close(model.embed(images, raw=True), maps[:, :, 0, 0])


def test_preprocessing_of_torchvision_timm_and_hugging_face():
    module = seeded(Vectors)
    torchvision = SimpleNamespace(mean=MEAN, std=STD, crop_size=[8], resize_size=[10])
    cropped = SimpleNamespace(
        image_mean=list(MEAN), image_std=list(STD), do_center_crop=True, crop_size={"height": 8}, size={"height": 10}
    )
    whole = SimpleNamespace(image_mean=list(MEAN), image_std=list(STD), size={"shortest_edge": 8})
    timm = {"mean": MEAN, "std": STD, "input_size": (3, 8, 8)}
    expected = nk.Embedder.wrap(module, (MEAN, STD, 8)).fingerprint()
    for source in (torchvision, cropped, whole, timm):
        assert nk.Embedder.wrap(module, source).fingerprint() == expected
    unscaled = nk.Embedder.wrap(module, SimpleNamespace(**vars(whole), do_normalize=False))
    assert unscaled.mean.flatten().tolist() == [0, 0, 0]


def test_a_timm_model_and_torchvision_weights():
    timm = pytest.importorskip("timm")
    weights = pytest.importorskip("torchvision.models").ResNet18_Weights.IMAGENET1K_V1
    network = timm.create_model("resnet18", pretrained=False, num_classes=0)
    model = nk.Embedder.wrap(network, image_size=32)
    assert model.image_shape == (3, 32, 32)
    torch.testing.assert_close(model.mean.flatten(), torch.tensor([0.485, 0.456, 0.406]))
    images = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    mean, std = network.pretrained_cfg["mean"], network.pretrained_cfg["std"]
    torch.testing.assert_close(model.embed(images, raw=True), by_hand(network, images, mean, std), rtol=1e-4, atol=1e-5)
    assert nk.Embedder.wrap(network, weights.transforms()).image_shape == (3, 224, 224)


def test_a_function_as_preprocessing(tmp_path):
    module = seeded(Vectors).eval()
    pixels = np.random.default_rng(0).integers(0, 256, (20, 30, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    model = nk.Embedder.wrap(module, center)
    with torch.no_grad():
        expected = module(center(Image.open(tmp_path / "a.png"))[None])
    torch.testing.assert_close(model.embed([tmp_path / "a.png"], raw=True), expected)
    torch.testing.assert_close(model.embed([Image.fromarray(pixels)], raw=True), expected)
    uint8 = torch.from_numpy(pixels).permute(2, 0, 1)[None]
    torch.testing.assert_close(model.embed(uint8, raw=True), expected)
    torch.testing.assert_close(model.embed(center(Image.fromarray(pixels))[None], raw=True), expected)
    with pytest.raises(DataError, match="takes what its preprocessing returns, not pixels"):
        model(uint8)


def test_token_ids_and_vectors():
    words = seeded(Words)
    ids = torch.randint(0, 10, (5, 6), generator=torch.Generator().manual_seed(0))
    model = nk.Embedder.wrap(words, example=ids[:1])
    torch.testing.assert_close(model.embed(ids, raw=True), words(ids).detach())
    same_size = seeded(lambda: nn.Linear(4, 4))  # an input could be taken for the output
    x = torch.randn(5, 4)
    model = nk.Embedder.wrap(same_size, example=x)
    torch.testing.assert_close(model.embed(x, raw=True), same_size(x).detach())
    with pytest.raises(DataError, match=r"expected tensors of shape \[N, 4\] or features of shape \[N, 4\], got .*3\]"):
        model.embed(torch.randn(5, 3))
    with pytest.raises(DataError, match="got a list"):
        model.embed(["a.png"])


def test_grey_images_by_an_example():
    module = seeded(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 3)))
    images = torch.randint(0, 256, (2, 1, 8, 8), dtype=torch.uint8)
    model = nk.Embedder.wrap(module, example=images)
    torch.testing.assert_close(model.embed(images, raw=True), module(images / 255).detach())


def test_a_function_of_arrays(images):
    def histogram(batch):
        assert isinstance(batch, np.ndarray)
        return np.stack([np.histogram(x, bins=4, range=(0, 1))[0] for x in batch]).astype(np.float32)

    model = nk.Embedder.wrap(histogram, image_size=8)
    expected = histogram(images.numpy() / 255)
    assert np.array_equal(model.embed(images, raw=True).numpy(), expected)


def test_the_fingerprint_tells_networks_and_preprocessing_apart():
    def fingerprint(module, preprocess=(MEAN, STD, 8), **settings):
        return nk.Embedder.wrap(module, preprocess, **settings).fingerprint()

    def flipped(image):
        return center(image).flip(2)

    first = fingerprint(seeded(Vectors))
    assert first == fingerprint(seeded(Vectors))
    others = [
        fingerprint(seeded(Vectors, 1)),
        fingerprint(seeded(lambda: Vectors(nn.GELU))),  # the same weights
        fingerprint(seeded(Vectors), (STD, MEAN, 8)),
        fingerprint(seeded(Vectors), center),
        fingerprint(seeded(Vectors), flipped),
        fingerprint(seeded(Vectors), center, name="mine"),
        fingerprint(seeded(Vectors), name="mine"),
        fingerprint(seeded(Vectors), dim=3),
    ]
    assert len({first, *others}) == 9


def test_a_function_without_source_needs_a_name():
    module = seeded(Vectors)
    scope = {"torch": torch}
    exec("def blank(image): return torch.zeros(3, 8, 8)", scope)
    with pytest.raises(ConfigError, match=r"preprocess: blank has no source to identify it by. Pass a name: name="):
        nk.Embedder.wrap(module, scope["blank"])
    nk.Embedder.wrap(module, scope["blank"], name="blank")


def test_parameters_that_the_user_froze_stay_frozen():
    module = seeded(Vectors)
    module.layers[1].requires_grad_(False)
    model = nk.Embedder.wrap(module, (MEAN, STD, 8), dim=4)
    model.freeze_backbone(True)
    assert not any(p.requires_grad for p in module.parameters())
    model.freeze_backbone(False)
    trained = {name for name, p in module.named_parameters() if p.requires_grad}
    assert trained == {"layers.3.weight", "layers.3.bias"}
    nk.Embedder.wrap(module, (MEAN, STD, 8), config=ModelConfig(pool="average", dim=4, freeze="backbone"))
    assert {name for name, p in module.named_parameters() if p.requires_grad} == trained  # only `fit` freezes, a copy


def test_the_mode_and_the_type_of_the_module_are_kept():
    module = seeded(Vectors).eval()
    assert not nk.Embedder.wrap(module, (MEAN, STD, 8)).training
    assert not module.layers.training
    assert nk.Embedder.wrap(module.train(), (MEAN, STD, 8)).training
    double = nk.Embedder.wrap(module.double(), (MEAN, STD, 8), dim=3)
    assert double.head.maps[0].weight.dtype == double.mean.dtype == torch.float64


def test_save_and_load(tmp_path, images):
    model = nk.Embedder.wrap(seeded(Vectors), (MEAN, STD, 8), dim=4)
    folder = model.save(tmp_path / "saved")
    other = seeded(Vectors, 1)
    before = copy.deepcopy(other.state_dict())
    loaded = nk.load(folder, module=other)
    assert torch.equal(loaded.embed(images), model.embed(images))
    assert loaded.fingerprint() == model.fingerprint()
    assert all(torch.equal(before[name], value) for name, value in other.state_dict().items())  # it was copied
    assert torch.equal(nk.load(folder, module=model).embed(images), model.embed(images))
    with pytest.raises(RunError, match=r"only the weights are stored.\nPass an instance: nearkin.load\('.*saved', mod"):
        nk.load(folder)
    with pytest.raises(RunError, match=r"module=Vectors\(...\)\)"):
        nk.load(folder)
    with pytest.raises(RunError, match="does not fit the module that you passed"):
        nk.load(folder, module=nn.Sequential(nn.Flatten(), nn.Linear(192, 5)))


def test_save_and_load_with_a_function(tmp_path, images):
    model = nk.Embedder.wrap(seeded(Vectors), center)
    folder = model.save(tmp_path / "saved")
    with pytest.raises(RunError, match=r"module=Vectors\(...\), preprocess=FUNCTION\)"):
        nk.load(folder, module=Vectors())
    with pytest.raises(RunError, match=r"its preprocess is center, .*, got .*lambda.*. Pass the same function"):
        nk.load(folder, Vectors(), lambda image: center(image) * 2)
    assert torch.equal(nk.load(folder, Vectors(), center).embed(images), model.embed(images))
    named = nk.Embedder.wrap(seeded(Vectors), center, name="mine")
    folder = named.save(tmp_path / "named")
    assert nk.load(folder, Vectors(), center).fingerprint() == named.fingerprint()


def test_layers_that_share_weights_are_saved(tmp_path):
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.second = nn.Linear(4, 4)
            self.second.weight = self.first.weight

        def forward(self, x):
            return self.second(self.first(x))

    x = torch.randn(3, 4)
    model = nk.Embedder.wrap(seeded(Tied), example=x)
    loaded = nk.load(model.save(tmp_path / "tied"), module=Tied())
    assert torch.equal(loaded.embed(x), model.embed(x))


def test_a_module_for_a_network_of_ours_is_refused(tmp_path):
    folder = nk.Embedder(ModelConfig(width=4, dim=4), (3, 16, 16)).save(tmp_path / "ours")
    with pytest.raises(RunError, match=r"its network is small_conv, not a module of yours. Leave out module="):
        nk.load(folder, module=Vectors())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict, "wrap: the image size is not known. Pass image_size=224"),
        (lambda: {"image_size": 9}, r"failed on a batch of zeros \[1, 3, 9, 9\] \(RuntimeError: .*\n.*example=batch"),
        (lambda: {"preprocess": (0.5, 0.5)}, r"expected \(mean, std, image size\), got 2 values"),
        (lambda: {"preprocess": 3}, "preprocess: got a int, expected"),
        (lambda: {"preprocess": (MEAN, (0.5,), 8)}, "mean and std have 3 and 1 values for 3"),
        (lambda: {"module": "resnet", "image_size": 8}, "module: got a str, expected an nn.Module or a function"),
        (
            lambda: {"module": lambda x: x.sum(), "image_size": 8, "name": "sum"},
            r"module: sum returned a Tensor, expected vectors \[B, D\]",
        ),
        (lambda: {"module": nn.LSTM(4, 4), "example": torch.zeros(1, 3, 4)}, "module: LSTM returned a tuple, expected"),
    ],
)
def test_what_is_refused(arguments, message):
    settings = {"module": Vectors(), **arguments()}
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        nk.Embedder.wrap(**settings)


def test_a_recipe_cannot_name_own():
    with pytest.raises(ConfigError, match=r"model.backbone: own means a module of yours.*\nPass it in Python"):
        nk.Embedder(ModelConfig(backbone="own"), (3, 16, 16))


def test_preprocessing_that_fails_or_changes_its_shape():
    model = nk.Embedder.wrap(Vectors(), center)
    small = Image.fromarray(np.zeros((4, 4, 3), np.uint8))
    with pytest.raises(DataError, match=r"preprocess: returned shape \[3, 4, 4\] instead of \[3, 8, 8\]"):
        model.embed([small])
    with pytest.raises(DataError, match=r"preprocess: failed on an image .ZeroDivisionError"):
        nk.Embedder.wrap(Vectors(), lambda image: 1 / 0)
    with pytest.raises(DataError, match="preprocess: returned uint8 pixels"):
        nk.Embedder.wrap(Vectors(), lambda image: np.asarray(image))


@pytest.mark.slow
def test_a_vision_transformer_of_transformers_with_its_processor():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, image_size=32, patch_size=8
    )
    network = transformers.ViTModel(config).eval()
    processor = transformers.ViTImageProcessor(
        size={"height": 32, "width": 32}, image_mean=[0.4] * 3, image_std=[0.3] * 3
    )
    images = torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    model = nk.Embedder.wrap(network, processor)
    with torch.no_grad():
        inputs = processor(list(images.permute(0, 2, 3, 1).numpy()), return_tensors="pt")
        expected = network(**inputs).pooler_output
    assert model.dim == 32
    torch.testing.assert_close(model.embed(images, raw=True), expected, rtol=1e-4, atol=1e-5)
