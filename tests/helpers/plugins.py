"""A loss in a file of its own, as a user writes it."""

from pathlib import Path

LOSS = '''
from torch import Tensor

from nearkin.losses import linear, loss, miner
from nearkin.ops import Pairs


@loss(family="pair", paper="a test", formula="f", use="u", space={"margin": linear(0.0, 1.0)})
def NAME(p: Pairs, *, margin: float = MARGIN) -> Tensor:
    """Push negatives, pull positives.

    Args:
        p: Cosines.
        margin: A cosine.

    Returns:
        One value per anchor [N].
    """
    return ((p.sim - margin).relu() * p.neg - p.sim * p.pos).sum(1)
'''


def write_loss(folder: Path, name: str, margin: float = 0.5) -> Path:
    file = folder / f"{name}.py"
    file.write_text(LOSS.replace("NAME", name).replace("MARGIN", str(margin)))
    return file
