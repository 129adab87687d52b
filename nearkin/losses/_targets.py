"""What an objective compares other than one label per sample: several labels, a hierarchy of them, or own pairs."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nearkin.errors import ConfigError, DataError
from nearkin.losses.registry import ONE_PER_CLASS, Loss


def is_label_matrix(labels: Any, loss: Loss) -> bool:
    """Return whether a pair loss gets several labels per sample: bool [N, T], or integers [N, L] of a hierarchy."""
    if not isinstance(labels, Tensor) or labels.dim() != 2 or labels.shape[1] < 2 or labels.is_floating_point():
        return False
    return loss.inputs.pairs and not loss.inputs.needs_classes and loss.inputs is not ONE_PER_CLASS


def check_ref_labels(labels: Tensor, ref_labels: Any) -> None:
    """Raise a DataError unless the references have as many labels as the samples."""
    other = labels if ref_labels is None else ref_labels
    if not isinstance(other, Tensor) or other.shape[1:] != labels.shape[1:] or other.dtype != labels.dtype:
        raise DataError(f"ref_labels: expected {labels.dtype} [M, {labels.shape[1]}], as labels.")


def own_pairs(
    loss: Loss, emb: Tensor, labels: Any, refs: Tensor | None, ref_labels: Any, pairs: Sequence[Tensor] | None
) -> tuple[Sequence[Tensor], Any, Any]:
    """Return pairs for `select_pairs`, and labels that need only exist: the pairs replace what follows from them."""
    if not loss.inputs.pairs or (loss.inputs.needs_classes and labels is None):
        raise ConfigError(f"{loss.name} compares samples with classes: pass labels, and no pairs.")
    if loss.inputs is ONE_PER_CLASS:
        raise ConfigError(f"{loss.name} takes one pair of every class: it cannot use other pairs.")
    if pairs is None:
        pairs, labels, ref_labels = masks_of_shared_labels(labels, ref_labels), None, None
    if refs is not None and ref_labels is None:
        ref_labels = torch.arange(len(refs))
    return pairs, torch.arange(len(emb)) if labels is None else labels, ref_labels


def masks_of_shared_labels(targets: Tensor, ref_targets: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return which samples of bool targets [N, T] share a label with which others, or references; and which not."""
    share = targets.float() @ (targets if ref_targets is None else ref_targets).float().t() > 0
    if ref_targets is not None:
        return share, ~share
    others = ~torch.eye(len(targets), dtype=torch.bool, device=targets.device)
    return share & others, ~share & others
