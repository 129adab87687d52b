"""The reducers of pytorch-metric-learning: from the values of pairs, triplets or samples to one number.

A loss passes `{name: {"losses", "indices", "reduction_type"}}`, as there. The triplets of a whole batch come as
`TripletLosses`, which our own reducers sum without a list; any other reducer gets the list.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from nearkin.compat.pml._module import SettingsModule, is_ours
from nearkin.compat.pml._tuples import PairList, TripletLosses, within
from nearkin.errors import ConfigError

LossInfo = dict[str, Any]
LossDict = Mapping[str, LossInfo]


def loss_info(losses: Any, kind: str = "element", indices: Any = None, **extra: Any) -> LossInfo:
    """Return what a reducer takes; the values of all samples in their order by default, or a finished 0-dim loss."""
    if isinstance(losses, Tensor) and indices is None and losses.dim() == 0:
        kind = "already_reduced"
    elif isinstance(losses, Tensor) and indices is None and kind == "element":
        indices = torch.arange(len(losses), device=losses.device)
    info = {"losses": losses, "indices": indices, "reduction_type": kind, **extra}
    return listed(info) if isinstance(losses, TripletLosses) and losses.triplets.is_listed else info


def listed(info: LossInfo) -> LossInfo:
    """Return a loss with lists of values and indices, as pytorch-metric-learning has them."""
    losses, indices = info["losses"], info["indices"]
    if isinstance(losses, TripletLosses):
        values, lists = losses.listed()
        return {**info, "losses": values, "indices": lists[0] if info["reduction_type"] == "element" else lists}
    return {**info, "indices": tuple(indices)} if isinstance(indices, PairList) else info


def _sums(losses: Tensor | TripletLosses, low: float | None = None, high: float | None = None) -> tuple[Tensor, int]:
    """Return the values between two bounds, or their sums by anchors, and their number."""
    if isinstance(losses, TripletLosses):
        return losses.sums(low, high)
    used = within(losses, low, high)
    return torch.where(used, losses, 0.0), int(used.sum())


class BaseReducer(SettingsModule):
    """Averages the values of a loss. Subclasses define `element_reduction`, and others where they differ."""

    needs_divisor: ClassVar[bool] = False

    def forward(self, loss_dict: LossDict, embeddings: Tensor, labels: Any) -> Any:
        (info,) = loss_dict.values()
        if isinstance(info["losses"], TripletLosses) and not is_ours(type(self)):
            info = listed(info)
        losses, kind = info["losses"], info["reduction_type"]
        if losses.numel() == 0 if isinstance(losses, Tensor) else losses == 0:
            return self.zero_loss(embeddings)
        if kind == "already_reduced":
            return losses
        extra = {"divisor": info.get("divisor")} if self.needs_divisor else {}
        return getattr(self, f"{kind}_reduction")(losses, info["indices"], embeddings, labels, **extra)

    def zero_loss(self, embeddings: Tensor) -> Tensor:
        return (embeddings * 0).sum()

    def element_reduction(self, losses: Any, loss_indices: Any, embeddings: Tensor, labels: Any) -> Any:
        raise NotImplementedError

    def pos_pair_reduction(self, *args: Any, **kwargs: Any) -> Any:
        return self.element_reduction(*args, **kwargs)

    neg_pair_reduction = triplet_reduction = pos_pair_reduction


class MeanReducer(BaseReducer):
    """The mean of all values."""

    def element_reduction(self, losses: Any, loss_indices: Any, embeddings: Tensor, labels: Any) -> Tensor:
        total, number = _sums(losses)
        return total.sum() / number


class SumReducer(BaseReducer):
    """The sum of all values."""

    def element_reduction(self, losses: Any, loss_indices: Any, embeddings: Tensor, labels: Any) -> Tensor:
        return _sums(losses)[0].sum()


class ThresholdReducer(BaseReducer):
    """The mean of the values between two bounds; 0 if there are none."""

    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low is None and self.high is None:
            raise ConfigError(f"{type(self).__name__}: pass low, high or both.")

    def element_reduction(self, losses: Any, loss_indices: Any, embeddings: Tensor, labels: Any) -> Tensor:
        total, number = _sums(losses, self.low, self.high)
        return total.sum() / number if number else self.zero_loss(embeddings)


class AvgNonZeroReducer(ThresholdReducer):
    """The mean of the values above 0."""

    low: float | None = 0


class DivisorReducer(BaseReducer, needs_divisor=True):
    """The sum of the values, divided by a number that the loss defines; 0 if that is 0."""

    def element_reduction(
        self, losses: Any, loss_indices: Any, embeddings: Tensor, labels: Any, divisor: Any = None
    ) -> Tensor:
        if divisor is None:
            raise ConfigError("DivisorReducer: the loss defines no divisor. Use MeanReducer.")
        return _sums(losses)[0].sum() / divisor if divisor != 0 else self.zero_loss(embeddings)


class ClassWeightedReducer(BaseReducer):
    """The mean of the values times the weight of the anchor's class."""

    weights: Tensor

    def element_reduction(self, losses: Any, loss_indices: Any, embeddings: Tensor, labels: Any) -> Tensor:
        if labels is None:
            raise ConfigError("ClassWeightedReducer needs labels.")
        total, number = _sums(losses)
        weights = self.weights.to(total)[labels]
        if loss_indices is not None:  # None for sums by anchors
            weights = weights[loss_indices if isinstance(loss_indices, Tensor) else next(iter(loss_indices))]
        return (total * weights).sum() / number


