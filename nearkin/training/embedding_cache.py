"""Embeddings of the test images, saved in the run folder so that a report needs no forward pass.

    vectors.npz    vectors [N, dim] float32, rows [N] (row numbers in the source), and what they belong to

They are used only if part, data and weights all match; otherwise the images are embedded again.
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

FILE_NAME = "vectors.npz"


def save_embeddings(run: Run, part: str, table: Table, embeddings: Tensor) -> None:
    """Save the best epoch's embeddings of a table; ignored if the folder cannot be written, as it only saves time."""
    if not run.is_writer:
        return
    buffer = io.BytesIO()
    try:
        tag = _tag(run, part, table)
        np.savez(buffer, vectors=embeddings.cpu().float().numpy(), rows=table.row_numbers, of=tag)
        atomic_write(run.path / FILE_NAME, buffer.getvalue())
    except OSError:
        return


def load_embeddings(run: Run, part: str, table: Table) -> Tensor | None:
    """Load saved embeddings."""
    try:
        # Opened here: np.load does not close a file that proves broken.
        with (run.path / FILE_NAME).open("rb") as file, np.load(file, allow_pickle=False) as stored:
            if not np.array_equal(stored["rows"], table.row_numbers) or str(stored["of"]) != _tag(run, part, table):
                return None
            embeddings = stored["vectors"]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):
        return None
    return torch.from_numpy(embeddings)


def _tag(run: Run, part: str, table: Table) -> str:
    weights = zlib.crc32((run.path / "best.pt").read_bytes())
    return f"{part} of {table.fingerprint} by {weights:08x}"
