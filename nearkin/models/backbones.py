"""Backbones by name: networks that turn images [B, C, H, W] into feature maps [B, F, h, w].

`small_conv` and `bn_inception` are our own, `googlenet` and `resnet50` come from torchvision, `efficientnet_lite0` to
`efficientnet_lite2` and every other name from timm. Each backbone carries the pixel normalisation of its published
weights.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from nearkin._common.plugins import HINT
from nearkin._common.registry import Registry
from nearkin.config.recipe import ModelConfig
from nearkin.errors import ConfigError, did_you_mean, import_extra
from nearkin.models._base import IMAGENET_NORM, INCEPTION_NORM, Backbone, PixelNorm
from nearkin.models.bn_inception import BNInception
from nearkin.models.own import OWN

# backbone(model, in_channels) -> Backbone
BACKBONES: Registry[Callable[[ModelConfig, int], Backbone]] = Registry("backbone")
LITE = ("efficientnet_lite0", "efficientnet_lite1", "efficientnet_lite2")  # weights in Python packages, no download
TOKEN_POOLINGS = ("token", "patches", "token_patches")  # of vision transformers
FIXED_WIDTH = (*LITE, "googlenet", "resnet50", "bn_inception")  # published networks, for colour images


def make_backbone(model: ModelConfig, in_channels: int) -> Backbone:
    if "," in model.backbone:
        return JoinedBackbone(model, in_channels)
    if model.backbone in FIXED_WIDTH and in_channels != 3:
        raise ConfigError(f"model.backbone: {model.backbone} expects 3 channels (colour images), got {in_channels}.")
    if model.backbone in BACKBONES:
        return BACKBONES[model.backbone](model, in_channels)
    return TimmBackbone(model.backbone, in_channels, model.pool)


def check_backbone(name: str) -> None:
    if "," in name:
        for part in joined_names(name):
            check_backbone(part)
        return
    if name in BACKBONES or name == "none":
        return
    if name == OWN:
        raise ConfigError(
            "model.backbone: own means a module of yours, which a recipe cannot build.\n"
            "Pass it in Python: nk.fit(recipe, model=nk.Embedder.wrap(module))."
        )
    timm = import_extra("timm", extra="images")
    architecture, _, tag = name.partition(".")
    if not timm.is_model(architecture):
        known = [*BACKBONES, *timm.list_models()]
        raise ConfigError(
            f"No backbone named '{name}'.{did_you_mean(name, known)} Available: {', '.join(BACKBONES)}, "
            f"and the {len(known) - len(BACKBONES):,} models of timm. {HINT}"
        )
    known = timm.list_pretrained(f"{architecture}.*") if tag else []
    if tag and name not in known:
        available = f" Available: {', '.join(known[:6])}." if known else " It has none."
        hint = did_you_mean(name, known) or available
        raise ConfigError(f"model.backbone: timm has no weights '{tag}' for {architecture}.{hint}")


class SmallConv(Backbone):
    """Five convolutions for images of about 32 to 96 pixels; the first has stride 2, because it costs the most."""

    def __init__(self, in_channels: int, width: int) -> None:
        super().__init__()
        self.num_features = 4 * width
        self.layers = nn.Sequential(
            nn.Conv2d(in_channels, width, 5, stride=2, padding=2, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            *_double_conv(width, 2 * width),
            nn.MaxPool2d(2),
            *_double_conv(2 * width, 4 * width),
            nn.MaxPool2d(2),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)  # type: ignore[no-any-return]

    def forward_levels(self, images: Tensor) -> dict[str, Tensor]:
        low = self.layers[:3](images)
        mid = self.layers[3:10](low)
        return {"low": low, "mid": mid, "high": self.layers[10:](mid)}


class JoinedBackbone(Backbone):
    """Several networks side by side on the same images. Their pooled features are scaled to length 1 and joined."""

    def __init__(self, model: ModelConfig, in_channels: int) -> None:
        super().__init__()
        names = joined_names(model.backbone)
        if model.feature_levels != "high":
            raise ConfigError("model.feature_levels: several backbones have only their last feature maps. Use high.")
        self.networks = nn.ModuleList(make_backbone(replace(model, backbone=name), in_channels) for name in names)
        self.num_features = sum(network.num_features for network in self.parts)
        for name, network in zip(names, self.parts, strict=True):
            if network.pixel_norm is None:
                raise ConfigError(f"model.backbone: {name} has no pixel normalisation of its own. Use it alone.")
            norm = torch.tensor([network.pixel_norm.mean, network.pixel_norm.std])[..., None, None]
            network.register_buffer("mean_and_std", norm, persistent=False)
        self.pixel_norm = PixelNorm(mean=(0.0,) * in_channels, std=(1.0,) * in_channels)  # each network has its own
        self.default_image_size = max(filter(None, (n.default_image_size for n in self.parts)), default=None)

    @property
    def parts(self) -> list[Backbone]:
        return list(self.networks)  # type: ignore[arg-type]

    def forward_part(self, images: Tensor, index: int) -> Tensor:
        """Compute the feature maps of one of the networks."""
        network = self.parts[index]
        assert network.pixel_norm is not None
        mean, std = network.get_buffer("mean_and_std").unbind()
        return network(((images.flip(1) if network.pixel_norm.bgr else images) - mean) / std)  # type: ignore[no-any-return]

    def forward_parts(self, images: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.forward_part(images, index) for index in range(len(self.networks)))


def joined_names(backbone: str) -> list[str]:
    """Split names of backbones, "a,b"."""
    names = [name.strip() for name in backbone.split(",")]
    if "" in names or "none" in names or len(set(names)) < len(names):
        raise ConfigError(f"model.backbone: expected different names, separated by commas, got '{backbone}'.")
    return names


def _double_conv(in_channels: int, out_channels: int) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for channels in (in_channels, out_channels):
        layers += [
            nn.Conv2d(channels, out_channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(out_channels),
            nn.ReLU(inplace=True),
        ]
    return layers


class TorchvisionBackbone(Backbone):
    """A torchvision network up to its last feature maps. Parameters keep torchvision's names."""

    def __init__(self, network: nn.Module, low: str, mid: str, num_features: int, pixel_norm: PixelNorm) -> None:
        super().__init__()
        self.num_features, self.low, self.mid, self.pixel_norm = num_features, low, mid, pixel_norm
        for name, layer in network.named_children():
            if name not in ("aux1", "aux2", "avgpool", "dropout", "fc"):
                self.add_module(name, layer)

    def forward(self, images: Tensor) -> Tensor:
        return self.forward_levels(images)["high"]

    def forward_levels(self, images: Tensor) -> dict[str, Tensor]:
        outputs: dict[str, Tensor] = {}
        maps = images
        for name, layer in self.named_children():
            maps = outputs[name] = layer(maps)
        return {"low": outputs[self.low], "mid": outputs[self.mid], "high": maps}


