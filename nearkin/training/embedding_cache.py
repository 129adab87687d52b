"""Vectors of the judged images, kept in the run folder: a page of a fine-tuned network need not embed them again.

    vectors.npz    vectors [N, dim] float32, rows [N] (numbers in the source), part, data and weights they belong to

They are taken only where all of that fits what is asked for; otherwise whoever asks embeds anew.
"""

from __future__ import annotations

import io
import zipfile
import zlib

import numpy as np
import torch
from torch import Tensor

from nearkin._common.files import atomic_write
from nearkin.data.table import Table
from nearkin.training.run import Run

NAME = "vectors.npz"


def save_embeddings(run: Run, part: str, table: Table, vectors: Tensor) -> None:
    """Keep what the best epoch makes of a table. A folder that cannot be written is no reason to stop: time is lost."""
    if not run.is_writer:
        return
    buffer = io.BytesIO()
    try:
        np.savez(buffer, vectors=vectors.cpu().float().numpy(), rows=table.row_numbers, of=_of(run, part, table))
        atomic_write(run.path / NAME, buffer.getvalue())
    except OSError:
        return


def load_embeddings(run: Run, part: str, table: Table) -> Tensor | None:
    """The vectors of a table's rows [N, dim], or None where none are kept that are certainly theirs."""
    try:
        with np.load(run.path / NAME, allow_pickle=False) as stored:
            if not np.array_equal(stored["rows"], table.row_numbers) or str(stored["of"]) != _of(run, part, table):
                return None
            vectors = stored["vectors"]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):
        return None
    return torch.from_numpy(vectors)


def _of(run: Run, part: str, table: Table) -> str:
    weights = zlib.crc32((run.path / "best.pt").read_bytes())
    return f"{part} of {table.fingerprint} by {weights:08x}"