def _or_mean(reducer: nn.Module | None) -> nn.Module:
    return MeanReducer() if reducer is None else reducer


def _row_means(x: Tensor, num_per_row: Tensor) -> Tensor:
    return torch.where(num_per_row > 0, x.sum(1) / num_per_row.clamp(min=1), 0.0)


class PerAnchorReducer(BaseReducer, stored={"reducer": _or_mean}):
    """The values of each anchor's pairs are averaged first, and then reduced as values of samples."""

    reducer: nn.Module = None  # type: ignore[assignment]  # the mean
    aggregation_func: Callable[[Tensor, Tensor], Tensor] = _row_means

    def element_reduction(self, losses: Any, loss_indices: Any, embeddings: Tensor, labels: Any) -> Tensor:
        return cast(Tensor, self.reducer({"loss": loss_info(losses, indices=loss_indices)}, embeddings, labels))

    def pos_pair_reduction(self, losses: Any, loss_indices: Any, embeddings: Tensor, labels: Any) -> Tensor:
        index, n = tuple(loss_indices), len(embeddings)
        values = losses.new_zeros(n, n).index_put(index, losses)
        used = torch.zeros_like(values, dtype=torch.bool).index_put(index, torch.tensor(True, device=losses.device))
        return self.element_reduction(self.aggregation_func(values, used.sum(1)), None, embeddings, labels)

    neg_pair_reduction = pos_pair_reduction

    def triplet_reduction(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("PerAnchorReducer does not support losses of triplets.")


class DoNothingReducer(BaseReducer):
    """Returns the values of the loss, with their indices, as a dictionary."""

    def forward(self, loss_dict: LossDict, embeddings: Tensor, labels: Any) -> Any:
        return {name: listed(info) for name, info in loss_dict.items()}


class MultipleReducers(
    BaseReducer, stored={"reducers": lambda reducers: nn.ModuleDict(dict(reducers)), "default_reducer": _or_mean}
):
    """A reducer for each part of a loss; the results are added."""

    reducers: nn.ModuleDict | Mapping[str, nn.Module]
    default_reducer: nn.Module = None  # type: ignore[assignment]  # the mean

    def forward(self, loss_dict: LossDict, embeddings: Tensor, labels: Any) -> Any:
        parts = []
        for name, info in loss_dict.items():
            reducer = dict(self.reducers).get(name, self.default_reducer)
            parts.append(reducer({name: info}, embeddings, labels).reshape(()).to(embeddings.dtype))
        return self.sub_loss_reduction(torch.stack(parts), embeddings, labels)

    def sub_loss_reduction(self, sub_losses: Tensor, embeddings: Any = None, labels: Any = None) -> Tensor:
        return sub_losses.sum()
