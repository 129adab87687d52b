"""Objective: a loss with its settings, its learned class parameters, an optional miner and an optional memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from nearkin._common.registry import is_number, to_python_scalar
from nearkin.errors import ConfigError, DataError
from nearkin.losses.miners import MINERS, Miner
from nearkin.losses.registry import LOSSES, Loss, Param, Reduction
from nearkin.ops.geometry import full_precision
from nearkin.ops.pairs import Pairs, as_batch


class Objective(nn.Module):
    """A loss by name, as a module: `objective(emb, labels)` is a 0-dim tensor.

    name            a registered loss, for example "proxy_anchor" (`nearkin losses` lists them)
    num_classes     training classes; needed by losses with class parameters, ignored by most others
    dim             embedding dimensions; needed by losses with class parameters and by a memory
    miner           a registered miner or any function Pairs -> Pairs; pair losses only
    miner_settings  for example {"epsilon": 0.2}
    memory          how many earlier embeddings to keep as extra references (cross-batch memory); pair losses only
    reduction       "mean" (as the loss defines it), "sum" or "none"
    prefixes        embedding sizes to train at once (Matryoshka): the loss is summed over emb[:, :size]
    settings        of the loss, for example alpha=32.0; an unknown one is refused

    >>> objective = Objective("proxy_anchor", num_classes=3, dim=8, alpha=32.0)
    >>> objective.proxies.shape
    torch.Size([3, 8])
    >>> loss = objective(torch.randn(4, 8), torch.tensor([0, 0, 1, 2]))
    """

    # Present where the loss has them: [C, D] or [C, K, D]; [C, D] and [C]; [C, D]; 0-dim.
    proxies: nn.Parameter
    weight: nn.Parameter
    bias: nn.Parameter
    centers: nn.Parameter
    beta: nn.Parameter
    memory_emb: Tensor
    memory_labels: Tensor
    memory_state: Tensor

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
        self.name = LOSSES[name].name
        merged = {**self.loss.settings, **self.loss.check(settings)}
        self.settings = {k: v for k, v in merged.items() if k in self.loss.own}
        self.outer = {k: v for k, v in merged.items() if k in self.loss.inputs.outer}
        self.loss.check_reduction(reduction)
        self.reduction: Reduction = reduction
        self.num_classes = None if num_classes is None else _whole("num_classes", num_classes)
        self.dim = None if dim is None else _whole("dim", dim)
        self.prefixes = _check_prefixes(prefixes, self.dim)
        self.miner, self.miner_settings = miner, self._check_miner(miner, miner_settings or {})
        self._make_params()
        self._make_memory(memory)

    @property
    def loss(self) -> Loss:
        # Looked up, not kept: a module that holds no function can be pickled.
        return LOSSES[self.name]

    def forward(self, emb: Tensor, labels: Tensor | Sequence[int], *given: Tensor) -> Tensor:
        """The loss of a batch: emb [N, D] of any float dtype, labels [N] of any integer dtype.

        `given` passes on constants that a loss takes beside them (the class probabilities of `pce`).
        """
        emb, labels = as_batch(emb, labels)
        if self.dim is not None and emb.shape[1] != self.dim:
            raise DataError(f"{self.name}: the embeddings have {emb.shape[1]} dimensions, the objective {self.dim}.")
        if self.prefixes and max(self.prefixes) > emb.shape[1]:
            raise DataError(f"prefixes: {max(self.prefixes)} is more than the {emb.shape[1]} dimensions given.")
        with full_precision(emb):
            parts = [self._loss(emb[:, :size], labels, *given) for size in self.prefixes or (emb.shape[1],)]
            loss = parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)
        if self.memory_size and self.training:
            self._remember(emb.detach(), labels)
        return loss

    def _loss(self, emb: Tensor, labels: Tensor, *given: Tensor) -> Tensor:
        settings = {**self.settings, "beta": self.beta} if self.outer.get("learn_beta") else self.settings
        read = self._pairs(emb, labels) if self.loss.inputs.pairs else self._to_classes(emb, labels, *given)
        return self.loss.reduce(self.loss.function(read, **settings), self.reduction)

    # --- references: the batch, the memory, the class parameters ------------------------------------------------------

    def _pairs(self, emb: Tensor, labels: Tensor) -> Pairs:
        options = {k: v for k, v in self.outer.items() if k != "learn_beta"}
        filled = int(self.memory_state[0]) if self.memory_size else 0
        if filled:
            # The batch itself comes first, with its gradient; its own column is removed by index.
            options["refs"] = torch.cat([emb, self.memory_emb[:filled, : emb.shape[1]].to(emb.dtype)])
            options["ref_labels"] = torch.cat([labels, self.memory_labels[:filled]])
            options["self_columns"] = torch.arange(len(emb), device=emb.device)
        pairs = cast(Pairs, self.loss.inputs.build(emb, labels, **options))
        if self.miner is None:
            return pairs
        return _find_miner(self.miner)(pairs, **self.miner_settings)

    def _to_classes(self, emb: Tensor, labels: Tensor, *given: Tensor) -> Any:
        if self.outer.get("dropout"):
            emb = nn.functional.dropout(emb, self.outer["dropout"], self.training)
        params = [value[..., : emb.shape[1]] if "D" in spec.shape else value for spec, value in self._class_params()]
        count = {"num_classes": self.num_classes} if self.loss.inputs.counts_classes else {}
        return self.loss.inputs.build(emb, labels, *params, *given, **count)

    def _check_miner(self, miner: str | Miner | None, settings: dict[str, Any]) -> dict[str, Any]:
        if miner is None:
            if settings:
                raise ConfigError(f"miner_settings: there is no miner to take {', '.join(settings)}. Pass miner=...")
            return {}
        if not self.loss.inputs.pairs:
            raise ConfigError(f"{self.name} compares with classes, not with pairs: it takes no miner.")
        check = getattr(_find_miner(miner), "check", dict)  # a function of the user's own knows its settings itself
        return cast(dict[str, Any], check(settings))

    # --- learned state ------------------------------------------------------------------------------------------------

    def _make_params(self) -> None:
        sizes = {"C": self.num_classes, "D": self.dim, "K": self.outer.get("centers")}
        for spec in self.loss.inputs.params:
            for letter, argument in (("C", "num_classes"), ("D", "dim")):
                if letter in spec.shape and sizes[letter] is None:
                    raise ConfigError(f"{self.name} learns {spec.name} for every class: pass {argument}=...")
            value = torch.zeros([cast(int, sizes[letter]) for letter in spec.shape])
            if spec.init == "normal":
                # The variance of the published proxy losses: it sets how far one step turns a proxy.
                nn.init.normal_(value, std=math.sqrt(2.0 / len(value)))
            self.register_parameter(spec.name, nn.Parameter(value))
        if self.outer.get("learn_beta"):
            self.beta = nn.Parameter(torch.tensor(float(self.settings["beta"])))

    def _class_params(self) -> Iterable[tuple[Param, Tensor]]:
        return [(spec, cast(Tensor, getattr(self, spec.name))) for spec in self.loss.inputs.params]

    @torch.no_grad()
    def init_proxies(self, emb: Tensor, labels: Tensor) -> None:
        """Put the proxies where their classes are: at the mean direction of each class's embeddings.

        For a network that starts well, proxies drawn at random would first pull it apart. Several proxies of a class
        keep their random offsets around the mean; a class without embeddings keeps its proxies, and losses without
        proxies are left as they are.
        """
        if "proxies" not in dict(self.named_parameters()):
            return
        proxies = cast(Tensor, self.proxies)
        sums = torch.zeros(len(proxies), emb.shape[1], dtype=torch.float64)
        means = nn.functional.normalize(
            sums.index_add_(0, labels.cpu(), nn.functional.normalize(emb.cpu().double(), dim=1)), dim=1
        ).to(proxies)
        if proxies.ndim == 2:
            known = means.norm(dim=1) > 0.5  # a proxy at 0 has no direction, and would never move again
            proxies[known] = means[known]
        else:
            offsets = nn.functional.normalize(proxies, dim=-1)
            proxies.copy_(nn.functional.normalize(means[:, None] + 0.1 * offsets, dim=-1))

    def parameter_groups(self, lr: float) -> list[dict[str, Any]]:
        """Optimizer groups for the class parameters, given the network's learning rate.

        Proxies want a hundred times the rate of the network; biases, centres and boundaries no weight decay.

        >>> objective = Objective("proxy_anchor", num_classes=3, dim=8)
        >>> [(g["name"], g["lr"]) for g in objective.parameter_groups(lr=1e-4)]
        [('proxies', 0.01)]
        """
        groups: list[dict[str, Any]] = []
        for spec, value in self._class_params():
            groups.append({"name": spec.name, "params": [value], "lr": lr * spec.lr})
            if not spec.decay:
                groups[-1]["weight_decay"] = 0.0
        if self.outer.get("learn_beta"):
            groups.append({"name": "beta", "params": [self.beta], "lr": 50 * lr, "weight_decay": 0.0})
        return groups

    # --- cross-batch memory -------------------------------------------------------------------------------------------

    def _make_memory(self, size: int) -> None:
        size = _whole("memory", size, "a number of embeddings, 0 or more", least=0)
        if size and not self.loss.inputs.memory:
            raise ConfigError(f"{self.name} has no use for references from earlier batches: leave memory at 0.")
        if size and self.dim is None:
            raise ConfigError("memory: pass dim=..., the size of the embeddings to keep.")
        self.memory_size = size
        if size:
            self.register_buffer("memory_emb", torch.zeros(size, cast(int, self.dim)))
            self.register_buffer("memory_labels", torch.zeros(size, dtype=torch.int64))
            # How many rows are filled, and which is written next: part of the state, so that a run resumes exactly.
            self.register_buffer("memory_state", torch.zeros(2, dtype=torch.int64))

    def _remember(self, emb: Tensor, labels: Tensor) -> None:
        emb, labels = emb[-self.memory_size :], labels[-self.memory_size :]
        if self.memory_emb.dtype != emb.dtype:  # the memory follows the model
            self.memory_emb = self.memory_emb.to(emb.dtype)
        filled, start = self.memory_state.tolist()
        rows = (start + torch.arange(len(emb), device=emb.device)) % self.memory_size
        self.memory_emb[rows] = emb
        self.memory_labels[rows] = labels
        after = [min(filled + len(emb), self.memory_size), (start + len(emb)) % self.memory_size]
        self.memory_state.copy_(torch.tensor(after))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        kept = state_dict.get(f"{prefix}memory_emb")
        if self.memory_size and isinstance(kept, Tensor):
            self.memory_emb = self.memory_emb.to(kept.dtype)  # copying into another dtype would round
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def extra_repr(self) -> str:
        extras = {"miner": self.miner, "memory": self.memory_size, "prefixes": self.prefixes}
        shown = {**self.settings, **self.outer, **{k: v for k, v in extras.items() if v}}
        return ", ".join([repr(self.name), *(f"{k}={v!r}" for k, v in shown.items())])


class WeightedSum(nn.Module):
    """Several objectives on one batch, each with a weight.

    >>> both = WeightedSum((1.0, Objective("proxy_anchor", num_classes=3, dim=8)), (0.1, Objective("contrastive")))
    >>> loss = both(torch.randn(4, 8), torch.tensor([0, 0, 1, 2]))
    >>> [g["name"] for g in both.parameter_groups(lr=1e-4)]
    ['0.proxies']
    """

    def __init__(self, *parts: tuple[float, Objective]) -> None:
        super().__init__()
        if not parts:
            raise ConfigError("WeightedSum: pass at least one (weight, objective).")
        self.weights = [float(weight) for weight, _ in parts]
        self.parts = nn.ModuleList(objective for _, objective in parts)

    def forward(self, emb: Tensor, labels: Tensor | Sequence[int]) -> Tensor:
        terms = [w * part(emb, labels) for w, part in zip(self.weights, self.parts, strict=True)]
        return torch.stack(terms).sum(0)

    def init_proxies(self, emb: Tensor, labels: Tensor) -> None:
        """Put the proxies of every part where their classes are."""
        for part in self.parts:
            cast(Objective, part).init_proxies(emb, labels)

    def parameter_groups(self, lr: float) -> list[dict[str, Any]]:
        """The groups of every part, their names led by its number."""
        parts = [cast(Objective, part) for part in self.parts]
        return [{**g, "name": f"{i}.{g['name']}"} for i, part in enumerate(parts) for g in part.parameter_groups(lr)]


def _find_miner(miner: str | Miner) -> Miner:
    return MINERS[miner] if isinstance(miner, str) else miner


def _whole(name: str, value: Any, what: str = "a whole number above 0", least: int = 1) -> int:
    """A whole number of any kind (NumPy's too) as an int, or an error."""
    number = to_python_scalar(value)
    if not is_number(number, int) or number < least:
        raise ConfigError(f"{name}: expected {what}, got {value!r}.")
    return cast(int, number)


def _check_prefixes(prefixes: Sequence[int], dim: int | None) -> tuple[int, ...]:
    what = f"sizes from 1 to {dim or 'the embedding size'}"
    sizes = tuple(_whole("prefixes", size, what) for size in prefixes)
    if dim is not None and max(sizes, default=0) > dim:
        raise ConfigError(f"prefixes: expected {what}, got {max(sizes)}.")
    return sizes
