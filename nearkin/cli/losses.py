"""`nearkin losses`: list the losses, or explain one."""

from dataclasses import dataclass
from pathlib import Path

from nearkin.cli._arguments import parse, require_names
from nearkin.errors import ConfigError


@dataclass(frozen=True)
class LossesArgs:
    """List the losses by family, with the papers whose tables have them, or explain one: formula, settings, use.

    nearkin losses

    nearkin losses multi_similarity --figure gradient.png
    """

    figure: Path | None = None
    """Plot the gradient of the loss over the similarity of a positive and a negative pair, as a PNG file."""


def run(argv: list[str]) -> None:
    name = argv[:1] if argv and not argv[0].startswith("-") else []
    args = parse(LossesArgs, argv[len(name) :], "nearkin losses [NAME]")
    if args.figure is not None and not name:
        raise ConfigError("--figure: no loss given. Example: nearkin losses triplet --figure triplet.png.")
    require_names("loss", name)
    from nearkin.report.losses import explain, list_losses

    print(explain(name[0], args.figure) if name else list_losses())
