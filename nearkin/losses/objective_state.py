"""The state of an objective: its learned parameters, its buffers and its memory of earlier embeddings."""

import math
from collections.abc import Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from nearkin._common.registry import is_number, to_python_scalar
from nearkin.errors import ConfigError
from nearkin.losses.registry import LOSSES, LearnedScalar, Loss, Param
from nearkin.ops.checks import check_range
from nearkin.ops.pairs import as_batch, as_labels


class ObjectiveState(nn.Module):
    """What an `Objective` learns and remembers, as its loss declares it."""

    name: str
    num_classes: int | None
    dim: int | None
    loss_kwargs: dict[str, Any]
    builder_kwargs: dict[str, Any]
    proxies: nn.Parameter
    memory_emb: Tensor
    memory_labels: Tensor
    memory_state: Tensor

    @property
    def loss(self) -> Loss:
        """The registered loss."""
        # Looked up, not stored: a module without functions can be pickled.
        return LOSSES[self.name]

    @property
    def class_vectors(self) -> Tensor | None:
        """The learned vector of every class, [C, D] or [C, K, D]: proxies, or the weight of a linear head; or None."""
        return next((value for param, value in self._learned() if param.shape[:1] + param.shape[-1:] == "CD"), None)

    def _create_parameters(self) -> None:
        inputs = self.loss.inputs
        sizes: dict[str, Any] = {letter: self.builder_kwargs[setting] for letter, setting in inputs.dims.items()}
        sizes |= {"C": self.num_classes, "D": self.dim}
        for state in inputs.state:
            for letter, argument in (("C", "num_classes"), ("D", "dim")):
                if letter in state.shape and sizes[letter] is None:
                    verb = "learns" if isinstance(state, Param) else "stores"
                    raise ConfigError(f"{self.name} {verb} {state.name} for every class: pass {argument}=...")
        for buffer in inputs.buffers:
            self.register_buffer(buffer.name, torch.full([sizes[letter] for letter in buffer.shape], buffer.init))
        for param in inputs.params:
            value = torch.zeros([sizes[letter] for letter in param.shape])
            if param.init == "normal":
                # The variance of the published proxy losses: it sets how far one step turns a proxy.
                nn.init.normal_(value, std=math.sqrt(2.0 / len(value)))
            self.register_parameter(param.name, nn.Parameter(value))
        for scalar in inputs.learned_scalars:
            if scalar.switch is None or self.builder_kwargs[scalar.switch]:
                initial = torch.tensor(float(self.loss_kwargs[scalar.name]))
                self.register_parameter(scalar.name, nn.Parameter(initial))

    def _learned(self) -> list[tuple[Param | LearnedScalar, Tensor]]:
        """Return what is learned, with its values."""
        states: tuple[Param | LearnedScalar, ...] = (*self.loss.inputs.params, *self.loss.inputs.learned_scalars)
        return [(s, cast(Tensor, getattr(self, s.name))) for s in states if s.name in self._parameters]

    @torch.no_grad()
    def init_proxies(self, emb: Tensor, labels: Tensor) -> None:
        """Set the proxies to the mean direction of each class's embeddings: random ones would damage a good network.

        Several proxies of a class keep their random offsets around the mean; a class without embeddings its proxies.
        """
        if "proxies" not in self._parameters:
            return
        sums = torch.zeros(len(self.proxies), emb.shape[1], dtype=torch.float64)
        sums.index_add_(0, labels.cpu(), normalize(emb.cpu().double(), dim=1))
        means = normalize(sums, dim=1).to(self.proxies)
        if self.proxies.ndim == 2:
            present = means.norm(dim=1) > 0.5  # a proxy at 0 has no direction, and would never move again
            self.proxies[present] = means[present]
        else:
            offsets = normalize(self.proxies, dim=-1)
            self.proxies.copy_(normalize(means[:, None] + 0.1 * offsets, dim=-1))

    def param_groups(self, lr: float) -> list[dict[str, Any]]:
        """Return one optimizer group per parameter, with its "name", given the learning rate of the network."""
        return [
            {"name": s.name, "params": [value], "lr": lr * s.lr} | ({} if s.decay else {"weight_decay": 0.0})
            for s, value in self._learned()
        ]

    def _create_memory(self, size: int) -> None:
        size = as_int("memory", size, "a number of embeddings, 0 or more", minimum=0)
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

    @property
    def refreshes_from(self) -> Literal["", "labels", "embeddings"]:
        """What `refresh` needs of the training set; empty if the loss has no state that describes it."""
        if self.loss.inputs.refresh is None:
            return ""
        return "embeddings" if self.loss.inputs.refresh_embeddings else "labels"

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

        It needs the labels of the training set [n], and for some losses its embeddings [n, D]; see `refreshes_from`.
        """
        inputs = self.loss.inputs
        if inputs.refresh is None:
            return
        if self.refreshes_from == "embeddings" and emb is None:
            raise ConfigError(f"{self.name}: pass the embeddings of the training set: objective.refresh(labels, emb).")
        labels = as_labels(labels) if emb is None else as_batch(emb, labels)[1]
        assert self.num_classes is not None
        check_range(labels, labels, self.num_classes)
        self._store(inputs.refresh(emb, labels, self.num_classes))


def as_int(name: str, value: Any, expected: str = "an integer above 0", minimum: int = 1) -> int:
    """Return an integer of any type, NumPy's included, as an int; or raise."""
    number = to_python_scalar(value)
    if not is_number(number, int) or number < minimum:
        raise ConfigError(f"{name}: expected {expected}, got {value!r}.")
    return cast(int, number)
