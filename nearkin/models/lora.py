"""Low-rank adaptation (Hu et al. 2021): W + B A, of which only A [rank, in] and B [out, rank] are trained.

Written as parametrizations of torch, which checkpoints, copies and exporters know.
"""

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from nearkin.errors import ConfigError

_ADAPTED = ("qkv", "q", "k", "v", "proj", "q_proj", "k_proj", "v_proj")  # timm's names of the layers of attention


class LowRankUpdate(nn.Module):
    """Adds B A to a weight. B starts at zero, so that training starts from the unchanged network."""

    def __init__(self, weight: Tensor, rank: int) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(rank, weight.shape[1]) / weight.shape[1] ** 0.5)
        self.b = nn.Parameter(torch.zeros(weight.shape[0], rank))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.b @ self.a


def add_lora(network: nn.Module, rank: int, name: str) -> None:
    """Freeze a transformer, and add trainable updates to the layers of its attention."""
    network.requires_grad_(False)
    layers = [
        layer
        for path, layer in network.named_modules()
        if isinstance(layer, nn.Linear) and "attn" in path and path.rpartition(".")[2] in _ADAPTED
    ]
    if not layers:
        raise ConfigError(f"model.lora_rank: {name} has no attention layers. Use 0, or a vision transformer of timm.")
    for layer in layers:
        parametrize.register_parametrization(layer, "weight", LowRankUpdate(layer.weight, rank))


def merge_lora(network: nn.Module) -> None:
    """Replace each adapted layer by a plain one with the sum, as a file without nearkin needs it."""
    # Not by torch's remove_parametrizations, which also changes the class that copies of the layer share.
    for parent in list(network.modules()):
        for name, layer in parent.named_children():
            if isinstance(layer, nn.Linear) and parametrize.is_parametrized(layer, "weight"):
                plain = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
                plain.weight = nn.Parameter(layer.weight.detach(), requires_grad=False)
                plain.bias = layer.bias
                setattr(parent, name, plain)
