"""What all losses with the interface of pytorch-metric-learning share."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, field
from typing import Any, ClassVar

from torch import Tensor, nn

from nearkin.compat.pml._module import SettingsModule, is_ours
from nearkin.compat.pml._tuples import Batch, Indices, PairList
from nearkin.compat.pml.distances import BaseDistance, LpDistance, as_single
from nearkin.compat.pml.reducers import BaseReducer, DoNothingReducer, MeanReducer, MultipleReducers, listed, loss_info
from nearkin.errors import ConfigError, DataError
from nearkin.ops.geometry import full_precision

LossDict = dict[str, dict[str, Any]]

# Methods of PML's losses that its users override, and that ours do not have.
_INNER_METHODS = {
    "_compute_loss", "pos_calc", "neg_calc", "get_per_pair_loss", "nca_computation", "modify_cosine_of_target_classes",
    "scale_logits", "variance_with_eps", "invariance_loss", "variance_loss", "covariance_loss", "compute_density",
    "weigh_loss",
}  # fmt: skip


class WithDistance(SettingsModule):
    """A module with a distance. With `required` it must be of the class of the default one, with these settings."""

    _: KW_ONLY
    distance: BaseDistance = None  # type: ignore[assignment]  # the default one

    default_distance: ClassVar[Callable[[], BaseDistance]] = LpDistance
    required: ClassVar[Mapping[str, Any] | None] = None
    needs_similarity: ClassVar[bool] = False  # whether higher values of the distance must be nearer

    def __post_init__(self) -> None:
        super().__post_init__()
        default = self.get_default_distance()
        self.distance = default if self.distance is None else self.distance
        if self.required is not None:
            given = {name: getattr(self.distance, name, None) for name in self.required}
            if not isinstance(self.distance, type(default)) or given != self.required:
                words = "".join(f", {name}={value}" for name, value in self.required.items())
                raise ConfigError(f"{type(self).__name__} requires the distance {type(default).__name__}{words}.")
        if self.needs_similarity and not self.distance.is_inverted:
            raise ConfigError(f"{type(self).__name__} requires a similarity, such as CosineSimilarity.")

    def get_default_distance(self) -> BaseDistance:
        return type(self).default_distance()

    def as_similarity(self, mat: Tensor) -> Tensor:
        """Return a matrix of distances such that higher is nearer."""
        return mat if self.distance.is_inverted else -mat


class WithReducer(WithDistance):
    """A module whose values a reducer averages; one with several parts has a copy of it for each."""

    _: KW_ONLY
    reducer: nn.Module = None  # type: ignore[assignment]  # the default one

    default_reducer: ClassVar[Callable[[], BaseReducer]] = MeanReducer

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.reducer, MultipleReducers | DoNothingReducer):
            reducer = self.get_default_reducer() if self.reducer is None else self.reducer
            copies = {name: copy.deepcopy(reducer) for name in self.sub_loss_names()}
            self.reducer = MultipleReducers(copies) if len(copies) > 1 else reducer

    def get_default_reducer(self) -> BaseReducer:
        return type(self).default_reducer()

    def sub_loss_names(self) -> list[str]:
        return ["loss"]


class BaseMetricLossFunction(WithReducer):
    """The base of all losses: `loss(embeddings, labels, indices_tuple=None, ref_emb=None, ref_labels=None)`.

    Subclasses define `compute_loss`, which returns {name: {"losses", "indices", "reduction_type"}}. Ours define
    `compute`, which returns the values of the samples [N], a finished 0-dim loss or a `loss_info`; a tuple of these if
    the loss has several parts; None for 0.
    """

    _: KW_ONLY
    embedding_regularizer: nn.Module | None = None
    embedding_reg_weight: float = 1

    needs_labels: ClassVar[bool] = False
    takes_refs: ClassVar[bool] = True
    takes_indices: ClassVar[bool] = True
    parts: ClassVar[tuple[str, ...]] = ("loss",)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        ignored = _INNER_METHODS & vars(cls).keys()
        if ignored and not is_ours(cls) and not issubclass(cls, GenericPairLoss) and "compute_loss" not in vars(cls):
            what = f"{cls.__name__}: {', '.join(sorted(ignored))} would not be called"
            raise ConfigError(f"{what}. Subclass GenericPairLoss, or define compute_loss.")

    def compute_loss(
        self, embeddings: Tensor, labels: Any, indices_tuple: Any, ref_emb: Tensor, ref_labels: Any
    ) -> LossDict:
        name = type(self).__name__
        if self.needs_labels and labels is None:
            raise ValueError(f"{name}: labels are required for this loss function")
        if not self.takes_indices and indices_tuple is not None:
            raise ValueError(f"{name}: indices_tuple is not supported for this loss function")
        if not self.takes_refs and (ref_emb is not embeddings or ref_labels is not labels):
            raise ValueError(f"{name}: ref_emb is not supported for this loss function")
        values = self.compute(Batch(embeddings, labels, indices_tuple, ref_emb, ref_labels))
        if values is None:
            return self.zero_losses()
        if isinstance(values, dict) and "losses" not in values:  # what a GenericPairLoss of the user returns
            return values
        values = values if isinstance(values, tuple) else (values,)
        infos = (x if isinstance(x, dict) else loss_info(x) for x in values)
        return dict(zip(self._sub_loss_names(), infos, strict=True))

    def compute(self, b: Batch) -> Any:
        raise NotImplementedError

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor | None = None,
        indices_tuple: Indices = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
    ) -> Any:
        emb, own = as_single(embeddings), check_labels(embeddings, labels)
        ref = emb if ref_emb is None or ref_emb is embeddings else ref_emb.to(emb.dtype)
        of_ref = own if ref_emb is None or ref_labels is labels else check_labels(ref, ref_labels)
        with full_precision(emb):
            loss_dict = self.compute_loss(emb, own, indices_tuple, ref, of_ref)
            if self.embedding_regularizer is not None:
                loss = self.embedding_regularizer(emb) * self.embedding_reg_weight
                loss_dict["embedding_reg_loss"] = loss_info(loss, "already_reduced")
            if not isinstance(self.reducer, BaseReducer):
                loss_dict = {name: listed(info) for name, info in loss_dict.items()}
            loss = self.reducer(loss_dict, emb, own)
        return loss.to(embeddings.dtype) if isinstance(loss, Tensor) else loss

    def zero_loss(self) -> dict[str, Any]:
        return loss_info(0, "already_reduced")

    def zero_losses(self) -> LossDict:
        return {name: self.zero_loss() for name in self.sub_loss_names()}

    def _sub_loss_names(self) -> list[str]:
        return list(self.parts)

    def sub_loss_names(self) -> list[str]:
        return self._sub_loss_names() + ["embedding_reg_loss"] * (self.embedding_regularizer is not None)


def check_labels(emb: Tensor, labels: Tensor | None) -> Any:
    """Return the labels on the device of the embeddings, or raise ValueError."""
    if labels is None:
        return None
    if labels.dim() != 1:
        raise ValueError("labels must be a 1D tensor of shape (batch_size,)")
    if len(emb) != len(labels):
        raise ValueError("Number of embeddings must equal number of labels")
    return labels.to(emb.device)


class PairLoss(BaseMetricLossFunction):
    """A loss of the matrix of distances and of positive and negative pairs: subclasses define `of_matrix`."""

    mat_based_loss: ClassVar[bool] = False  # whether a pair counts once however often it is listed, and has one sign
    needs_both: ClassVar[bool] = False  # whether it is 0 without positives or without negatives

    def compute(self, b: Batch) -> Any:
        pos, neg = b.pairs()
        if (pos.count <= 1 and neg.count <= 1) or (self.needs_both and not (pos.count and neg.count)):
            return None
        if self.mat_based_loss and pos.is_listed and bool((pos.mask & neg.mask).any()):
            raise DataError("indices_tuple: a pair is both positive and negative.")
        return self.of_matrix(self.distance(b.emb, b.ref), pos, neg)

    def of_matrix(self, mat: Tensor, pos: PairList, neg: PairList) -> Any:
        raise NotImplementedError


class GenericPairLoss(PairLoss):
    """The base of your own pair losses: define `_compute_loss`."""

    mat_based_loss: bool = field()  # type: ignore[misc]  # a setting here

    _compute_loss: ClassVar[Callable[..., LossDict]]

    def of_matrix(self, mat: Tensor, pos: PairList, neg: PairList) -> Any:
        if self.mat_based_loss:
            return self._compute_loss(mat, pos.mask.to(mat.dtype), neg.mask.to(mat.dtype))
        values: list[Any] = [pairs.select(mat) if pairs.count else [] for pairs in (pos, neg)]
        return self._compute_loss(*values, (*pos, *neg))
