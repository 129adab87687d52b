"""Objective: a loss with its settings, its learned class parameters, an optional miner and an optional memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from nearkin import losses as _losses
from nearkin.errors import ConfigError, DataError
from nearkin.losses.register import LOSSES, Param, Reduction
from nearkin.miners import MINERS, Miner
from nearkin.pairs import Pairs, as_batch, full_precision

assert _losses  # importing the package registers every loss


class Objective(nn.Module):
    """A loss by name, as a module: `objective(emb, labels)` is a 0-dim tensor.

    name          a registered loss, for example "proxy_anchor" (`nearkin losses` lists them)
    num_classes   training classes; needed by losses with class parameters, ignored by the others
    dim           embedding dimensions; needed by losses with class parameters and by a memory
    miner         a registered miner or any function Pairs -> Pairs; pair losses only
    memory        how many earlier embeddings to keep as extra references (cross-batch memory); pair losses only
    reduction     "mean" (as the loss defines it), "sum" or "none"
    prefixes      embedding sizes to train at once (Matryoshka): the loss is summed over emb[:, :size]
    settings      of the loss, for example alpha=32.0; an unknown one is refused

    >>> objective = Objective("proxy_anchor", num_classes=3, dim=8, alpha=32.0)
    >>> objective.proxies.shape
    torch.Size([3, 8])
    >>> loss = objective(torch.randn(4, 8), torch.tensor([0, 0, 1, 2]))
    """

    def __init__(
        self,
        name: str,
        *,
        num_classes: int | None = None,
        dim: int | None = None,
        miner: str | Miner | None = None,
        miner_settings: dict[str, Any] | None = None,
        memory: int = 0,
        reduction: Reduction = "mean",
        prefixes: Sequence[int] = (),
        **settings: Any,
    ) -> None:
        super().__init__()
        self.loss = LOSSES[name]
        self.loss.check(settings)
        merged = {**self.loss.settings, **settings}
        self.settings = {k: v for k, v in merged.items() if k in self.loss.own}
        self.outer = {k: v for k, v in merged.items() if k in self.loss.inputs.outer}
        if reduction not in self.loss.reductions:
            allowed = " or ".join(repr(r) for r in self.loss.reductions)
            raise ConfigError(f"{name}: reduction must be {allowed}, got {reduction!r}.")
        self.reduction: Reduction = reduction
        self.num_classes, self.dim = num_classes, dim
        self.prefixes = _check_prefixes(prefixes, dim)
        self.miner = self._resolve_miner(miner)
        self.miner_settings = dict(miner_settings or {})
        self._make_params()
        self._make_memory(memory)

    def forward(self, emb: Tensor, labels: Tensor | Sequence[int], *given: Tensor) -> Tensor:
        """The loss of a batch: emb [N, D] of any float dtype, labels [N] of any integer dtype.

        `given` passes on constants that a loss takes beside them (the class probabilities of `pce`).
        """
        emb, labels = as_batch(emb, labels)
        if self.dim is not None and emb.shape[1] != self.dim:
            raise DataError(f"{self.loss.name}: embeddings have {emb.shape[1]} dimensions, the objective {self.dim}.")
        with full_precision(emb):
            parts = [self._loss(emb[:, :size], labels, *given) for size in self.prefixes or (emb.shape[1],)]
            loss = parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)
        if self.memory_size and self.training:
            self._remember(emb.detach(), labels)
        return loss

    def _loss(self, emb: Tensor, labels: Tensor, *given: Tensor) -> Tensor:
        settings = {**self.settings, **self._learned_settings()}
        read = self._pairs(emb, labels) if self.loss.inputs.pairs else self._to_classes(emb, labels, *given)
        return self.loss.reduce(self.loss.function(read, **settings), self.reduction)

    # --- references: the batch, the memory, the class parameters ------------------------------------------------------

    def _pairs(self, emb: Tensor, labels: Tensor) -> Pairs:
        outer = {k: v for k, v in self.outer.items() if not k.startswith("learn_")}
        pairs = cast(Pairs, self.loss.inputs.build(emb, labels, *self._references(emb, labels), **outer))
        return self.miner(pairs, **self.miner_settings) if self.miner else pairs

    def _references(self, emb: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        return ()

    def _to_classes(self, emb: Tensor, labels: Tensor, *given: Tensor) -> Any:
        if self.outer.get("dropout"):
            emb = nn.functional.dropout(emb, self.outer["dropout"], self.training)
        width = emb.shape[1]
        params = [p[..., :width] if "D" in spec.shape else p for spec, p in self._class_params()]
        return self.loss.inputs.build(emb, labels, *params, *given)

    # --- learned state ------------------------------------------------------------------------------------------------

    def _make_params(self) -> None:
        specs = self.loss.inputs.params
        for missing in [k for k in ("num_classes", "dim") if specs and getattr(self, k) is None]:
            raise ConfigError(f"{self.loss.name} learns one vector or more per class: pass {missing}=...")
        for key in ("num_classes", "dim"):
            value = getattr(self, key)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ConfigError(f"{key} must be a whole number above 0, got {value!r}.")
        sizes = {"C": self.num_classes, "D": self.dim, "K": self.outer.get("centers")}
        for spec in specs:
            value = torch.zeros([cast(int, sizes[letter]) for letter in spec.shape])
            if spec.init == "normal":
                # The variance of the published proxy losses: it sets how far one step turns a proxy.
                nn.init.normal_(value, std=math.sqrt(2.0 / len(value)))
            self.register_parameter(spec.name, nn.Parameter(value))
        if self.outer.get("learn_beta"):
            self.beta = nn.Parameter(torch.tensor(float(self.settings["beta"])))

    def _class_params(self) -> Iterable[tuple[Param, Tensor]]:
        return [(spec, cast(Tensor, getattr(self, spec.name))) for spec in self.loss.inputs.params]

    def _learned_settings(self) -> dict[str, Tensor]:
        return {"beta": self.beta} if self.outer.get("learn_beta") else {}

    def parameter_groups(self, lr: float) -> list[dict[str, Any]]:
        """Optimizer groups for the class parameters, given the network's learning rate.

        Proxies want a hundred times the rate of the network; biases, centres and boundaries no weight decay.

        >>> objective = Objective("proxy_anchor", num_classes=3, dim=8)
        >>> [(g["name"], g["lr"]) for g in objective.parameter_groups(lr=1e-4)]
        [('proxies', 0.01)]
        """
        groups = []
        for spec, value in self._class_params():
            group = {"name": spec.name, "params": [value], "lr": lr * spec.lr}
            groups.append(group if spec.decay else {**group, "weight_decay": 0.0})
        if self.outer.get("learn_beta"):
            groups.append({"name": "beta", "params": [self.beta], "lr": 50 * lr, "weight_decay": 0.0})
        return groups

    # --- memory -------------------------------------------------------------------------------------------------------

    def _make_memory(self, size: int) -> None:
        self.memory_size = size

    def _remember(self, emb: Tensor, labels: Tensor) -> None:
        raise NotImplementedError

    def _resolve_miner(self, miner: str | Miner | None) -> Callable[..., Pairs] | None:
        if miner is None:
            return None
        if not self.loss.inputs.pairs:
            raise ConfigError(f"{self.loss.name} compares with classes, not with pairs: it takes no miner.")
        return MINERS[miner] if isinstance(miner, str) else miner

    def extra_repr(self) -> str:
        settings = {**self.settings, **self.outer}
        return ", ".join([repr(self.loss.name), *(f"{k}={v}" for k, v in settings.items())])


def _check_prefixes(prefixes: Sequence[int], dim: int | None) -> tuple[int, ...]:
    for size in prefixes:
        if not isinstance(size, int) or size < 1 or (dim is not None and size > dim):
            raise ConfigError(f"prefixes: expected sizes from 1 to {dim or 'the embedding size'}, got {size!r}.")
    return tuple(prefixes)
