"""A backbone cut before its last stages, so that these can be trained on cached outputs of the others."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nearkin.config.recipe import ModelConfig
from nearkin.errors import ConfigError
from nearkin.models._base import Backbone
from nearkin.models.backbones import TimmBackbone


@dataclass
class Cut:
    """A backbone in two parts, which share its layers: only the tail is trained, on outputs [*shape] of the stem."""

    backbone: TimmBackbone
    stem: nn.Module
    tail: nn.Module
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Elements per image and view."""
        return math.prod(self.shape)

    def features(self, maps: Tensor, pool: Callable[[Tensor], Tensor]) -> Tensor:
        """Compute pooled features [N, F] from outputs of the stem for one or several views of each image."""
        views = maps.shape[1] // self.size
        inputs = maps.view(-1, *self.shape)
        if inputs.ndim == 4:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        pooled = pool(self.backbone.finish(self.tail(inputs)))
        return pooled if views == 1 else pooled.view(len(maps), views, -1).mean(1)


def make_cut(backbone: Backbone | None, model: ModelConfig, image_shape: tuple[int, ...]) -> Cut:
    """Cut a backbone as `ModelConfig.freeze` describes, and check that nothing is lost between the parts."""
    assert backbone is not None
    stem, tail = backbone.cut(model.tuned_stages)
    assert isinstance(backbone, TimmBackbone)
    network = backbone.network.eval()
    images = torch.rand(1, *image_shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        maps = stem(images)
        if not torch.allclose(tail(maps), network.forward_features(images), rtol=1e-3, atol=1e-4):
            raise ConfigError(f"model.freeze: {model.backbone} is more than a chain of stages. Use backbone, or none.")
    network.train()
    return Cut(backbone, stem, tail, tuple(maps.shape[1:]))
