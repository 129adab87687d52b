"""The `@loss` decorator: a loss is a pure function; `Inputs` declares the state it needs, which `Objective` owns."""

import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from nearkin._common.registry import Registry, is_number, to_python_scalar
from nearkin.errors import ConfigError, did_you_mean
from nearkin.losses.ranges import Range
from nearkin.ops.geometry import full_precision
from nearkin.ops.pairs import Pairs, one_pair_per_class, pair_up

Reduction = Literal["mean", "sum", "none", "nonzero"]
LossFunction = Callable[..., Tensor | tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Param:
    """A learned tensor that the objective passes to the builder.

    Attributes:
        name: Its name in the objective and in its state_dict.
        shape: One letter per dimension: "C" classes, "D" embedding dimensions, others as in `Inputs.dims`.
        init: "normal" with variance 2 / C, or "zeros".
        lr: Learning rate, as a multiple of the network's.
        decay: Whether weight decay applies.
    """

    name: str
    shape: str
    init: Literal["normal", "zeros"] = "normal"
    lr: float = 1.0
    decay: bool = True


@dataclass(frozen=True)
class LearnedScalar:
    """A setting of the loss function that the objective learns: a 0-dim parameter without weight decay.

    The setting must be annotated `float | Tensor`. Its value is the initial value of the parameter.

    Attributes:
        name: The setting, and the name of the parameter in the objective and in its state_dict.
        lr: Learning rate, as a multiple of the network's.
        switch: A boolean setting in `Inputs.builder_kwargs` that turns learning on; None learns it always.
    """

    name: str
    lr: float = 1.0
    switch: str | None = None
    shape: ClassVar[str] = ""
    decay: ClassVar[bool] = False


@dataclass(frozen=True)
class Buffer:
    """A tensor without gradient that the objective owns and passes to the loss function under its name.

    The function takes it as a keyword-only argument with the default None; it is not a setting. `Inputs.update` changes
    it in training, `Inputs.refresh` from the embeddings of the training set.

    Attributes:
        name: The argument, and the name in the objective and in its state_dict.
        shape: As in `Param`; 0-dim by default.
        init: Initial value of every entry.
    """

    name: str
    shape: str = ""
    init: float = 0.0


@dataclass(frozen=True)
class Inputs:
    """How embeddings and labels become the input of a loss function, and the state that this needs.

    Attributes:
        build: (emb, labels, ...) -> Pairs, or (emb, labels, *params, *constants) -> ToClasses.
        params: Learned tensors that `build` takes, in order.
        builder_kwargs: Settings of the builder or of the state, with their defaults. Those that `dims`, `dropout` or
            a switch refer to configure the state; the others are passed to `build`.
        builder_docs: One sentence on each of `builder_kwargs`.
        dims: Further letters of parameter shapes, and the setting with the size of each: {"K": "centers"}.
        dropout: The setting with the dropout probability on the embeddings in training.
        learned_scalars: Settings of the loss function that are learned.
        constants: Optional tensors that `build` takes after the parameters: `objective(emb, labels, *constants)`.
        pairs: Whether `build` returns Pairs.
        memory: Whether `build` takes references from earlier batches.
        by_anchor: Whether the value of an anchor depends on its own row of the Pairs only.
        takes_num_classes: Whether `build` takes the keyword num_classes.
        call_example: For pair losses, how to make the pairs by hand.
        buffers: Tensors without gradient that the loss function takes by name.
        update: (built, buffers, settings) -> new values of buffers; called in training before the loss is computed.
        refresh: (emb, labels, num_classes) -> new values of buffers; called by `Objective.refresh`, once per epoch.
        refresh_embeddings: Whether `refresh` uses the embeddings, or the labels only.
        logits: How similarities to classes follow from the first of `params`: "cosine"; "direction", the product with
            its unit vector; "linear", the product, plus a bias if that is the second; None if neither.
    """

    build: Callable[..., Any]
    params: tuple[Param, ...] = ()
    builder_kwargs: Mapping[str, Any] = field(default_factory=dict)
    builder_docs: Mapping[str, str] = field(default_factory=dict)
    dims: Mapping[str, str] = field(default_factory=dict)
    dropout: str | None = None
    learned_scalars: tuple[LearnedScalar, ...] = ()
    constants: tuple[str, ...] = ()
    pairs: bool = False
    memory: bool = False
    by_anchor: bool = True
    takes_num_classes: bool = False
    call_example: str = "nk.pair_up(emb, labels)"
    buffers: tuple[Buffer, ...] = ()
    update: Callable[[Any, Mapping[str, Tensor], Mapping[str, Any]], dict[str, Tensor]] | None = None
    refresh: Callable[[Any, Tensor, int], dict[str, Tensor]] | None = None
    refresh_embeddings: bool = True
    logits: Literal["cosine", "direction", "linear"] | None = None

    @property
    def state(self) -> tuple[Param | Buffer, ...]:
        """The parameters and the buffers."""
        return (*self.params, *self.buffers)

    @property
    def needs_classes(self) -> bool:
        """Whether it has state for every class, so that labels must be in 0..C-1."""
        return any("C" in state.shape for state in self.state)

    @property
    def state_settings(self) -> frozenset[str]:
        """The settings in `builder_kwargs` that configure the state and are not passed to `build`."""
        switches = (scalar.switch for scalar in self.learned_scalars)
        return frozenset(name for name in (*self.dims.values(), self.dropout, *switches) if name is not None)

    def build_kwargs(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return those of the settings that are passed to `build`."""
        return {k: v for k, v in settings.items() if k in self.builder_kwargs and k not in self.state_settings}


BATCH = Inputs(pair_up, pairs=True, memory=True)
WHOLE_BATCH = replace(BATCH, by_anchor=False)
PRODUCTS = replace(
    BATCH, build=functools.partial(pair_up, metric="dot"), call_example='nk.pair_up(emb, labels, metric="dot")'
)
ONE_PER_CLASS = Inputs(one_pair_per_class, pairs=True, call_example="nearkin.ops.pairs.one_pair_per_class(emb, labels)")


@dataclass(frozen=True)
class Loss:
    """A registered loss: the function, and the metadata that were passed to the decorator `loss`.

    Attributes:
        name: The registered name, which is the name of the function.
        function: The undecorated function.
        loss_kwargs: Settings of the function, with their defaults.
        learnable: Those of them that may be a tensor with a gradient.
    """

    name: str
    function: LossFunction
    family: str
    paper: str
    formula: str
    use: str
    cost: str
    inputs: Inputs
    space: Mapping[str, Range]
    reductions: tuple[Reduction, ...]
    loss_kwargs: Mapping[str, Any]
    learnable: frozenset[str]

    @property
    def settings(self) -> dict[str, Any]:
        """Every setting that an objective of this loss takes, with its default."""
        return {**self.loss_kwargs, **self.inputs.builder_kwargs}

    @property
    def has_sample_values(self) -> bool:
        """Whether it has one value per sample, which a weight can multiply."""
        return "none" in self.reductions and self.inputs is not ONE_PER_CLASS

    @property
    def summary(self) -> str:
        """The first line of the docstring."""
        return summary(self.function)

    @property
    def call_example(self) -> str:
        """How to call the function."""
        if self.inputs.pairs:
            return f"nk.losses.{self.name}({self.inputs.call_example})"
        args = ["emb", "labels", *(param.name for param in self.inputs.params), *self.inputs.constants]
        if self.inputs.takes_num_classes and not self.inputs.constants:
            args.append("num_classes")
        return f"nk.losses.{self.name}({', '.join(args)})"

    def check(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Validate settings and convert them to Python numbers; a tensor to be learned is kept."""
        return {key: self._check_setting(key, value) for key, value in settings.items()}

    def _check_setting(self, key: str, value: Any) -> Any:
        check_known(self.name, key, self.settings)
        # An argument of a `torch.func` transform, such as vmap, has no single value either.
        learned = isinstance(value, Tensor) and value.dim() == 0
        if learned and (value.requires_grad or torch._C._functorch.is_functorch_wrapped_tensor(value)):
            if key not in self.learnable:
                raise ConfigError(f"{self.name}: {key} cannot be learned. Pass a number, or detach the tensor.")
            return value
        default, span = self.settings[key], self.space.get(key)
        options = () if span is None or not isinstance(default, str) else span.options
        value = check_value(f"{self.name}: {key}", value, type(default), options)
        if span is not None and span.kind != "choice" and not span.allows(value):
            raise ConfigError(f"{self.name}: {key} must be in {span.legal}, got {value!r}.")
        return value

    def check_params(self, values: Sequence[Any]) -> None:
        """Check the shapes of the parameters that were passed to the function, in the order of `inputs.params`."""
        sizes: dict[str, int] = {}
        for param, value in zip(self.inputs.params, values, strict=False):
            expected = ", ".join(str(sizes.get(letter, letter)) for letter in param.shape)
            shape = list(value.shape) if isinstance(value, Tensor) else []
            valid = len(shape) == len(param.shape)
            if not valid or any(sizes.setdefault(k, n) != n for k, n in zip(param.shape, shape, strict=True)):
                got = shape if isinstance(value, Tensor) else type(value).__name__
                raise ConfigError(f"{self.name}: {param.name} must be a tensor [{expected}], got {got}.")

    def check_reduction(self, reduction: str) -> None:
        """Check that the definition of the loss allows a reduction."""
        if reduction not in self.reductions:
            allowed = " or ".join(repr(r) for r in self.reductions)
            raise ConfigError(f"{self.name}: reduction must be {allowed}, got {reduction!r}.")

    def reduce(
        self, result: Tensor | tuple[Tensor, Tensor], reduction: Reduction, weights: Tensor | None = None
    ) -> Tensor:
        """Reduce what the function returned. Weights [N] multiply the values; a mean divides by the number of terms."""
        self.check_reduction(reduction)
        values, count = result if isinstance(result, tuple) else (result, None)
        values = values if weights is None else values * weights
        if reduction == "none" or values.dim() == 0:
            return values
        if reduction == "sum":
            return values.sum()
        if reduction == "nonzero":
            count = (values != 0).sum()
        if count is None and len(values):
            return values.mean()
        # Without terms the sum is 0 with a graph attached: divide it by 1, not by 0.
        return values.sum() / (1 if count is None else count + (count == 0))


def summary(function: Callable[..., Any]) -> str:
    """Return the first line of a docstring."""
    return (inspect.getdoc(function) or "").partition("\n")[0]


def check_known(owner: str, key: str, known: Collection[str]) -> None:
    """Raise a ConfigError unless a setting exists."""
    if key not in known:
        hint = did_you_mean(key, known) or (f" Settings: {', '.join(known)}." if known else " It has no settings.")
        raise ConfigError(f"{owner}: no setting '{key}'.{hint}")


# Types of settings, and the words for them.
TYPES = {bool: "True or False", int: "an integer", float: "a finite number", torch.Generator: "a torch.Generator"}


def check_value(setting: str, value: Any, kind: type, options: Sequence[Any] = ()) -> Any:
    """Return a setting as a Python number; ConfigError unless it is one of the options, or of a type."""
    value = to_python_scalar(value)
    valid = is_number(value, kind) if kind in (int, float) else isinstance(value, kind)
    if value not in options if options else not valid:
        expected = f"one of {', '.join(options)}" if options else TYPES[kind]
        raise ConfigError(f"{setting} must be {expected}, got {value!r}.")
    return value


LOSSES: Registry[Loss] = Registry("loss")


def loss(
    *,
    family: str | None = None,
    paper: str,
    formula: str,
    use: str,
    space: Mapping[str, Range] | None = None,
    inputs: Inputs = BATCH,
    cost: str | None = None,
    reductions: tuple[Reduction, ...] = ("mean", "sum", "none", "nonzero"),
) -> Callable[[LossFunction], Callable[..., Tensor]]:
    """Register a function as a loss under its own name.

    The function takes `Pairs` (or `ToClasses`) and keyword-only settings with defaults. It returns one value per anchor
    [N]; or (sums [N], number of terms) when the mean is not over anchors; or a finished 0-dim loss, with
    `reductions=("mean",)`. A setting annotated `float | Tensor` may be learned: the function must be differentiable in
    it. The public function takes `Pairs`, or (emb, labels, *params), and the settings and `reduction` as keywords.

    Args:
        family: "pair", "tuple", "neighbour", "proxy", "softmax" or a new one; by default the name of its file.
        paper: Where it was published.
        formula: The formula, as text.
        use: When to use it.
        space: Search ranges of the settings.
        inputs: How its input is built, and the state it needs.
        cost: Computational cost of one batch; "N^2 D" for pairs and "N C D" for classes by default.
        reductions: The reductions that its definition allows.

    Returns:
        A decorator that returns the public function.
    """

    def register(function: LossFunction) -> Callable[..., Tensor]:
        buffers = {buffer.name for buffer in inputs.buffers}
        parameters = inspect.signature(function).parameters.values()
        keyword_only = [p for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in buffers]
        entry = Loss(
            name=function.__name__,
            function=function,
            family=family or function.__module__.rpartition(".")[2],
            paper=paper,
            formula=formula,
            use=use,
            cost=cost or ("N^2 D" if inputs.pairs else "N C D"),
            inputs=inputs,
            space=space or {},
            reductions=reductions,
            loss_kwargs={p.name: p.default for p in keyword_only},
            learnable=frozenset(p.name for p in keyword_only if "Tensor" in str(p.annotation)),
        )
        _check_declarations(entry)
        LOSSES.add(entry.name, entry)
        return _public_function(entry)

    return register


def _check_declarations(entry: Loss) -> None:
    """Raise if a declaration refers to a setting or a dimension that does not exist."""
    inputs = entry.inputs
    letters = {letter for state in inputs.state for letter in state.shape}
    for what, names, known in (
        ("space", entry.space, entry.settings),
        ("builder_docs", inputs.builder_docs, inputs.builder_kwargs),
        ("dims, dropout or switch", inputs.state_settings, inputs.builder_kwargs),
        ("shape", letters, {"C", "D", *inputs.dims}),
        ("learned_scalars", (scalar.name for scalar in inputs.learned_scalars), entry.learnable),
    ):
        unknown = sorted(set(names) - set(known))
        if unknown:
            reason = "not annotated `float | Tensor`" if what == "learned_scalars" else "not declared"
            raise ConfigError(f"{entry.name}: {what} refers to {', '.join(unknown)}, which is {reason}.")


def _public_function(entry: Loss) -> Callable[..., Tensor]:
    """Return the function that users call: it checks its arguments, builds the input and reduces the result."""
    inputs, build_signature = entry.inputs, inspect.signature(entry.inputs.build)

    @functools.wraps(entry.function)
    def public(*args: Any, reduction: Reduction = "mean", **settings: Any) -> Tensor:
        by_name = {} if inputs.pairs else {k: settings.pop(k) for k in build_signature.parameters if k in settings}
        state = {b.name: settings.pop(b.name) for b in inputs.buffers if b.name in settings}
        settings = entry.check(settings)
        for key in settings:
            if key in inputs.builder_kwargs:
                raise ConfigError(f"{entry.name}: '{key}' is a setting of nk.Objective, not of the function.")
        if inputs.pairs:
            if len(args) != 1 or not isinstance(args[0], Pairs):
                raise ConfigError(f"{entry.name} takes Pairs: {entry.call_example}.")
            built = args[0]
        else:
            try:
                bound = build_signature.bind(*args, **by_name)
            except TypeError as error:
                raise ConfigError(f"{entry.name}: {error}. Call it as {entry.call_example}.") from None
            entry.check_params(bound.args[2:])  # after emb and labels
            built = inputs.build(*bound.args, **bound.kwargs)
        with full_precision(built.sim):
            return entry.reduce(entry.function(built, **settings, **state), reduction)

    public.loss = entry  # type: ignore[attr-defined]
    function = inspect.signature(entry.function).parameters.values()
    called = function if inputs.pairs else build_signature.parameters.values()
    reduction = inspect.Parameter("reduction", inspect.Parameter.KEYWORD_ONLY, default="mean", annotation="Reduction")
    parameters = [p for p in called if p.kind <= p.POSITIONAL_OR_KEYWORD]
    parameters += [*(p for p in function if p.kind is p.KEYWORD_ONLY), reduction]
    # What help() shows.
    public.__signature__ = inspect.Signature(parameters, return_annotation="Tensor")  # type: ignore[attr-defined]
    return public
