"""Which loss is better on your features? Train several on the same classes, compare them query by query.

python examples/compare_losses.py features.npz            # arrays `features` [N, F] and `labels` [N]
"""

import argparse
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import nearkin as nk
from nearkin._common.progress import Reporter
from nearkin.config.recipe import ComponentConfig


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("features", type=Path)
    parser.add_argument("--losses", nargs="+", default=["norm_softmax", "proxy_anchor", "multi_similarity"])
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    args = parser.parse_args()

    base = nk.recipes.features_default()
    base = replace(
        base,
        data=replace(base.data, root=args.features),
        model=replace(base.model, dim=args.dim),
        train=replace(base.train, samples_per_class=4),
    )
    found = {}
    for name in args.losses:
        run = nk.fit(replace(base, loss=ComponentConfig(name)), args.runs, reporter=Reporter(quiet=True))
        found[name] = nk.Scores.load(run.path / "per_query.npz")  # the value of every test query
        low, high = found[name].interval("R@1")
        print(f"{name:20} R@1 {100 * found[name]['R@1']:.1f} ({100 * low:.1f} to {100 * high:.1f})  {run.path}")
    print()
    for first, second in combinations(args.losses, 2):
        difference = nk.compare(found[first], found[second], "R@1")
        sure = "settled" if difference.p_value < 0.05 else "cannot be told apart"
        print(
            f"{second} less {first}: {100 * difference.difference:+.2f} "
            f"({100 * difference.low:+.2f} to {100 * difference.high:+.2f}), {sure}"
        )


if __name__ == "__main__":
    main()
