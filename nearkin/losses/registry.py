"""What it takes to be a loss: a decorator, a registry, and the ranges a tuner may search.

    @loss(family="pair", paper="...", formula="...", use="...", space={"margin": linear(0, 1)})
    def my_loss(p: Pairs, *, margin: float = 0.5) -> Tensor: ...

The decorated function is the mathematics alone: a pure function of similarities and labels. The decorator puts the
reduction around it, and keeps what the tuner, the command line and the documentation need to know. State (proxies,
heads, memory) belongs to `Objective`.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from nearkin._common.registry import Registry, is_number, to_python_scalar
from nearkin.errors import ConfigError, did_you_mean
from nearkin.ops.geometry import full_precision
from nearkin.ops.pairs import Pairs, one_pair_per_class, pair_up

Reduction = Literal["mean", "sum", "none"]

# --- search ranges ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Range:
    """Where a tuner may look for a setting: an interval (even on a linear or a log scale), integers, or a list.

    `legal` is the wider interval of what the formula can use at all; what is outside is refused.
    """

    kind: Literal["log", "linear", "integer", "choice"]
    low: float = math.nan
    high: float = math.nan
    options: tuple[Any, ...] = ()
    legal: str = "(-inf, inf)"

    def __str__(self) -> str:
        if self.kind == "choice":
            return "one of " + ", ".join(map(str, self.options))
        scale = {"log": ", log scale", "linear": "", "integer": ", integer"}[self.kind]
        return f"{self.low:g} to {self.high:g}{scale}"

    def __contains__(self, value: object) -> bool:
        if self.kind == "choice":
            return value in self.options
        return isinstance(value, int | float) and self.low <= value <= self.high

    def allows(self, value: float) -> bool:
        """Whether a number is legal, inside the range or not.

        >>> log(0.5, 50).allows(1000.0), log(0.5, 50).allows(0.0)
        (True, False)
        """
        least, most = map(float, self.legal[1:-1].split(","))
        ends = (self.legal[0] == "[" and value == least) or (self.legal[-1] == "]" and value == most)
        return ends or least < value < most


def log(low: float, high: float, *, legal: str = "(0, inf)") -> Range:
    """A positive setting whose ratio matters; a weight that may be switched off has legal="[0, inf)".

    >>> str(log(0.5, 50)), 2.0 in log(0.5, 50)
    ('0.5 to 50, log scale', True)
    """
    return Range("log", low, high, legal=legal)


def linear(low: float, high: float, *, legal: str = "(-inf, inf)") -> Range:
    """A setting whose difference matters."""
    return Range("linear", low, high, legal=legal)


def integer(low: int, high: int) -> Range:
    """A whole number, from `low` on."""
    return Range("integer", low, high, legal=f"[{low}, inf)")


def choice(*options: Any) -> Range:
    """One of a few."""
    return Range("choice", options=options)


# --- what a loss is compared with -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Param:
    """A learned tensor that an objective holds for its loss."""

    name: str
    shape: str  # letters: C classes, K centers, D dimensions
    init: Literal["normal", "zeros"] = "normal"
    lr: float = 1.0  # learning rate, as a multiple of the network's
    decay: bool = True  # whether weight decay makes sense for it


@dataclass(frozen=True)
class Inputs:
    """How embeddings and labels become what the function reads.

    build    (emb, labels, ...) -> Pairs, or (emb, labels, *params) -> ToClasses
    params   the learned tensors that `build` takes, in order
    outer    settings of the objective that `build` or the state needs and the function itself does not
    memory   whether references from earlier batches make sense
    counts_classes   whether `build` takes num_classes, as a number rather than as the rows of a parameter
    """

    build: Callable[..., Any]
    params: tuple[Param, ...] = ()
    outer: Mapping[str, Any] = field(default_factory=dict)
    pairs: bool = False
    memory: bool = False
    counts_classes: bool = False


BATCH = Inputs(pair_up, pairs=True, memory=True)
PRODUCTS = Inputs(functools.partial(pair_up, metric="dot"), pairs=True, memory=True)
ONE_PER_CLASS = Inputs(one_pair_per_class, pairs=True)

# --- the loss itself --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loss:
    """A registered loss: the function and all that is known about it."""

    name: str
    function: Callable[..., Tensor | tuple[Tensor, Tensor]]
    family: str
    paper: str
    formula: str
    use: str
    cost: str
    inputs: Inputs
    space: Mapping[str, Range]
    reductions: tuple[Reduction, ...]
    own: Mapping[str, Any]  # settings of the function, with their defaults
    learned: frozenset[str]  # those of them that may be a tensor with a gradient

    @property
    def settings(self) -> dict[str, Any]:
        """Every setting an objective of this loss takes, with its default."""
        return {**self.own, **self.inputs.outer}

    @property
    def summary(self) -> str:
        return (inspect.getdoc(self.function) or "").partition("\n")[0]

    @property
    def takes(self) -> str:
        """How the function is called."""
        if self.inputs is PRODUCTS:
            return f'nk.losses.{self.name}(nk.pair_up(emb, labels, metric="dot"))'
        if self.inputs is ONE_PER_CLASS:
            return f"nk.losses.{self.name}(nearkin.ops.pairs.one_pair_per_class(emb, labels))"
        if self.inputs.pairs:
            return f"nk.losses.{self.name}(nk.pair_up(emb, labels))"
        given = ["emb", "labels", *(spec.name for spec in self.inputs.params)]
        if self.inputs.counts_classes:
            given.append("probabilities" if self.name == "pce" else "num_classes")
        return f"nk.losses.{self.name}({', '.join(given)})"

    def check(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The settings as plain numbers, or an error for one that does not exist or cannot be used.

        A 0-dim tensor with a gradient stays what it is where the function passes the gradient on.
        """
        return {key: self._check_one(key, value) for key, value in settings.items()}

    def _check_one(self, key: str, value: Any) -> Any:
        known = self.settings
        if key not in known:
            hint = did_you_mean(key, known) or (f" It has: {', '.join(known)}." if known else " It has none.")
            raise ConfigError(f"{self.name}: no setting '{key}'.{hint}")
        if isinstance(value, Tensor) and value.dim() == 0 and value.requires_grad:
            if key not in self.learned:
                raise ConfigError(f"{self.name}: {key} cannot be learned; give a number, or detach the tensor.")
            return value
        value, default, where = to_python_scalar(value), known[key], self.space.get(key)
        fits = isinstance(value, bool) if isinstance(default, bool) else is_number(value, type(default))
        if not fits:
            kind = {bool: "True or False", int: "a whole number"}.get(type(default), "a finite number")
            raise ConfigError(f"{self.name}: {key} must be {kind}, got {value!r}.")
        if where is not None and where.kind != "choice" and not where.allows(value):
            raise ConfigError(f"{self.name}: {key} must be in {where.legal}, got {value!r}.")
        return value

    def check_params(self, values: Sequence[Any]) -> None:
        """Refuse class parameters of another shape than the loss has them in."""
        sizes: dict[str, int] = {}
        for spec, value in zip(self.inputs.params, values, strict=False):
            want = ", ".join(str(sizes.get(letter, letter)) for letter in spec.shape)
            got = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            fits = isinstance(value, Tensor) and value.dim() == len(spec.shape)
            if not fits or any(sizes.setdefault(k, n) != n for k, n in zip(spec.shape, value.shape, strict=True)):
                raise ConfigError(f"{self.name}: {spec.name} must be a tensor [{want}], got {got}.")

    def check_reduction(self, reduction: str) -> None:
        if reduction not in self.reductions:
            allowed = " or ".join(repr(r) for r in self.reductions)
            raise ConfigError(f"{self.name}: reduction must be {allowed}, got {reduction!r}.")

    def reduce(self, result: Tensor | tuple[Tensor, Tensor], reduction: Reduction) -> Tensor:
        """One number from what the function returned: values, or (totals, how many terms they hold)."""
        self.check_reduction(reduction)
        values, count = result if isinstance(result, tuple) else (result, None)
        if reduction == "none" or values.dim() == 0:
            return values
        if reduction == "sum":
            return values.sum()
        if count is None and len(values):
            return values.mean()
        # With no terms at all the sum is an attached 0, and 0 / 1 is the answer.
        return values.sum() / (1 if count is None else count + (count == 0))


