"""Compare losses on your features: train each on the same classes, then test the differences per query.

python examples/compare_losses.py features.npz            # arrays `features` [N, F] and `labels` [N]
"""

import argparse
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import nearkin as nk
from nearkin.config import ComponentConfig


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
    scores = {}
    for name in args.losses:
        run = nk.fit(replace(base, loss=ComponentConfig(name)), args.runs)
        scores[name] = nk.Scores.load(run.path / "per_query.npz")  # one value per test query
        low, high = scores[name].interval("R@1")
        print(f"{name:20} R@1 {100 * scores[name]['R@1']:.1f} ({100 * low:.1f} to {100 * high:.1f})  {run.path}")
    print()
    for first, second in combinations(args.losses, 2):
        comparison = nk.compare(scores[first], scores[second], "R@1")
        verdict = "significant" if comparison.p_value < 0.05 else "not significant"
        print(
            f"{second} vs {first}: {100 * comparison.difference:+.2f} "
            f"({100 * comparison.low:+.2f} to {100 * comparison.high:+.2f}), {verdict}"
        )


if __name__ == "__main__":
    main()
