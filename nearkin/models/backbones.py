"""Networks that turn images [B, C, H, W] into feature maps [B, F, h, w], by name.

Ours are `small_conv` and `bn_inception`; `googlenet` and `resnet50` are torchvision's, `efficientnet_lite0` and every
other name timm's. Each says how it wants its pixels, so that the weights it may carry see what they were trained on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from nearkin._common.registry import Registry
from nearkin.config.recipe import ModelConfig
from nearkin.errors import ConfigError, did_you_mean, import_extra
from nearkin.models._base import HALF, IMAGENET, Backbone, Pixels
from nearkin.models.bn_inception import MEAN, STD, BNInception

# backbone(model, in_channels) -> Backbone
BACKBONES: Registry[Callable[[ModelConfig, int], Backbone]] = Registry("backbone")


def make_backbone(model: ModelConfig, in_channels: int) -> Backbone:
    """The network that a model names, with random weights."""
    if model.backbone in BACKBONES:
        return BACKBONES[model.backbone](model, in_channels)
    return TimmBackbone(model.backbone, in_channels)


def check_backbone(name: str) -> None:
    """Refuse a name that is neither ours nor timm's, without building anything."""
    if name in BACKBONES or name == "none":
        return
    timm = import_extra("timm", extra="vision")
    architecture, _, tag = name.partition(".")
    if not timm.is_model(architecture):
        known = [*BACKBONES, *timm.list_models()]
        raise ConfigError(
            f"No backbone named '{name}'.{did_you_mean(name, known)} There are: {', '.join(BACKBONES)}, "
            f"and the {len(known) - len(BACKBONES):,} names of timm."
        )
    if tag:
        try:
            timm.get_pretrained_cfg(name)
        except RuntimeError:
            known = timm.list_pretrained(f"{architecture}.*")
            there = f" There are: {', '.join(known[:6])}." if known else " It has none."
            raise ConfigError(
                f"model.backbone: timm has no weights '{tag}' of {architecture}.{did_you_mean(name, known) or there}"
            ) from None


class SmallConv(Backbone):
    """Five convolutions for images of about 32 to 96 pixels: 160,000 parameters at width 24.

    The first convolution halves the image, because at full size it alone would cost as much as all the others.
    """

    def __init__(self, in_channels: int, width: int) -> None:
        super().__init__()
        self.num_features = 4 * width
        self.layers = nn.Sequential(
            nn.Conv2d(in_channels, width, 5, stride=2, padding=2, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            *_double_convolution(width, 2 * width),
            nn.MaxPool2d(2),
            *_double_convolution(2 * width, 4 * width),
            nn.MaxPool2d(2),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)  # type: ignore[no-any-return]

    def stages(self, images: Tensor) -> dict[str, Tensor]:
        low = self.layers[:3](images)
        mid = self.layers[3:10](low)
        return {"low": low, "mid": mid, "high": self.layers[10:](mid)}


def _double_convolution(inputs: int, outputs: int) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for channels in (inputs, outputs):
        layers += [
            nn.Conv2d(channels, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
        ]
    return layers


class TorchvisionBackbone(Backbone):
    """A torchvision network up to its last maps. Its parameters keep torchvision's names.

    low, mid: the modules whose outputs are tapped, at a quarter and half of the way down in resolution.
    """

    def __init__(self, network: nn.Module, *, layers: list[str], low: str, mid: str, num_features: int) -> None:
        super().__init__()
        self.num_features, self.low, self.mid = num_features, low, mid
        for name in layers:
            self.add_module(name, network.get_submodule(name))

    def forward(self, images: Tensor) -> Tensor:
        return self.stages(images)["high"]

    def stages(self, images: Tensor) -> dict[str, Tensor]:
        taps: dict[str, Tensor] = {}
        for name, layer in self.named_children():
            images = layer(images)
            taps[name] = images
        return {"low": taps[self.low], "mid": taps[self.mid], "high": images}


def resnet50(model: ModelConfig, in_channels: int) -> Backbone:
    _three_channels("resnet50", in_channels)
    network = import_extra("torchvision.models", extra="vision").resnet50()
    layers = ["conv1", "bn1", "relu", "maxpool", "layer1", "layer2", "layer3", "layer4"]
    backbone = TorchvisionBackbone(network, layers=layers, low="layer2", mid="layer3", num_features=2048)
    backbone.pixels = IMAGENET
    return backbone


def googlenet(model: ModelConfig, in_channels: int) -> Backbone:
    _three_channels("googlenet", in_channels)
    network = import_extra("torchvision.models", extra="vision").googlenet(aux_logits=False, init_weights=False)
    layers = [name for name, _ in network.named_children() if name not in ("aux1", "aux2", "avgpool", "dropout", "fc")]
    backbone = TorchvisionBackbone(network, layers=layers, low="inception3b", mid="inception4e", num_features=1024)
    # Its weights were trained by TensorFlow on pixels from -1 to 1; torchvision's `transform_input` turns its usual
    # scaling back into that, we scale so at once.
    backbone.pixels = HALF
    return backbone


def bn_inception(model: ModelConfig, in_channels: int) -> Backbone:
    _three_channels("bn_inception", in_channels)
    backbone = BNInception()
    # Its public weights come from Caffe: pixels from 0 to 255, blue first.
    backbone.pixels = Pixels(mean=tuple(m / 255 for m in MEAN), std=tuple(s / 255 for s in STD), bgr=True)
    return backbone


def efficientnet_lite0(model: ModelConfig, in_channels: int) -> Backbone:
    _three_channels("efficientnet_lite0", in_channels)
    return TimmBackbone("tf_efficientnet_lite0", in_channels)


class TimmBackbone(Backbone):
    """Any timm model. A convolutional one gives its last maps; a transformer its own pooled vector as maps of 1 x 1."""

    def __init__(self, name: str, in_channels: int) -> None:
        super().__init__()
        timm = import_extra("timm", extra="vision")
        check_backbone(name)
        self.network = timm.create_model(name, pretrained=False, num_classes=0, in_chans=in_channels)
        self.num_features = int(self.network.num_features)
        settings: dict[str, Any] = self.network.pretrained_cfg
        self.usual_side = int(settings["input_size"][-1]) if "input_size" in settings else None
        if in_channels == 3 and "mean" in settings:
            self.pixels = Pixels(mean=tuple(settings["mean"]), std=tuple(settings["std"]))

    def forward(self, images: Tensor) -> Tensor:
        maps = self.network.forward_features(images)
        if maps.ndim == 4 and maps.shape[1] == self.num_features:
            return maps  # type: ignore[no-any-return]
        return self.network.forward_head(maps, pre_logits=True)[:, :, None, None]  # type: ignore[no-any-return]

    def stages(self, images: Tensor) -> dict[str, Tensor]:
        try:
            maps, stages = self.network.forward_intermediates(images)
        except (AttributeError, RuntimeError, TypeError):
            return super().stages(images)
        if maps.ndim != 4 or maps.shape[1] != self.num_features or len(stages) < 3:
            return super().stages(images)
        return {"low": stages[-3], "mid": stages[-2], "high": maps}


def _three_channels(name: str, in_channels: int) -> None:
    if in_channels != 3:
        raise ConfigError(f"model.backbone: {name} takes colour images (3 channels), these have {in_channels}.")


BACKBONES.add("small_conv", lambda model, in_channels: SmallConv(in_channels, model.width))
BACKBONES.add("efficientnet_lite0", efficientnet_lite0)
BACKBONES.add("googlenet", googlenet)
BACKBONES.add("resnet50", resnet50)
BACKBONES.add("bn_inception", bn_inception)