LOSSES: Registry[Loss] = Registry("loss")


def loss(
    *,
    family: str,
    paper: str,
    formula: str,
    use: str,
    space: Mapping[str, Range] | None = None,
    inputs: Inputs = BATCH,
    cost: str = "N^2 D",
    reductions: tuple[Reduction, ...] = ("mean", "sum", "none"),
) -> Callable[[Callable[..., Tensor | tuple[Tensor, Tensor]]], Callable[..., Tensor]]:
    """Register a function as a loss under its own name, and give it the public call.

    The function takes `Pairs` (or `ToClasses`) and keyword-only settings. To one annotated `float | Tensor` it must
    pass a gradient on: such a setting may be learned. It returns one value per anchor [N], or (totals [N], count) when
    the mean is not over anchors, or the finished 0-dim loss (`reductions=("mean",)`).
    The public call of a pair loss takes `Pairs`; that of a class loss takes (emb, labels, *params). Both take the
    settings and `reduction`.
    """

    def register(function: Callable[..., Tensor | tuple[Tensor, Tensor]]) -> Callable[..., Tensor]:
        signature = inspect.signature(function)
        named = {n: p for n, p in signature.parameters.items() if p.kind is p.KEYWORD_ONLY}
        entry = Loss(
            name=function.__name__,
            function=function,
            family=family,
            paper=paper,
            formula=formula,
            use=use,
            cost=cost,
            inputs=inputs,
            space=space or {},
            reductions=reductions,
            own={n: p.default for n, p in named.items()},
            learned=frozenset(n for n, p in named.items() if "Tensor" in str(p.annotation)),
        )
        unknown = set(entry.space) - set(entry.settings)
        assert not unknown, f"{entry.name}: search space for settings it does not have: {unknown}"
        LOSSES.add(entry.name, entry)
        build = inspect.signature(inputs.build)

        @functools.wraps(function)
        def public(*given: Any, reduction: Reduction = "mean", **settings: Any) -> Tensor:
            by_name = {} if inputs.pairs else {k: settings.pop(k) for k in build.parameters if k in settings}
            settings = entry.check(settings)
            for key in settings:
                if key in inputs.outer:
                    raise ConfigError(f"{entry.name}: '{key}' is a setting of nk.Objective, not of the function.")
            if inputs.pairs:
                if len(given) != 1 or not isinstance(given[0], Pairs):
                    raise ConfigError(f"{entry.name} takes Pairs: {entry.takes}.")
                read = given[0]
            else:
                try:
                    bound = build.bind(*given, **by_name)
                except TypeError as error:
                    raise ConfigError(f"{entry.name}: {error}. Call it as {entry.takes}.") from None
                entry.check_params(bound.args[2:])  # after emb and labels
                read = inputs.build(*bound.args, **bound.kwargs)
            with full_precision(read.sim):
                return entry.reduce(function(read, **settings), reduction)

        public.loss = entry  # type: ignore[attr-defined]
        # What help() shows: the call as it is made, not that of the mathematics within.
        taken = list((signature if inputs.pairs else build).parameters.values())
        public.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [
                *(p for p in taken if p.kind <= p.POSITIONAL_OR_KEYWORD),
                *named.values(),
                inspect.Parameter("reduction", inspect.Parameter.KEYWORD_ONLY, default="mean", annotation="Reduction"),
            ],
            return_annotation="Tensor",
        )
        return public

    return register
