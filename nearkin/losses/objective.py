"""Objective: a loss with its settings, its learned parameters, an optional miner and an optional memory."""

from __future__ import annotations  # torch 2.6 cannot compile nested functions with evaluated annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nearkin.errors import ConfigError, DataError
from nearkin.losses._targets import check_ref_labels, is_label_matrix, own_pairs
from nearkin.losses.classes import Classifier, class_similarity
from nearkin.losses.miners import MINERS, Miner
from nearkin.losses.objective_state import ObjectiveState, as_int
from nearkin.losses.registry import LOSSES, LearnedScalar, Param, Reduction
from nearkin.losses.regularizers import check_regularizers, regularization
from nearkin.ops.checks import check_range, on_host
from nearkin.ops.gather import all_gather_with_grad, gather_rows, is_gathered, rank, world_size
from nearkin.ops.geometry import full_precision, unit
from nearkin.ops.pairs import Pairs, as_batch, join, select_pairs


class Objective(ObjectiveState):
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
        regularizers: Weights of the regularisers to add, for example {"lp": 0.1}; see `nearkin.losses.REGULARIZERS`.
            They are computed on the whole batch, once, and added after the reduction.
        gather: In a process group of several ranks, compute the loss of the whole batch, gathered from all ranks, on
            each of them: its gradients, averaged over ranks as DistributedDataParallel does, equal those of one
            process. False: the batch is complete already, or is meant to be this rank's part. By default that is
            assumed too, with a warning if the embeddings do not come from `all_gather_with_grad`.
        **settings: Settings of the loss, for example alpha=32.0.

    Raises:
        ConfigError: A name, setting or size is unknown, missing or illegal.

    Example:
        >>> objective = Objective("proxy_anchor", num_classes=3, dim=8, alpha=32.0)
        >>> objective.proxies.shape
        torch.Size([3, 8])
        >>> loss = objective(torch.randn(4, 8), torch.tensor([0, 0, 1, 2]))
    """

    class_weights: Tensor | None

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
        regularizers: Mapping[str, float] | None = None,
        gather: bool | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        self.name = LOSSES[name].name
        merged = {**self.loss.settings, **self.loss.check(settings)}
        self.loss_kwargs = {k: v for k, v in merged.items() if k in self.loss.loss_kwargs}
        self.builder_kwargs = {k: v for k, v in merged.items() if k in self.loss.inputs.builder_kwargs}
        self.loss.check_reduction(reduction)
        self.reduction: Reduction = reduction
        self.gather = gather
        self.num_classes = None if num_classes is None else as_int("num_classes", num_classes)
        self.dim = None if dim is None else as_int("dim", dim)
        expected = f"sizes from 1 to {self.dim or 'the embedding size'}"
        self.matryoshka_dims = tuple(as_int("matryoshka_dims", size, expected) for size in matryoshka_dims)
        if self.dim is not None and max(self.matryoshka_dims, default=0) > self.dim:
            raise ConfigError(f"matryoshka_dims: expected {expected}, got {max(self.matryoshka_dims)}.")
        self.chunk_size = as_int("chunk_size", chunk_size, "a number of anchors, 0 or more", minimum=0)
        if self.chunk_size and not (self.loss.inputs.memory and self.loss.inputs.by_anchor):
            raise ConfigError(f"{self.name} cannot be computed by chunks of anchors. Leave chunk_size at 0.")
        if self.chunk_size and memory:  # the memory has changed when a chunk is computed again
            raise ConfigError("chunk_size: cannot be combined with a memory. Leave one of them at 0.")
        self.miner, self.miner_settings = miner, self._check_miner(miner, miner_settings or {})
        self._create_parameters()
        self._create_memory(memory)
        self.regularizers = check_regularizers(regularizers, self.name, reduction, self.class_vectors)
        weights = None if class_weights is None else torch.as_tensor(class_weights, dtype=torch.get_default_dtype())
        self.register_buffer("class_weights", weights)
        if weights is not None and (weights.dim() != 1 or len(weights) != (self.num_classes or len(weights))):
            raise ConfigError(f"class_weights: expected one number per class, got shape {list(weights.shape)}.")
        self._check_weights(weights)

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
        if self.gather:
            if pairs is not None:
                raise ConfigError(f"{self.name}: own pairs are of one rank's batch. Use gather=False, or labels.")
            emb, labels = all_gather_with_grad(emb, labels)
            if refs is not None and ref_labels is not None:
                refs, ref_labels = all_gather_with_grad(refs, ref_labels)
            constants = tuple(gather_rows(x) for x in constants)
            weights = None if weights is None else gather_rows(weights)
        elif self.gather is None and not torch.compiler.is_compiling():
            self._warn_if_partial(emb)
        return self._forward(emb, labels, constants, refs, ref_labels, pairs, weights)

    def _warn_if_partial(self, emb: Tensor) -> None:
        """Warn, once, if this rank trains on its own part of the batch, which gives other gradients than the whole."""
        if world_size() > 1 and emb.requires_grad and not is_gathered(emb):
            self.gather = False
            warnings.warn(
                f"{self.name}: rank {rank()} of {world_size()} computes the loss of its own part of the batch, so the "
                "gradients are not those of the whole batch. Pass gather=True, or gather=False if this is intended.",
                stacklevel=3,
            )

    def _forward(
        self, emb: Tensor, labels: Any, constants: Sequence[Any], refs: Any, ref_labels: Any, pairs: Any, weights: Any
    ) -> Tensor:
        self._check_constants(constants)
        is_matrix = is_label_matrix(labels, self.loss)
        if is_matrix or pairs is not None:
            if self.memory_size or self.chunk_size:
                raise ConfigError(f"{self.name}: several labels or own pairs exclude a memory and chunk_size.")
            if is_matrix and pairs is None:
                check_ref_labels(labels, ref_labels)
            if pairs is None and labels.dtype != torch.bool:  # the levels of a hierarchy
                others = [None] * labels.shape[1] if ref_labels is None else ref_labels.unbind(1)
                levels = zip(labels.unbind(1), others, strict=True)
                return torch.stack([self._forward(emb, a, (), refs, b, None, weights) for a, b in levels]).mean(0)
            pairs, labels, ref_labels = own_pairs(self.loss, emb, labels, refs, ref_labels, pairs)
        if labels is None:
            raise ConfigError(f"{self.name}: pass labels, or for a pair loss pairs=...")
        emb, labels = as_batch(emb, labels)
        if refs is not None or ref_labels is not None:
            refs, ref_labels = self._check_refs(refs, ref_labels)
        weights = self._check_weights(weights, labels)
        if self.dim is not None and emb.shape[1] != self.dim:
            raise DataError(f"{self.name}: expected embeddings of {self.dim} dimensions, got {emb.shape[1]}.")
        if self.matryoshka_dims and max(self.matryoshka_dims) > emb.shape[1]:
            raise DataError(
                f"matryoshka_dims: {max(self.matryoshka_dims)} exceeds the {emb.shape[1]} dimensions of the embeddings."
            )
        with full_precision(emb):
            parts = []
            for size in self.matryoshka_dims or (None,):  # None: all dimensions
                given = {} if refs is None else {"refs": refs[:, :size], "ref_labels": ref_labels}
                is_last = size in (None, *self.matryoshka_dims[-1:])
                values = self._values(emb[:, :size], labels, constants, given, pairs, is_last)
                parts.append(self.loss.reduce(values, self.reduction, weights))
            loss = parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)
            if self.regularizers:
                vectors = None if self.class_vectors is None else self.class_vectors.to(emb.dtype)
                true_labels = labels if pairs is None else None
                loss = loss + regularization(self.regularizers, emb, true_labels, vectors)
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

    def _check_refs(self, refs: Any, ref_labels: Any) -> tuple[Tensor, Tensor]:
        if refs is None or ref_labels is None:
            raise ConfigError(f"{self.name}: pass refs and ref_labels together, got only one of them.")
        if not self.loss.inputs.memory:
            raise ConfigError(f"{self.name} cannot use references: it compares the batch with itself or with classes.")
        if self.memory_size or self.chunk_size:
            raise ConfigError(f"{self.name}: refs cannot be combined with a memory or with chunk_size.")
        return as_batch(refs, ref_labels, what="refs")

    def logits(self, emb: Tensor) -> Tensor:
        """Compute the logits [N, C] of a softmax over the training classes, for embeddings [N, D].

        They are those of the loss without margins: cosines times its scale, or the output of its linear head.
        """
        if self.loss.inputs.pairs or not any("C" in param.shape for param in self.loss.inputs.params):
            raise ConfigError(f"{self.name} learns nothing about classes: it has no logits. Search an index instead.")
        emb, labels = as_batch(emb, torch.zeros(len(emb), dtype=torch.int64))
        with full_precision(emb):
            sim = self._build_classes(emb, labels, ()).sim
        if sim.dim() == 3:
            gamma = self.loss_kwargs.get("gamma")
            sim = sim.amax(2) if gamma is None else class_similarity(sim, gamma)
        return cast(Tensor, sim * self._logit_scale)

    @property
    def _logit_scale(self) -> float:
        kwargs = self.loss_kwargs
        inverse = 1 / kwargs["temperature"] if "temperature" in kwargs else 1.0
        return float(kwargs.get("scale", kwargs.get("alpha", inverse)))

    @torch.no_grad()
    def predict(self, emb: Tensor) -> Tensor:
        """Return the most likely training class of each embedding [N]; see `logits`."""
        return self.logits(emb).argmax(1)

    def classifier(self) -> Classifier:
        """Return what was learned about the classes as a module of its own: embeddings to `logits`."""
        vectors, form = self.class_vectors, self.loss.inputs.logits
        if vectors is None or form is None:
            raise ConfigError(f"{self.name} has no classifier: it learns no vectors that give logits by themselves.")
        centers = vectors.shape[1] if vectors.dim() == 3 else 1
        weight = self._logit_scale * (vectors if form == "linear" else unit(vectors)).flatten(0, -2)
        gamma = self.loss_kwargs.get("gamma")
        return Classifier(
            weight,
            next((value for state, value in self._learned() if state.shape == "C"), None),
            normalize=form == "cosine",
            centers=centers,
            temperature=None if gamma is None else gamma * self._logit_scale,
        )

    def _values(
        self, emb: Tensor, labels: Tensor, constants: Sequence[Tensor], refs: dict[str, Any], pairs: Any, is_last: bool
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Compute the loss before it is reduced."""
        inputs = self.loss.inputs
        if inputs.dropout is not None:
            emb = nn.functional.dropout(emb, self.builder_kwargs[inputs.dropout], self.training)
        if self.chunk_size:
            return self._compute_by_chunks(emb, labels)
        pairwise = inputs.pairs
        built = self._build_pairs(emb, labels, refs, pairs) if pairwise else self._build_classes(emb, labels, constants)
        return self._compute(built, self._updated_buffers(built, is_last))

    def _compute(self, built: Any, state: dict[str, Tensor]) -> Tensor | tuple[Tensor, Tensor]:
        learned = {s.name: value for s, value in self._learned() if isinstance(s, LearnedScalar)}
        return self.loss.function(built, **{**self.loss_kwargs, **learned}, **state)

    def _compute_by_chunks(self, emb: Tensor, labels: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        def compute(emb: Tensor, rows: Tensor) -> Tensor | tuple[Tensor, Tensor]:
            batch = {"refs": emb, "ref_labels": labels, "self_columns": rows}
            return self._compute(self._build_pairs(emb[rows], labels[rows], batch), {})

        chunks = torch.split(torch.arange(len(emb), device=emb.device), self.chunk_size)
        results: list[Any] = [checkpoint(compute, emb, rows, use_reentrant=False) for rows in chunks]
        if not isinstance(results[0], tuple):
            return torch.cat(results)
        values, counts = zip(*results, strict=True)
        return torch.cat(values), torch.stack(counts).sum()

    def _build_pairs(self, emb: Tensor, labels: Tensor, refs: dict[str, Any], chosen: Any = None) -> Pairs:
        """Pair the batch with itself or with references, and with the memory; then take the chosen pairs, or mine."""
        build, kwargs = self.loss.inputs.build, self.loss.inputs.build_kwargs(self.builder_kwargs)
        pairs = cast(Pairs, build(emb, labels, **refs, **kwargs))
        if chosen is not None:
            pairs = select_pairs(pairs, chosen)
        if self.memory_size:
            # On the host only the filled rows of the memory are compared; elsewhere all, as shapes must not change.
            filled = self.memory_state[0]
            used = slice(int(filled) if on_host(emb) else self.memory_size)
            stored, stored_labels = self.memory_emb[used, : emb.shape[1]].to(emb.dtype), self.memory_labels[used]
            if len(stored):
                earlier = build(emb, labels, refs=stored, ref_labels=stored_labels, **kwargs)
                pairs = join(pairs, earlier, torch.arange(len(stored), device=emb.device) < filled)
        return pairs if self.miner is None else _find_miner(self.miner)(pairs, **self.miner_settings)

    def _build_classes(self, emb: Tensor, labels: Tensor, constants: Sequence[Tensor]) -> Any:
        inputs, dim = self.loss.inputs, emb.shape[1]
        params = [value[..., :dim] if "D" in s.shape else value for s, value in self._learned() if isinstance(s, Param)]
        kwargs = inputs.build_kwargs(self.builder_kwargs)
        if inputs.takes_num_classes:
            kwargs["num_classes"] = self.num_classes
        return inputs.build(emb, labels, *params, *constants, **kwargs)

    def _check_constants(self, constants: Sequence[Any]) -> None:
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

    def extra_repr(self) -> str:
        """Return the name and the settings, for repr()."""
        extras: dict[str, Any] = {"miner": self.miner, "memory": self.memory_size}
        for name in ("matryoshka_dims", "chunk_size", "regularizers"):
            extras[name] = getattr(self, name)
        shown = {**self.loss_kwargs, **self.builder_kwargs, **{k: v for k, v in extras.items() if v}}
        return ", ".join([repr(self.name), *(f"{k}={v!r}" for k, v in shown.items())])


def _find_miner(miner: str | Miner) -> Miner:
    return MINERS[miner] if isinstance(miner, str) else miner
