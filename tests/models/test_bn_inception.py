"""BN-Inception: names and shapes against the documentation, values against a plain second implementation."""

import re

import pytest
import torch
from helpers.paths import ROOT
from torch import Tensor
from torch.nn import functional as F

from nearkin.config.recipe import ModelConfig
from nearkin.errors import DataError
from nearkin.models.backbones import make_backbone
from nearkin.models.bn_inception import BNInception

PAGE = (ROOT / "docs" / "bn-inception.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def model() -> BNInception:
    """In evaluation mode and float64, with batch-norm parameters that are not trivial."""
    torch.manual_seed(0)
    network = BNInception().double().eval()
    for name, value in network.state_dict().items():
        if name.endswith(("running_var", "_bn.weight")):
            value.uniform_(0.5, 1.5)
        elif name.endswith(("running_mean", ".bias")):
            value.normal_(std=0.3)
    return network


@pytest.fixture(scope="module")
def fresh() -> BNInception:
    torch.manual_seed(0)
    return BNInception().eval()


# A second implementation, from the weights alone: pooling by unfolded windows, normalisation by its formula.


def conv_bn_relu(weights: dict[str, Tensor], name: str, x: Tensor, stride: int = 1) -> Tensor:
    kernel = weights[f"{name}.weight"]
    x = F.conv2d(x, kernel, weights[f"{name}.bias"], stride=stride, padding=(kernel.shape[-1] - 1) // 2)
    scale, shift, mean, var = (
        weights[f"{name}_bn.{part}"].view(1, -1, 1, 1) for part in ("weight", "bias", "running_mean", "running_var")
    )
    return ((x - mean) / (var + 1e-5).sqrt() * scale + shift).clamp(min=0)


def windows(x: Tensor, stride: int, before: int, after: int, fill: float) -> Tensor:
    """All 3 x 3 windows: [B, C, h, w, 9]."""
    x = F.pad(x, (before, after, before, after), value=fill)
    return x.unfold(2, 3, stride).unfold(3, 3, stride).flatten(4)


def max_pool(x: Tensor, odd_up: bool = False) -> Tensor:
    """Windows start at 0, 2, 4 ...; one that reaches beyond the edge by one pixel still counts."""
    padding = 2 if odd_up else 1
    return windows(x, 2, 0, padding, -torch.inf).amax(-1)


def block(weights: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    halving = name in ("inception_3c", "inception_4e")
    stride = 2 if halving else 1
    middle = conv_bn_relu(weights, f"{name}_3x3", conv_bn_relu(weights, f"{name}_3x3_reduce", x), stride)
    double = conv_bn_relu(weights, f"{name}_double_3x3_1", conv_bn_relu(weights, f"{name}_double_3x3_reduce", x))
    double = conv_bn_relu(weights, f"{name}_double_3x3_2", double, stride)
    if halving:
        return torch.cat([middle, double, max_pool(x, odd_up=True)], 1)
    if name == "inception_5b":
        pooled = windows(x, 1, 1, 1, -torch.inf).amax(-1)
    else:
        pooled = windows(x, 1, 1, 1, 0.0).sum(-1) / 9
    return torch.cat(
        [conv_bn_relu(weights, f"{name}_1x1", x), middle, double, conv_bn_relu(weights, f"{name}_pool_proj", pooled)], 1
    )


def network(weights: dict[str, Tensor], x: Tensor) -> dict[str, Tensor]:
    x = max_pool(conv_bn_relu(weights, "conv1_7x7_s2", x, 2))
    x = max_pool(conv_bn_relu(weights, "conv2_3x3", conv_bn_relu(weights, "conv2_3x3_reduce", x)))
    outputs = {}
    for name in ("3a", "3b", "3c", "4a", "4b", "4c", "4d", "4e", "5a", "5b"):
        x = outputs[name] = block(weights, f"inception_{name}", x)
    return outputs


# 64 and 67 are sizes that the public code accepts; 40 makes odd maps before 3c and 4e, 48 before 4e, 56 before 3c.
@pytest.mark.parametrize("size", [(64, 67), (40, 48), (56, 64)], ids=str)
def test_values_match_the_second_implementation(model, size):
    images = torch.randn(2, 3, *size, dtype=torch.float64)
    with torch.no_grad():
        levels, expected = model.forward_levels(images), network(model.state_dict(), images)
        assert list(levels) == ["low", "mid", "high"]
        for name, level in (("3c", "low"), ("4e", "mid"), ("5b", "high")):
            torch.testing.assert_close(levels[level], expected[name], rtol=1e-10, atol=1e-10)
            assert expected[name].std() > 0.1
        torch.testing.assert_close(model(images), expected["5b"], rtol=1e-10, atol=1e-10)


def test_the_second_implementation_pools_like_torch():
    """On the sizes that the public code accepts (even sides), `max_pool` equals its ceil_mode pooling."""
    for side in (8, 14, 28):
        x = torch.randn(1, 2, side, side)
        assert torch.equal(max_pool(x, odd_up=True), F.max_pool2d(x, 3, 2, ceil_mode=True))
        assert torch.equal(max_pool(x), F.max_pool2d(x, 3, 2, ceil_mode=True))
    x = torch.randn(1, 2, 9, 9)
    assert torch.equal(max_pool(x), F.max_pool2d(x, 3, 2, ceil_mode=True))
    torch.testing.assert_close(windows(x, 1, 1, 1, 0.0).mean(-1), F.avg_pool2d(x, 3, 1, 1, count_include_pad=True))


# Names, shapes and counts


def table(first_heading: str) -> list[list[str]]:
    """The cells of the page's table whose first heading is this, without the heading row."""
    match = re.search(rf"^\| {re.escape(first_heading)} .*\n\|[-|]+\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    assert match, first_heading
    return [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in match[1].splitlines()]


def documented() -> dict[str, tuple[int, ...]]:
    """Shapes of all entries of the state dict, from the page's tables and rules."""
    layers = [(name, int(k), int(i), int(o)) for name, k, _, i, o, _ in table("convolution")]
    for name, inputs, *widths, _, project, outputs in table("block"):
        single, reduce, triple, before, double, again = (0 if w == "-" else int(w) for w in widths)
        chains = [
            [("1x1", 1, single)],
            [("3x3_reduce", 1, reduce), ("3x3", 3, triple)],
            [("double_3x3_reduce", 1, before), ("double_3x3_1", 3, double), ("double_3x3_2", 3, again)],
            [("pool_proj", 1, 0 if project == "-" else int(project))],
        ]
        for chain in chains:
            width = int(inputs)
            for part, kernel, out in chain:
                if out:
                    layers.append((f"{name}_{part}", kernel, width, out))
                width = out
        passed_through = int(inputs) if project == "-" else 0
        assert int(outputs) == sum(chain[-1][2] for chain in chains) + passed_through, name
    shapes: dict[str, tuple[int, ...]] = {}
    for name, k, i, o in layers:
        for entry, shape in table("entry"):
            sizes = {"out": o, "in": i, "k": k}
            shapes[entry.replace("<name>", name)] = (
                () if shape == "one number" else tuple(sizes[s] for s in shape.split(", "))
            )
    return shapes


def test_the_page_lists_every_entry_in_order(fresh):
    shapes = {name: tuple(value.shape) for name, value in fresh.state_dict().items()}
    assert list(shapes.items()) == list(documented().items())
    # A few copied from the public network by hand.
    assert shapes["conv1_7x7_s2.weight"] == (64, 3, 7, 7)
    assert shapes["inception_3a_double_3x3_reduce_bn.bias"] == (64,)
    assert shapes["inception_3c_double_3x3_2.weight"] == (96, 96, 3, 3)
    assert shapes["inception_4e_3x3.weight"] == (192, 128, 3, 3)
    assert shapes["inception_5b_pool_proj.weight"] == (128, 1024, 1, 1)
    assert not {"inception_3c_1x1.weight", "inception_4e_pool_proj.weight"} & set(shapes)


def test_counts(fresh):
    """Several public ports have 11,295,240 parameters with the classifier."""
    trunk = sum(p.numel() for p in fresh.parameters())
    assert (trunk, trunk + 1000 * 1024 + 1000) == (10_270_240, 11_295_240)
    assert len(fresh.state_dict()) == 483
    for figure in ("10,270,240", "11,295,240", "483 entries", "69 convolutions", "other 414"):
        assert figure in PAGE


def test_constants_match_the_documentation():
    documented = dict(re.findall(r"^\| ([a-z ]+) \| (.*) \|$", PAGE, re.MULTILINE))
    norm = make_backbone(ModelConfig(backbone="bn_inception"), 3).pixel_norm
    assert documented["order of channels"] == "blue, green, red"
    assert norm.bgr
    assert documented["range"].startswith("0 to 255")  # PixelNorm: 0 to 1
    assert tuple(map(float, re.findall(r"\d+", documented["subtracted mean"]))) == pytest.approx(
        [255 * m for m in norm.mean]
    )
    assert (float(documented["divided by"]),) * 3 == pytest.approx([255 * s for s in norm.std])


def test_a_public_file_loads(model, tmp_path):
    """Such a file has a classifier and no num_batches_tracked."""
    entries = {k: v.float() for k, v in model.state_dict().items() if not k.endswith("num_batches_tracked")}
    entries |= {"last_linear.weight": torch.zeros(1000, 1024), "last_linear.bias": torch.zeros(1000)}
    assert len(entries) == 416
    torch.save(entries, tmp_path / "public.pth")
    entries = torch.load(tmp_path / "public.pth", weights_only=True)

    loaded = BNInception().eval()
    missing, unexpected = loaded.load_state_dict(entries, strict=False)
    assert not missing
    assert unexpected == ["last_linear.weight", "last_linear.bias"]
    images = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(loaded(images).double(), model(images.double()), rtol=1e-4, atol=1e-4)


# Use


@pytest.mark.parametrize(("side", "sides"), [(224, (14, 7, 7)), (227, (14, 7, 7)), (128, (8, 4, 4)), (7, (1, 1, 1))])
def test_shapes(fresh, side, sides):
    with torch.inference_mode():
        maps = fresh.forward_levels(torch.randn(1, 3, side, side))
    shapes = {name: tuple(value.shape) for name, value in maps.items()}
    low, mid, high = ((s, s) for s in sides)
    assert shapes == {"low": (1, 576, *low), "mid": (1, 1056, *mid), "high": (1, 1024, *high)}
    assert fresh.num_features == 1024


def test_sizes_that_the_public_code_accepts():
    """Convolution and pooling must halve alike, twice: the page says sides of 32 m - 1 to 32 m + 6."""

    def fits(side: int) -> bool:
        x = torch.empty(1, 1, side, side, device="meta")
        kernel = torch.empty(1, 1, 3, 3, device="meta")
        x = F.conv2d(x, torch.empty(1, 1, 7, 7, device="meta"), stride=2, padding=3)
        for _ in range(2):
            x = F.max_pool2d(x, 3, 2, ceil_mode=True)
        for _ in range(2):
            pooled, x = F.max_pool2d(x, 3, 2, ceil_mode=True), F.conv2d(x, kernel, stride=2, padding=1)
            if pooled.shape != x.shape:
                return False
        return True

    assert [side for side in range(200, 300) if fits(side)] == [*range(223, 231), *range(255, 263), *range(287, 295)]


def test_channels_last_agrees(model):
    images = torch.randn(2, 3, 40, 64, dtype=torch.float64)
    with torch.no_grad():
        maps = model(images.contiguous(memory_format=torch.channels_last))
        assert maps.is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(maps, model(images), rtol=1e-10, atol=1e-10)


def test_fresh_weights_train():
    """Activations neither vanish nor explode, every parameter has a gradient, statistics change in training only."""
    torch.manual_seed(0)
    network, images = BNInception(), torch.randn(4, 3, 64, 64)
    with torch.no_grad():
        maps = network.eval()(images)
        assert 0.3 < maps.std() < 10
        assert 0.2 < (maps > 0).float().mean() < 0.8
    assert network.conv1_7x7_s2_bn.running_mean.abs().max() == 0
    maps = network.train()(images)
    assert 0.3 < maps.std() < 2
    (maps - torch.randn_like(maps)).square().mean().backward()
    for name, parameter in network.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        # Batch normalisation cancels the bias before it.
        if name.endswith("_bn.bias") or not name.endswith(".bias"):
            assert parameter.grad.abs().max() > 1e-6, name
    for name, value in network.state_dict().items():
        if name.endswith("running_mean"):
            assert value.abs().max() > 1e-4, name
    assert network.inception_5b_1x1_bn.momentum == 0.1


@pytest.mark.slow
def test_export_with_a_dynamic_batch(model):
    with torch.no_grad():
        sample = torch.randn(2, 3, 64, 64, dtype=torch.float64)
        program = torch.export.export(model, (sample,), dynamic_shapes=({0: torch.export.Dim("batch", max=64)},))
        images = torch.randn(3, 3, 64, 64, dtype=torch.float64)
        torch.testing.assert_close(program.module()(images), model(images), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("shape", [(2, 1, 64, 64), (3, 64, 64), (2, 3, 64, 6), (2, 4, 64, 64)], ids=str)
def test_images_of_a_wrong_shape_are_rejected(model, shape):
    with pytest.raises(DataError, match=r"bn_inception: expected colour images .* got \[.*\]\."):
        model(torch.zeros(shape, dtype=torch.float64))
