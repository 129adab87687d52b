"""Objective: a loss with its settings, its learned parameters, an optional miner and an optional memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nearkin._common.registry import is_number, to_python_scalar
from nearkin.errors import ConfigError, DataError
from nearkin.losses._targets import is_label_matrix, label_levels, own_pairs
from nearkin.losses.classes import class_similarity
from nearkin.losses.miners import MINERS, Miner
from nearkin.losses.registry import LOSSES, LearnedScalar, Loss, Param, Reduction
from nearkin.ops.checks import check_range, on_host
from nearkin.ops.geometry import full_precision
from nearkin.ops.pairs import Pairs, as_batch, as_labels, join, select_pairs


class Objective(nn.Module):
    """A loss as a module: `objective(emb, labels)` returns a 0-dim tensor.

    The parameters that the loss declares (`proxies`, `weight`, ...) are attributes of the module.

    Args:
        name: A registered loss, for example "proxy_anchor" (`nearkin losses` lists them).
        num_classes: Number of training classes; required by losses with class parameters.
        dim: Embedding dimensions; required by losses with class parameters and by a memory.
        miner: A registered miner or any function Pairs -> Pairs; for pair losses only.
        miner_settings: Settings of the miner, for example {"epsilon": 0.2}.
        memory: Number of earlier embeddings used as extra references (cross-batch memory); for pair losses only.
        reduction: "mean" (as the loss defines it), "sum", "none", or "nonzero" (the mean over values that are not 0).
        class_weights: [C] factor on the values of the samples of each class; for losses with a value per sample.
        matryoshka_dims: Embedding sizes to train at once (Matryoshka): the loss is summed over emb[:, :size].
        chunk_size: Anchors whose pairs are in memory at a time; 0 for all. For pair losses on very large batches: the
            pairs are computed again in the backward pass.
        **settings: Settings of the loss, for example alpha=32.0.

    Raises:
        ConfigError: A name, setting or size is unknown, missing or illegal.

    Example:
        >>> objective = Objective("proxy_anchor", num_classes=3, dim=8, alpha=32.0)
        >>> objective.proxies.shape
        torch.Size([3, 8])
        >>> loss = objective(torch.randn(4, 8), torch.tensor([0, 0, 1, 2]))
    """

    proxies: nn.Parameter
    class_weights: Tensor | None
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
        class_weights: Tensor | Sequence[float] | None = None,
        matryoshka_dims: Sequence[int] = (),
        chunk_size: int = 0,
        **settings: Any,
    ) -> None:
        super().__init__()
        self.name = LOSSES[name].name
        merged = {**self.loss.settings, **self.loss.check(settings)}
        self.loss_kwargs = {k: v for k, v in merged.items() if k in self.loss.loss_kwargs}
        self.builder_kwargs = {k: v for k, v in merged.items() if k in self.loss.inputs.builder_kwargs}
        self.loss.check_reduction(reduction)
        self.reduction: Reduction = reduction
        self.num_classes = None if num_classes is None else _as_int("num_classes", num_classes)
        self.dim = None if dim is None else _as_int("dim", dim)
        self.matryoshka_dims = _check_matryoshka_dims(matryoshka_dims, self.dim)
        self.chunk_size = _as_int("chunk_size", chunk_size, "a number of anchors, 0 or more", minimum=0)
        if self.chunk_size and not (self.loss.inputs.memory and self.loss.inputs.by_anchor):
            raise ConfigError(f"{self.name} cannot be computed by chunks of anchors. Leave chunk_size at 0.")
        if self.chunk_size and memory:  # the memory has changed when a chunk is computed again
            raise ConfigError("chunk_size: cannot be combined with a memory. Leave one of them at 0.")
        self.miner, self.miner_settings = miner, self._check_miner(miner, miner_settings or {})
        self._create_parameters()
        self._create_memory(memory)
        weights = None if class_weights is None else torch.as_tensor(class_weights, dtype=torch.get_default_dtype())
        self.register_buffer("class_weights", weights)
        if weights is not None and (weights.dim() != 1 or len(weights) != (self.num_classes or len(weights))):
            raise ConfigError(f"class_weights: expected one number per class, got shape {list(weights.shape)}.")
        self._check_weights(weights)

    @property
    def loss(self) -> Loss:
        """The registered loss."""
        # Looked up, not stored: a module without functions can be pickled.
        return LOSSES[self.name]

    def forward(
        self,
        emb: Tensor,
        labels: Any = None,
        *constants: Tensor,
        refs: Tensor | None = None,
        ref_labels: Any = None,
        pairs: Sequence[Tensor] | None = None,
        weights: Tensor | None = None,
    ) -> Tensor:
        """Compute the loss of a batch.

        Args:
            emb: [N, D] embeddings.
            labels: [N] integers. Pair losses also take bool [N, T], several labels per sample (positives share one),
                and integers [N, L], the labels at each level of a hierarchy (the loss is the mean over levels).
            *constants: Tensors that the loss declares, as `pce` does probabilities.
            refs: [M, D] references instead of the batch itself, as of a second tower; for pair losses only. No pair is
                excluded: an anchor that is among them is its own positive.
            ref_labels: [M] their labels.
            pairs: Your own pairs instead of those of the labels, as masks or indices; see `nearkin.ops.select_pairs`.
                For pair losses only; labels are then not needed.
            weights: [N] factor on the value of each sample.

        Returns:
            The loss, 0-dim unless the reduction is "none".
        """
        self._check_constants(constants)
        if is_label_matrix(labels, self.loss) or pairs is not None:
            if self.memory_size or self.chunk_size:
                raise ConfigError(f"{self.name}: several labels or own pairs exclude a memory and chunk_size.")
            if pairs is None and labels.dtype != torch.bool:
                options: dict[str, Any] = {"refs": refs, "weights": weights}
                levels = label_levels(labels, ref_labels)
                return torch.stack([self(emb, level, ref_labels=other, **options) for level, other in levels]).mean(0)
            pairs, labels, ref_labels = own_pairs(self.loss, emb, labels, refs, ref_labels, pairs)
        if labels is None:
            raise ConfigError(f"{self.name}: pass labels, or for a pair loss pairs=...")
        emb, labels = as_batch(emb, labels)
        sizes = self.matryoshka_dims or (emb.shape[1],)
        given = self._check_refs(refs, ref_labels, sizes)
        weights = self._check_weights(weights, labels)
        if self.dim is not None and emb.shape[1] != self.dim:
            raise DataError(f"{self.name}: expected embeddings of {self.dim} dimensions, got {emb.shape[1]}.")
        if self.matryoshka_dims and max(self.matryoshka_dims) > emb.shape[1]:
            raise DataError(
                f"matryoshka_dims: {max(self.matryoshka_dims)} exceeds the {emb.shape[1]} dimensions of the embeddings."
            )
        with full_precision(emb):
            parts = [
                self.loss.reduce(
                    self._values(emb[:, :size], labels, *constants, refs=given.get(size), pairs=pairs),
                    self.reduction,
                    weights,
                )
                for size in sizes
            ]
            loss = parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)
        if not on_host(emb):  # where nothing is checked NaN must reach the loss; a hinge would drop it
            loss = loss + (emb.detach() * 0).sum()
        if self.memory_size and self.training:
            self._update_memory(emb.detach(), labels)
        return loss

    def _check_weights(self, weights: Tensor | None, labels: Tensor | None = None) -> Tensor | None:
        """Return the weight of each sample, times that of its class; None without weights."""
        if weights is not None and not self.loss.has_sample_values:
            raise ConfigError(f"{self.name} has no value per sample that a weight could multiply.")
        if labels is None:
            return None
        if weights is not None and (not isinstance(weights, Tensor) or weights.shape != labels.shape):
            got = list(weights.shape) if isinstance(weights, Tensor) else type(weights).__name__
            raise DataError(f"weights: expected a tensor [{len(labels)}], one number per sample; got {got}.")
        if self.class_weights is None:
            return weights
        check_range(labels, labels, len(self.class_weights))
        return self.class_weights[labels] * (1.0 if weights is None else weights)

    def _check_refs(self, refs: Any, ref_labels: Any, sizes: Sequence[int]) -> dict[int, dict[str, Tensor]]:
        """Return the references for each size of the embeddings; nothing without references."""
        if refs is None and ref_labels is None:
            return {}
        if refs is None or ref_labels is None:
            raise ConfigError(f"{self.name}: pass refs and ref_labels together, got only one of them.")
        if not self.loss.inputs.memory:
            raise ConfigError(f"{self.name} cannot use references: it compares the batch with itself or with classes.")
        if self.memory_size or self.chunk_size:
            raise ConfigError(f"{self.name}: refs cannot be combined with a memory or with chunk_size.")
        refs, ref_labels = as_batch(refs, ref_labels, what="refs")
        cut = sizes if self.matryoshka_dims else [refs.shape[1]] * len(sizes)
        return {s: {"refs": refs[:, :c], "ref_labels": ref_labels} for s, c in zip(sizes, cut, strict=True)}

    def logits(self, emb: Tensor) -> Tensor:
        """Compute how strongly each training class is predicted: the logits of a softmax over the classes.

        They are those of the loss without margins: cosines times its scale, or the output of its linear head.

        Args:
            emb: [N, D] embeddings.

        Returns:
            [N, C].

        Raises:
            ConfigError: The loss has no parameters of classes.

        Example:
            >>> objective = Objective("cosface", num_classes=3, dim=8, scale=10.0)
            >>> objective.logits(torch.randn(4, 8)).shape
            torch.Size([4, 3])
        """
        if self.loss.inputs.pairs or not any("C" in param.shape for param in self.loss.inputs.params):
            raise ConfigError(f"{self.name} learns nothing about classes: it has no logits. Search an index instead.")
        emb, labels = as_batch(emb, torch.zeros(len(emb), dtype=torch.int64))
        with full_precision(emb):
            sim = self._build_classes(emb, labels).sim
        kwargs = self.loss_kwargs
        if sim.dim() == 3:
            sim = class_similarity(sim, kwargs["gamma"]) if "gamma" in kwargs else sim.amax(2)
        scale = kwargs.get("scale", kwargs.get("alpha", 1 / kwargs["temperature"] if "temperature" in kwargs else 1.0))
        return cast(Tensor, sim * scale)

    @torch.no_grad()
    def predict(self, emb: Tensor) -> Tensor:
        """Return the most likely training class of each embedding [N]; see `logits`."""
        return self.logits(emb).argmax(1)

    def _values(
        self,
        emb: Tensor,
        labels: Tensor,
        *constants: Tensor,
        refs: dict[str, Tensor] | None,
        pairs: Sequence[Tensor] | None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Compute the loss before it is reduced."""
        inputs = self.loss.inputs
        if inputs.dropout is not None:
            emb = nn.functional.dropout(emb, self.builder_kwargs[inputs.dropout], self.training)
        if self.chunk_size:
            return self._compute_by_chunks(emb, labels)
        if refs is not None or pairs is not None:
            built = inputs.build(emb, labels, **(refs or {}), **inputs.build_kwargs(self.builder_kwargs))
            built = self._mine(built if pairs is None else select_pairs(built, pairs))
        else:
            built = self._build_pairs(emb, labels) if inputs.pairs else self._build_classes(emb, labels, *constants)
        return self._compute(
            built, self._updated_buffers(built, is_last=emb.shape[1] == (self.matryoshka_dims or emb.shape[1:])[-1])
        )

    @torch.no_grad()
    def _updated_buffers(self, built: Any, is_last: bool) -> dict[str, Tensor]:
        """Return the buffers of the loss, in training after its update; it is stored once per batch."""
        inputs = self.loss.inputs
        state: dict[str, Tensor] = {buffer.name: getattr(self, buffer.name) for buffer in inputs.buffers}
        if inputs.update is not None and self.training:
            new = inputs.update(built, state, self.loss_kwargs)
            if is_last:
                self._store(new)
            state |= new
        return state

    def _store(self, values: dict[str, Tensor]) -> None:
        for name, value in values.items():
            cast(Tensor, getattr(self, name)).copy_(value)

    @torch.no_grad()
    def refresh(self, labels: Tensor | Sequence[int], emb: Tensor | None = None) -> None:
        """Recompute the state that describes the whole training set, as class counts; once per epoch is enough.

        Losses without such state (`Inputs.refresh`) are left unchanged.

        Args:
            labels: Labels of the training set [n].
            emb: Its embeddings [n, D], for losses that use them.

        Raises:
            ConfigError: The loss needs embeddings, and none were passed.
        """
        inputs = self.loss.inputs
        if inputs.refresh is None:
            return
        if inputs.refresh_embeddings and emb is None:
            raise ConfigError(f"{self.name}: pass the embeddings of the training set: objective.refresh(labels, emb).")
        labels = as_labels(labels) if emb is None else as_batch(emb, labels)[1]
        assert self.num_classes is not None
        check_range(labels, labels, self.num_classes)
        self._store(inputs.refresh(emb, labels, self.num_classes))

    def _compute(self, built: Any, state: dict[str, Tensor]) -> Tensor | tuple[Tensor, Tensor]:
        learned = {scalar.name: value for scalar, value in self._learned_scalars()}
        return self.loss.function(built, **{**self.loss_kwargs, **learned}, **state)

    def _compute_by_chunks(self, emb: Tensor, labels: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        def compute(emb: Tensor, rows: Tensor) -> Tensor | tuple[Tensor, Tensor]:
            return self._compute(self._build_pairs(emb, labels, rows), {})

        chunks = torch.split(torch.arange(len(emb), device=emb.device), self.chunk_size)
        results: list[Any] = [checkpoint(compute, emb, rows, use_reentrant=False) for rows in chunks]
        if not isinstance(results[0], tuple):
            return torch.cat(results)
        values, counts = zip(*results, strict=True)
        return torch.cat(values), torch.stack(counts).sum()

    def _build_pairs(self, emb: Tensor, labels: Tensor, rows: Tensor | None = None) -> Pairs:
        """Pair the batch, or the anchors in these rows of it, with the batch and the memory; then mine."""
        build, kwargs = self.loss.inputs.build, self.loss.inputs.build_kwargs(self.builder_kwargs)
        anchors = (emb, labels) if rows is None else (emb[rows], labels[rows])
        batch = {} if rows is None else {"refs": emb, "ref_labels": labels, "self_columns": rows}
        pairs = cast(Pairs, build(*anchors, **batch, **kwargs))
        if self.memory_size:
            # On the host only the filled rows of the memory are compared; elsewhere all, as shapes must not change.
            filled = self.memory_state[0]
            used = slice(int(filled) if on_host(emb) else self.memory_size)
            refs, ref_labels = self.memory_emb[used, : emb.shape[1]].to(emb.dtype), self.memory_labels[used]
            if len(refs):
                earlier = build(*anchors, refs=refs, ref_labels=ref_labels, **kwargs)
                pairs = join(pairs, earlier, torch.arange(len(refs), device=emb.device) < filled)
        return self._mine(pairs)

    def _mine(self, pairs: Pairs) -> Pairs:
        return pairs if self.miner is None else _find_miner(self.miner)(pairs, **self.miner_settings)

    def _build_classes(self, emb: Tensor, labels: Tensor, *constants: Tensor) -> Any:
        inputs, dim = self.loss.inputs, emb.shape[1]
        params = [value[..., :dim] if "D" in param.shape else value for param, value in self._params()]
        kwargs = inputs.build_kwargs(self.builder_kwargs)
        if inputs.takes_num_classes:
            kwargs["num_classes"] = self.num_classes
        return inputs.build(emb, labels, *params, *constants, **kwargs)

    def _check_constants(self, constants: tuple[Any, ...]) -> None:
        inputs = self.loss.inputs
        call = f"objective({', '.join(['emb', 'labels', *inputs.constants])})"
        if len(constants) > len(inputs.constants):
            hint = " To mine pairs, pass miner=... to nk.Objective." if inputs.pairs else ""
            raise ConfigError(f"{self.name}: expected {call}, got {2 + len(constants)} arguments.{hint}")
        for name, value in zip(inputs.constants, constants, strict=False):
            if value is not None and not isinstance(value, Tensor):
                raise ConfigError(f"{self.name}: {name} must be a tensor, got {type(value).__name__}. Call {call}.")

    def _check_miner(self, miner: str | Miner | None, settings: dict[str, Any]) -> dict[str, Any]:
        if miner is None:
            if settings:
                raise ConfigError(f"miner_settings: {', '.join(settings)} given without a miner. Pass miner=...")
            return {}
        if not self.loss.inputs.pairs:
            raise ConfigError(f"{self.name} compares samples with classes, not with each other: it takes no miner.")
        check = getattr(_find_miner(miner), "check", dict)  # an unregistered function checks its settings itself
        return cast(dict[str, Any], check(settings))

    def _create_parameters(self) -> None:
        inputs = self.loss.inputs
        sizes = {"C": self.num_classes, "D": self.dim}
        sizes |= {letter: self.builder_kwargs[setting] for letter, setting in inputs.dims.items()}
        for state in inputs.state:
            for letter, argument in (("C", "num_classes"), ("D", "dim")):
                if letter in state.shape and sizes[letter] is None:
                    verb = "learns" if isinstance(state, Param) else "stores"
                    raise ConfigError(f"{self.name} {verb} {state.name} for every class: pass {argument}=...")
        for buffer in inputs.buffers:
            shape = [cast(int, sizes[letter]) for letter in buffer.shape]
            self.register_buffer(buffer.name, torch.full(shape, buffer.init))
        for param in inputs.params:
            value = torch.zeros([cast(int, sizes[letter]) for letter in param.shape])
            if param.init == "normal":
                # The variance of the published proxy losses: it sets how far one step turns a proxy.
                nn.init.normal_(value, std=math.sqrt(2.0 / len(value)))
            self.register_parameter(param.name, nn.Parameter(value))
        for scalar in inputs.learned_scalars:
            if scalar.switch is None or self.builder_kwargs[scalar.switch]:
                initial = torch.tensor(float(self.loss_kwargs[scalar.name]))
                self.register_parameter(scalar.name, nn.Parameter(initial))

    def _params(self) -> Iterable[tuple[Param, Tensor]]:
        return [(param, cast(Tensor, getattr(self, param.name))) for param in self.loss.inputs.params]

    def _learned_scalars(self) -> Iterable[tuple[LearnedScalar, Tensor]]:
        scalars = [scalar for scalar in self.loss.inputs.learned_scalars if scalar.name in self._parameters]
        return [(scalar, cast(Tensor, getattr(self, scalar.name))) for scalar in scalars]

    @torch.no_grad()
    def init_proxies(self, emb: Tensor, labels: Tensor) -> None:
        """Set the proxies to the mean direction of each class's embeddings.

        A good initial network would be damaged by random proxies. Several proxies of a class keep their random offsets
        around the mean; a class without embeddings keeps its proxies. Losses without proxies are left unchanged.
        """
        if "proxies" not in self._parameters:
            return
        sums = torch.zeros(len(self.proxies), emb.shape[1], dtype=torch.float64)
        means = nn.functional.normalize(
            sums.index_add_(0, labels.cpu(), nn.functional.normalize(emb.cpu().double(), dim=1)), dim=1
        ).to(self.proxies)
        if self.proxies.ndim == 2:
            present = means.norm(dim=1) > 0.5  # a proxy at 0 has no direction, and would never move again
            self.proxies[present] = means[present]
        else:
            offsets = nn.functional.normalize(self.proxies, dim=-1)
            self.proxies.copy_(nn.functional.normalize(means[:, None] + 0.1 * offsets, dim=-1))

    def param_groups(self, lr: float) -> list[dict[str, Any]]:
        """Return one optimizer group per parameter, with its "name", given the learning rate of the network."""
        groups: list[dict[str, Any]] = []
        for param, value in self._params():
            groups.append({"name": param.name, "params": [value], "lr": lr * param.lr})
            if not param.decay:
                groups[-1]["weight_decay"] = 0.0
        for scalar, value in self._learned_scalars():
            groups.append({"name": scalar.name, "params": [value], "lr": scalar.lr * lr, "weight_decay": 0.0})
        return groups

    def _create_memory(self, size: int) -> None:
        size = _as_int("memory", size, "a number of embeddings, 0 or more", minimum=0)
        if size and not self.loss.inputs.memory:
            raise ConfigError(f"{self.name} cannot use references from earlier batches. Leave memory at 0.")
        if size and self.dim is None:
            raise ConfigError("memory: pass dim=..., the dimensions of the stored embeddings.")
        self.memory_size = size
        if size:
            self.register_buffer("memory_emb", torch.zeros(size, cast(int, self.dim)))
            self.register_buffer("memory_labels", torch.zeros(size, dtype=torch.int64))
            # The number of filled rows and the next row to write: part of the state, so that a run resumes exactly.
            self.register_buffer("memory_state", torch.zeros(2, dtype=torch.int64))

    def _update_memory(self, emb: Tensor, labels: Tensor) -> None:
        first = max(0, len(emb) - self.memory_size)  # not [-size:]: some devices refuse a start before the first row
        emb, labels = emb[first:], labels[first:]
        if self.memory_emb.dtype != emb.dtype:  # the memory follows the model
            self.memory_emb = self.memory_emb.to(emb.dtype)
        filled, start = self.memory_state.unbind()
        rows = (start + torch.arange(len(emb), device=emb.device)) % self.memory_size
        self.memory_emb[rows] = emb
        self.memory_labels[rows] = labels
        end = (start + len(emb)) % self.memory_size
        self.memory_state.copy_(torch.stack([(filled + len(emb)).clamp(max=self.memory_size), end]))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        saved = state_dict.get(f"{prefix}memory_emb")
        if self.memory_size and isinstance(saved, Tensor):
            self.memory_emb = self.memory_emb.to(saved.dtype)  # copying into another dtype would round
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        """Return the name and the settings, for repr()."""
        options = ("miner", "memory_size", "matryoshka_dims", "chunk_size")
        extras = {
            name.removesuffix("_size") if name == "memory_size" else name: getattr(self, name) for name in options
        }
        shown = {**self.loss_kwargs, **self.builder_kwargs, **{k: v for k, v in extras.items() if v}}
        return ", ".join([repr(self.name), *(f"{k}={v!r}" for k, v in shown.items())])


def _find_miner(miner: str | Miner) -> Miner:
    return MINERS[miner] if isinstance(miner, str) else miner


def _as_int(name: str, value: Any, expected: str = "an integer above 0", minimum: int = 1) -> int:
    """Return an integer of any type, NumPy's included, as an int; or raise."""
    number = to_python_scalar(value)
    if not is_number(number, int) or number < minimum:
        raise ConfigError(f"{name}: expected {expected}, got {value!r}.")
    return cast(int, number)


def _check_matryoshka_dims(matryoshka_dims: Sequence[int], dim: int | None) -> tuple[int, ...]:
    expected = f"sizes from 1 to {dim or 'the embedding size'}"
    sizes = tuple(_as_int("matryoshka_dims", size, expected) for size in matryoshka_dims)
    if dim is not None and max(sizes, default=0) > dim:
        raise ConfigError(f"matryoshka_dims: expected {expected}, got {max(sizes)}.")
    return sizes
