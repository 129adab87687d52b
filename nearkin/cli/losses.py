"""`nearkin losses`: the losses by family, or one explained."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from nearkin.cli._arguments import parse
from nearkin.errors import ConfigError


@dataclass(frozen=True)
class LossesArgs:
    """List the losses by family, or explain one: formula, settings and ranges, when to use it.

    nearkin losses

    nearkin losses multi_similarity --picture gradient.png
    """

    picture: Path | None = None
    """Draw how hard the loss pulls and pushes over similarity, as a PNG file."""


def run(argv: list[str]) -> None:
    named = argv[:1] if argv and not argv[0].startswith("-") else []
    args = parse(LossesArgs, argv[len(named) :], "nearkin losses [NAME]")
    if args.picture is not None and not named:
        raise ConfigError("--picture: name a loss to draw, for example: nearkin losses triplet --picture triplet.png.")
    from nearkin.report.losses import explain, list_losses

    print(explain(named[0], args.picture) if named else list_losses())