def resnet50(model: ModelConfig, in_channels: int) -> Backbone:
    network = import_extra("torchvision.models", extra="images").resnet50()
    return TorchvisionBackbone(network, "layer2", "layer3", 2048, IMAGENET_NORM)


def googlenet(model: ModelConfig, in_channels: int) -> Backbone:
    network = import_extra("torchvision.models", extra="images").googlenet(aux_logits=False, init_weights=False)
    # Its weights were trained in TensorFlow on pixels from -1 to 1. torchvision's `transform_input` converts ImageNet
    # normalisation back to that range; we normalise to it directly.
    return TorchvisionBackbone(network, "inception3b", "inception4e", 1024, INCEPTION_NORM)


class TimmBackbone(Backbone):
    """Any timm model: the last maps of a convolutional one, or of a transformer one vector as 1 x 1 maps.

    The vector is what the model itself pools, unless `pool` names tokens: its class token, the mean of its patches, or
    both. Vision transformers take images of any size that their patches divide.
    """

    def __init__(self, name: str, in_channels: int, pool: str = "average") -> None:
        super().__init__()
        check_backbone(name)
        self.name, self.tokens = name, pool if pool in TOKEN_POOLINGS else ""
        self.network = _create_timm(name, in_channels)
        self.num_features = int(self.network.num_features) * (2 if pool == "token_patches" else 1)
        config: dict[str, Any] = self.network.pretrained_cfg
        self.default_image_size = int(config["input_size"][-1]) if "input_size" in config else None
        if in_channels == 3 and "mean" in config:
            self.pixel_norm = PixelNorm(mean=tuple(config["mean"]), std=tuple(config["std"]))

    def forward(self, images: Tensor) -> Tensor:
        return self.finish(self.network.forward_features(images))

    def finish(self, maps: Tensor) -> Tensor:
        """Return what the last layer computed as feature maps."""
        if self.tokens:
            return self._pool_tokens(maps)[:, :, None, None]
        if maps.ndim == 4 and maps.shape[1] == self.num_features:
            return maps
        return self.network.forward_head(maps, pre_logits=True)[:, :, None, None]  # type: ignore[no-any-return]

    def cut(self, stages: int) -> tuple[nn.Module, nn.Module]:
        before, middle, after = _layers_in_order(self.network)
        if not 0 < stages < len(middle):
            names = f"1 to {len(middle) - 1}" if middle else "none, as its stages are not known"
            raise ConfigError(f"model.tuned_stages: {self.name} has {names}, got {stages}.")
        return nn.Sequential(*before, *middle[:-stages]), nn.Sequential(*middle[-stages:], *after)

    def _pool_tokens(self, tokens: Tensor) -> Tensor:
        prefix = getattr(self.network, "num_prefix_tokens", 0)  # class and register tokens
        if tokens.ndim != 3 or (self.tokens != "patches" and not prefix):
            has = "no class token" if tokens.ndim == 3 else "feature maps instead of tokens"
            raise ConfigError(f"model.pool: {self.name} has {has}. Use {'patches' if tokens.ndim == 3 else 'average'}.")
        patches = tokens[:, prefix:].mean(1)
        if self.tokens == "patches":
            return patches
        return tokens[:, 0] if self.tokens == "token" else torch.cat([tokens[:, 0], patches], dim=1)

    def forward_levels(self, images: Tensor) -> dict[str, Tensor]:
        try:
            maps, intermediates = self.network.forward_intermediates(images)
        except (AttributeError, RuntimeError, TypeError):
            return super().forward_levels(images)
        if maps.ndim != 4 or maps.shape[1] != self.num_features or len(intermediates) < 3:
            return super().forward_levels(images)
        return {"low": intermediates[-3], "mid": intermediates[-2], "high": maps}


