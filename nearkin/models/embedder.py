"""`Embedder`: the model from image to vector, including preprocessing.

Training, evaluation, search and export all call this module, so that they preprocess images identically.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import torch as safetensors
from torch import Tensor, nn

from nearkin._common.files import atomic_write
from nearkin._common.processes import keep_freed_memory
from nearkin._common.progress import Reporter
from nearkin.config.recipe import DataConfig, ModelConfig
from nearkin.data.images import ArrayImages, FileImages, Images, PreparedImages
from nearkin.data.transforms import AUGMENTS, eval_batches
from nearkin.errors import ConfigError, DataError, RunError
from nearkin.models import hub
from nearkin.models._base import Backbone, PixelNorm
from nearkin.models.backbones import TOKEN_POOLINGS, JoinedBackbone, TimmBackbone, make_backbone
from nearkin.models.heads import Head, Pool, unit
from nearkin.models.lora import add_lora
from nearkin.models.own import OWN, OwnBackbone, Preprocess, read_inputs
from nearkin.models.stages import make_cut
from nearkin.models.weights import fingerprint, load_weights

ImageInput = Images | Tensor | NDArray[Any] | Sequence[Any]
_CPU_BATCH = 64  # larger ones are no faster and take gigabytes
FORMAT = 1  # version of model.json


class Embedder(nn.Module):
    """Maps images uint8 [B, C, H, W] to embeddings float [B, dim]: backbone -> pool -> head.

    `forward` returns the raw embedding, for losses. `embed` takes any number of images, files or PIL images and returns
    unit vectors, for search and evaluation. Both also accept the pooled features [B, F] that `features` computes, so a
    frozen backbone need run only once.

    Args:
        model: Configuration of the network; the backbone starts with its `weights`.
        image_shape: Shape (C, H, W) of the input; (F, 1, 1) if there is no backbone and the data are features; any
            shape for a module of your own.
        augment: Name of the augmentation whose evaluation transform crops files and stored images to the input.
        reporter: Shows what is ignored of a file of weights; by default nothing is shown.
        backbone: A module of your own; `Embedder.wrap` makes it.

    Attributes:
        dim: Dimension of the embedding.
        num_features: Number F of pooled features.
        takes_pixels: Whether the inputs are images uint8 that the model normalises itself.
        channels: Channels of the images that are read for the model.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        model: ModelConfig,
        image_shape: tuple[int, ...],
        *,
        augment: str = "none",
        reporter: Reporter | None = None,
        backbone: OwnBackbone | None = None,
    ) -> None:
        super().__init__()
        self.model, self.image_shape, self.augment = model, image_shape, augment
        channels = image_shape[0]
        self.backbone: Backbone | None = None
        parts: tuple[int, ...] = (channels,)
        if model.backbone != "none":
            self.backbone = backbone or make_backbone(model, channels)
            if model.pool in TOKEN_POOLINGS and not isinstance(self.backbone, TimmBackbone | JoinedBackbone):
                raise ConfigError(f"model.pool: {model.pool} is of timm's vision transformers. Use average.")
            self.pool = Pool(model)
            parts = tuple(self.pool(maps).shape[1] for maps in self._probe(self.backbone))
            self.backbone.train()
        self.takes_pixels = self.backbone is not None and (backbone is None or backbone.inputs.dtype == torch.uint8)
        self.channels = channels if self.takes_pixels else 3
        self.num_features = sum(parts)
        self.widths = parts if self.num_networks > 1 else (self.num_features,)  # features of each network
        self.cut = make_cut(self.backbone, model, image_shape) if model.freeze == "stages" else None
        if model.views == 2 and (self.backbone is None or len(image_shape) != 3):
            raise ConfigError("model.views: 2 needs images, which have a mirror image. Use 1.")
        # Levels of one network have parts of the embedding of their own; several networks share all of it.
        self.head = Head(model, parts if self.num_networks == 1 else (self.num_features,))
        self.dim = self.head.dim
        norm = (self.backbone and self.backbone.pixel_norm) or PixelNorm((0.5,) * channels, (0.25,) * channels)
        self.bgr = norm.bgr
        self.register_buffer("mean", torch.tensor(norm.mean).view(-1, 1, 1))
        self.register_buffer("std", torch.tensor(norm.std).view(-1, 1, 1))
        if backbone is not None and (weights := backbone.weights()) is not None:
            for part in (self.pool, self.head):
                part.to(weights.device, weights.dtype)
            self.mean, self.std = self.mean.to(weights), self.std.to(weights)
        self.backbone_frozen = False
        if backbone is None:  # the parameters of a module of the user are left as they are until `fit` copies them
            self.freeze_backbone(False)
        if self.backbone is not None:
            load_weights(self.backbone, model.backbone, model.weights, reporter or Reporter(quiet=True))
            if model.lora_rank:
                add_lora(self.backbone, model.lora_rank, model.backbone)

    @classmethod
    def wrap(
        cls,
        module: Any,
        preprocess: Any = None,
        *,
        dim: int | None = None,
        image_size: int | None = None,
        example: Tensor | None = None,
        name: str = "",
        config: ModelConfig | None = None,
    ) -> Self:
        """Make a model of your own network, for `fit`, `evaluate`, `Index`, serving and export.

        Args:
            module: Maps a float batch to vectors [B, D], tokens [B, T, F] or maps [B, F, h, w], or returns an output of
                Hugging Face. A function of NumPy arrays can be evaluated and indexed, but not trained.
            preprocess: For images (mean, std, image size) of pixels from 0 to 1, or an object that has them: timm's
                `pretrained_cfg`, torchvision's `weights.transforms()`, an image processor of Hugging Face. Or any
                function from a PIL image to a tensor. By default that of a timm model, else pixels from 0 to 1.
            dim: Dimension of a linear head on top; by default none: the output of the module is the embedding.
            image_size: Height and width of the images, if `preprocess` does not say.
            example: A batch of what the module takes, if this is not images, or images of another number of channels.
            name: Identifies functions without source (in a notebook), and what the layers of a module do not show.
            config: Pooling, head and freezing; by default `ModelConfig(pool="average", dim=0)`.

        Returns:
            The model. It shares the weights of the module.

        Raises:
            ConfigError: The module fails on a batch of zeros, or its inputs are not known.
        """
        config = dataclasses.replace(config or ModelConfig(pool="average", dim=0), backbone=OWN, weights="none")
        config = config if dim is None else dataclasses.replace(config, dim=dim)
        backbone = OwnBackbone(module, read_inputs(module, preprocess, image_size, example, name), name)
        was_training = getattr(module, "training", False)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # of the head: the same in every process, so that `fit` can resume
            return cls(config, backbone.inputs.shape, backbone=backbone).train(was_training)

    @property
    def own(self) -> OwnBackbone | None:
        """The backbone if it is a module of the user."""
        return self.backbone if isinstance(self.backbone, OwnBackbone) else None

    @property
    def preprocess(self) -> Preprocess | None:
        """The function of the user that turns a PIL image into an input, if there is one."""
        return self.own.inputs.function if self.own else None

    def data_config(self, data: DataConfig | None = None) -> DataConfig:
        """Return the settings with which images are read for this model: its size, and without `data` its crop."""
        data = data or DataConfig(augment=self.augment)
        takes_images = self.takes_pixels or (self.preprocess is not None and len(self.image_shape) == 3)
        return dataclasses.replace(data, image_size=max(8, self.image_shape[-1])) if takes_images else data

    @torch.no_grad()
    def _probe(self, backbone: Backbone) -> tuple[Tensor, ...]:
        """Return the feature maps of one blank image, or raise if the backbone does not accept this image size."""
        is_own = isinstance(backbone, OwnBackbone)
        blank = backbone.blank(1) if isinstance(backbone, OwnBackbone) else torch.zeros(1, *self.image_shape)
        try:
            return self._feature_maps(blank, backbone.eval())
        except Exception as error:  # a module of the user may raise any exception
            if isinstance(error, ConfigError) or not (is_own or isinstance(error, AssertionError | RuntimeError)):
                raise
            reason = str(error).partition("\n")[0]
            if is_own:
                raise ConfigError(
                    f"module: failed on a batch of zeros {list(blank.shape)} ({type(error).__name__}: {reason}).\n"
                    "Pass what it takes: preprocess=(mean, std, image size), image_size= or example=batch."
                ) from None
            height, width = self.image_shape[1:]
            size = backbone.default_image_size
            raise ConfigError(
                f"model.backbone: {self.model.backbone} does not accept images of {height} x {width} pixels "
                f"({reason}). Use {f'--data.image-size {size}' if size else 'another --data.image-size'}."
            ) from None

    def forward(self, inputs: Tensor) -> Tensor:
        """Compute raw embeddings [B, dim] of images uint8 [B, C, H, W] or pooled features [B, F]."""
        if self.cut is not None and inputs.ndim == 2 and inputs.shape[1] % self.cut.size == 0:
            features = self.cut.features(inputs.to(self.mean.dtype), self.pool)
        else:
            features = inputs.to(self.mean.dtype) if self._is_features(inputs) else self.features(inputs)
        return self.head(features)  # type: ignore[no-any-return]

    def _is_features(self, inputs: Tensor) -> bool:
        """Whether inputs are for the head; a module of the user may itself take vectors, or token ids."""
        if inputs.ndim != 2 or self.own is None:
            return inputs.ndim == 2
        return inputs.is_floating_point() and tuple(inputs.shape[1:]) != self.image_shape

    def features(self, images: Tensor) -> Tensor:
        """Compute the pooled features [B, F] of images uint8 [B, C, H, W]: the input of the head."""
        if self.backbone is None:
            raise DataError("This model has no backbone: it expects features [N, F], not images.")
        networks = range(self.num_networks)
        parts = [self.network_features(images, i) for i in networks]
        if self.model.views == 2 and not self.training:
            mirrored = images.flip(-1)
            parts = [(parts[i] + self.network_features(mirrored, i)) / 2 for i in networks]
        return self.join(parts)

    @property
    def num_networks(self) -> int:
        """How many networks the backbone has side by side."""
        return len(self.backbone.parts) if isinstance(self.backbone, JoinedBackbone) else 1

    def stem_maps(self, images: Tensor) -> Tensor:
        """Compute the inputs of the trained stages, one row [size] for each image; see `ModelConfig.freeze`."""
        assert self.cut is not None
        return self.cut.stem(self._scale(images)).flatten(1)  # type: ignore[no-any-return]

    def _scale(self, images: Tensor) -> Tensor:
        """Return images as the backbone takes them: floats with its mean, its deviation and its order of channels."""
        if self.bgr:
            images = images.flip(1)
        if self.own is None or images.dtype == torch.uint8:
            if not self.takes_pixels:
                raise DataError("This model takes what its preprocessing returns, not pixels. Pass images to `embed`.")
            scaled = (images.to(self.mean.dtype) / 255 - self.mean) / self.std
        else:
            scaled = images.to(self.mean.dtype) if images.is_floating_point() else images
        if scaled.ndim == 4:  # channels_last: convolutions on a CPU run 1.4 to 2.4 times as fast.
            scaled = scaled.contiguous(memory_format=torch.channels_last)
        return scaled

    def network_features(self, images: Tensor, index: int = 0) -> Tensor:
        """Compute the pooled features of one network of the backbone, of one view of the images."""
        assert self.backbone is not None
        scaled = self._scale(images)
        if isinstance(self.backbone, JoinedBackbone):
            return self.pool(self.backbone.forward_part(scaled, index))  # type: ignore[no-any-return]
        pooled = [self.pool(maps) for maps in self._feature_maps(scaled, self.backbone)]
        return pooled[0] if len(pooled) == 1 else torch.cat(pooled, dim=1)

    def join(self, features: list[Tensor]) -> Tensor:
        """Join the features of the networks side by side, each scaled to length 1."""
        return features[0] if len(features) == 1 else torch.cat([unit(part) for part in features], dim=1)

    def _feature_maps(self, scaled: Tensor, backbone: Backbone) -> tuple[Tensor, ...]:
        if self.model.feature_levels == "high":
            return backbone.forward_parts(scaled)
        return tuple(backbone.forward_levels(scaled).values())

    def train(self, mode: bool = True) -> Self:
        """Set training mode; a frozen backbone and frozen batch norms stay in evaluation mode."""
        super().train(mode)
        if mode and self.backbone is not None:
            if self.backbone_frozen or self.model.freeze != "none":
                self.backbone.eval()
            if self.cut is not None and not self.backbone_frozen:
                self.cut.tail.train()
            if self.model.freeze_norm != "none":
                for norm in _batch_norms(self.backbone):
                    norm.eval()
        return self

    def freeze_backbone(self, frozen: bool) -> None:
        """Freeze the backbone, parameters and batch-norm statistics; False unfreezes what the configuration allows."""
        self.backbone_frozen = frozen
        if self.backbone is None:
            return
        self.train(self.training)
        trainable = not frozen and self.model.freeze == "none"
        self.pool.requires_grad_(trainable)
        for name, parameter in self.backbone.named_parameters():
            is_update = name.endswith((".a", ".b")) and ".parametrizations." in name
            tuned = is_update if self.model.lora_rank else name not in self.backbone.always_frozen
            parameter.requires_grad_(trainable and tuned)
        if self.cut is not None:
            self.cut.tail.requires_grad_(not frozen)
        if self.model.freeze_norm == "all":
            for norm in _batch_norms(self.backbone):
                norm.requires_grad_(False)

    def fit_pixel_norm(self, images: Images) -> None:
        """Set the mean and deviation of each channel from at most 4096 images, unless the backbone defines them."""
        if self.backbone is None or self.backbone.pixel_norm is not None:
            return
        rows = np.linspace(0, len(images) - 1, min(len(images), 4096)).astype(np.int64)
        total, squares = torch.zeros(2, images.shape[0], dtype=torch.float64)
        count = 0
        for chunk in np.array_split(rows, max(1, len(rows) // 256)):
            pixels = images.read(chunk).double()
            total, squares = total + pixels.sum(dim=(0, 2, 3)), squares + pixels.square().sum(dim=(0, 2, 3))
            count += pixels[:, 0].numel()
        mean = total / count / 255
        std = (squares / count / 255**2 - mean**2).clamp(min=1e-4).sqrt()
        self.mean.copy_(mean.view(-1, 1, 1))
        self.std.copy_(std.view(-1, 1, 1))

    def embed(
        self, images: ImageInput, *, batch_size: int | None = None, raw: bool = False, reporter: Reporter | None = None
    ) -> Tensor:
        """Embed any number of images.

        Args:
            images: Paths, PIL images, bytes uint8 [N, C, H, W], an image store, or features [N, F].
            batch_size: Images per forward pass; by default 64 on a CPU, else 256.
            raw: Do not normalise the vectors.
            reporter: Shows the progress; by default nothing is shown.

        Returns:
            Vectors float32 [N, dim] on the CPU; unit vectors unless `raw` is set or the model has normalize = false.
        """
        vectors = self._run_batches(self, images, batch_size, reporter, self.dim)
        return vectors if raw or not self.model.normalize else unit(vectors)

    def embed_features(
        self, images: ImageInput, *, batch_size: int | None = None, reporter: Reporter | None = None
    ) -> Tensor:
        """Compute the pooled features float32 [N, F] of any number of images, given as for `embed`."""
        return self._run_batches(self.features, images, batch_size, reporter, self.num_features)

    def _run_batches(
        self, function: Any, images: ImageInput, size: int | None, reporter: Reporter | None, width: int
    ) -> Tensor:
        """Apply a function to all images; `width` is that of an empty result."""
        if isinstance(images, str | Path):
            raise DataError(f"embed: expected a list of images, got one path. Use embed([{str(images)!r}]).")
        outputs = []
        size = size or (_CPU_BATCH if self.mean.device.type == "cpu" else 256)
        with (reporter or Reporter(quiet=True)).track("embedding", len(images), unit="img") as bar:
            for output in self.stream(function, images, size):
                outputs.append(output)
                bar.advance(len(output))
        return torch.cat(outputs) if outputs else torch.empty(0, width)

    @torch.no_grad()  # not inference_mode(), which some devices (XLA) do not support
    def stream(self, function: Any, images: ImageInput, batch_size: int) -> Iterator[Tensor]:
        """Yield a function of each batch of images, computed in evaluation mode, as float32 on the CPU."""
        was_training = self.training
        if self.backbone is not None and self.mean.device.type == "cpu":
            keep_freed_memory()  # three times as fast
        self.eval()
        try:
            for batch in self._batches(images, batch_size):
                yield function(batch.to(self.mean.device)).float().cpu()
        finally:
            self.train(was_training)

    def _batches(self, images: ImageInput, batch_size: int) -> Iterator[Tensor]:
        """Yield batches of model inputs from an image store, from arrays of inputs, or from files and PIL images."""
        plan = [np.arange(s, min(s + batch_size, len(images))) for s in range(0, len(images), batch_size)]
        store: Any = images
        if isinstance(images, Tensor | np.ndarray):
            inputs = torch.as_tensor(images)
            if self.preprocess is None or inputs.dtype != torch.uint8 or inputs.ndim != 4:
                inputs = self._check_array(inputs)
                yield from (inputs[rows[0] : rows[-1] + 1] for rows in plan)
                return
            store = ArrayImages(inputs.numpy())
        if not hasattr(store, "read"):
            if not self.takes_pixels and self.preprocess is None:
                raise DataError(f"embed: expected {self._expected_arrays()}, got a list.")
            store = FileImages(store, AUGMENTS[self.augment].stored_side(self.image_shape[-1]), channels=self.channels)
        if self.preprocess is not None and not isinstance(store, PreparedImages):
            store = PreparedImages(store, self.preprocess, self.image_shape)
        if not store.is_pixels and (self.own is None or store.shape != self.image_shape):
            raise DataError(f"embed: expected {self._expected_arrays()}, got tensors [N, {_sizes(store.shape)}].")
        yield from eval_batches(store, plan, AUGMENTS[self.augment])

    def _check_array(self, inputs: Tensor) -> Tensor:
        """Return an array of features or inputs in the type that the model takes, or raise."""
        is_input = tuple(inputs.shape[1:]) == self.image_shape
        if self.cut is not None and inputs.ndim == 2 and inputs.shape[1] % self.cut.size == 0:
            return inputs
        if inputs.ndim == 2 and inputs.shape[1] == self.num_features and self._is_features(inputs):
            if inputs.is_floating_point():
                return inputs.to(self.mean.dtype)
        elif is_input and (inputs.dtype == torch.uint8 if self.takes_pixels else self.own is not None):
            return inputs
        elif is_input and self.own is not None and inputs.is_floating_point():
            return inputs  # normalised by the caller
        hint = " To have images resized, pass paths or PIL images." if self.takes_pixels else ""
        raise DataError(f"embed: expected {self._expected_arrays()}, got {inputs.dtype} {list(inputs.shape)}.{hint}")

    def _expected_arrays(self) -> str:
        what = "bytes" if self.takes_pixels else "tensors"
        inputs = f"{what} of shape [N, {_sizes(self.image_shape)}] or " if self.backbone else ""
        return f"{inputs}features of shape [N, {self.num_features}]"

    def save(self, folder: str | Path) -> Path:
        """Write model.safetensors and model.json into a folder, for `nearkin.load`. Returns the folder."""
        folder = Path(folder)
        tensors = {name: value.detach().cpu().contiguous() for name, value in self.state_dict().items()}
        if self.own is not None:  # whose layers may share weights, which safetensors refuses
            tensors = {name: value.clone() for name, value in tensors.items()}
        data: bytes = safetensors.save(tensors)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            atomic_write(folder / "model.safetensors", data)
            config = self.config_dict(hashlib.sha256(data).hexdigest())
            atomic_write(folder / "model.json", json.dumps(config, indent=2))
        except OSError as error:
            raise RunError(f"{folder}: cannot write the model ({error.strerror or error}).") from None
        return folder

    def push_to_hub(self, repo: str, *, card: str = "", private: bool = False) -> str:
        """Upload the model to the Hugging Face Hub, for `nearkin.load("hf:USER/NAME")`.

        Args:
            repo: USER/NAME; made if it does not exist.
            card: Text of the model card, in Markdown. `nearkin.deploy.model_card(run, repo)` has protocol and metrics.
            private: Whether only you can see a repository that is made.

        Returns:
            The address of the commit.
        """
        text = card or f'A model of nearkin: `import nearkin as nk; model = nk.load("hf:{repo}")`.\n'
        return hub.push(self, repo, text, private=private)

    def config_dict(self, sha256: str = "") -> dict[str, Any]:
        """Return the content of model.json: what is needed to rebuild the network, and the checksum of its weights."""
        return {
            "format": FORMAT,
            "model": {k: v for k, v in dataclasses.asdict(self.model).items() if k != "weights"},
            "image_shape": list(self.image_shape),
            "augment": self.augment,
            "dim": self.dim,
            "sha256": sha256,
            **self.own_dict(),
        }

    def own_dict(self) -> dict[str, Any]:
        """Return what identifies a module of the user and its preprocessing; empty for other models."""
        return {} if self.own is None else {OWN: self.own.to_dict()}

    def fingerprint(self) -> str:
        """Hash the weights and the preprocessing; models with the same fingerprint give the same vectors."""
        config = json.dumps(self.config_dict(fingerprint(self)), sort_keys=True)
        return hashlib.sha256(config.encode()).hexdigest()[:16]


def _sizes(shape: tuple[int, ...]) -> str:
    return ", ".join(map(str, shape))


def _batch_norms(backbone: nn.Module) -> list[nn.Module]:
    return [m for m in backbone.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