def _layers_in_order(network: Any) -> tuple[list[nn.Module], list[nn.Module], list[nn.Module]]:
    """Return the layers of a timm network before its stages, its stages, and those up to its feature maps."""
    if hasattr(network, "conv_stem") and hasattr(network, "conv_head"):  # EfficientNet
        return [network.conv_stem, network.bn1], list(network.blocks), [network.conv_head, network.bn2]
    if hasattr(network, "layer4"):  # ResNet
        stages = [network.layer1, network.layer2, network.layer3, network.layer4]
        return [network.conv1, network.bn1, network.act1, network.maxpool], stages, []
    if hasattr(network, "stem") and hasattr(network, "stages"):  # ConvNeXt
        return [network.stem], list(network.stages), [network.norm_pre]
    if hasattr(network, "patch_embed") and hasattr(network, "norm_pre"):  # vision transformer
        embed = _Tokens(network)
        return [embed, network.patch_drop, network.norm_pre], list(network.blocks), [network.norm]
    return [], [], []


class _Tokens(nn.Module):
    """The tokens of a vision transformer with their positions."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = [network]  # in a list, so that its parameters are not registered twice

    def forward(self, images: Tensor) -> Tensor:
        network = self.network[0]
        return network._pos_embed(network.patch_embed(images))  # type: ignore[no-any-return]


def _create_timm(name: str, in_channels: int) -> Any:
    timm = import_extra("timm", extra="images")
    options: dict[str, Any] = {"pretrained": False, "num_classes": 0, "in_chans": in_channels}
    try:
        return timm.create_model(name, dynamic_img_size=True, **options)
    except TypeError:  # not a vision transformer
        return timm.create_model(name, **options)


BACKBONES.add("small_conv", lambda model, in_channels: SmallConv(in_channels, model.width))
for _name in LITE:
    BACKBONES.add(_name, lambda model, in_channels: TimmBackbone(f"tf_{model.backbone}", in_channels, model.pool))
BACKBONES.add("googlenet", googlenet)
BACKBONES.add("resnet50", resnet50)
BACKBONES.add("bn_inception", lambda model, in_channels: BNInception())
