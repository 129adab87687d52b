"""How many planted label errors each method finds, on the same random draws.

    python benchmarks/label_errors.py FEATURES.npz                 all sets, five draws
    python benchmarks/label_errors.py FEATURES.npz --draws 1 --classes 0:100

FEATURES.npz contains `features` [N, D] and `labels` [N]. In each draw a fraction of the labels (3 %) is changed: to any
other class ("blind"), or to one of the five classes with the nearest mean ("similar"). Every method ranks all rows; its
precision is the fraction of changed labels among as many top rows as were changed. Even a perfect method stays below
100 % where the data have label errors of their own.

    votes      fraction of the 10 nearest neighbours with another label
    means      cosine to the nearest other class mean minus that to the own class mean, without the row itself
    cleanlab   confident learning (get_label_quality_scores, self-confidence) on out-of-fold probabilities of a logistic
               regression. Not among the extras of nearkin: pip install cleanlab
    ours       nearkin.analysis.find_label_errors; also the precision it expected and the accuracy of its suggestions
"""

from __future__ import annotations

import argparse
import time

import numpy as np

NUM_SIMILAR = 5  # classes that count as similar
INVERSE_PENALTY = 0.003  # of the logistic regression: the best of 0.001 to 1 on classes 0-99


def plant(x: np.ndarray, y: np.ndarray, share: float, kind: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Change some labels; return the labels and the changed rows."""
    rng = np.random.default_rng(seed)
    classes = int(y.max()) + 1
    rows = rng.choice(len(y), round(share * len(y)), replace=False)
    changed = y.copy()
    if kind == "blind":
        changed[rows] = (y[rows] + rng.integers(1, classes, len(rows))) % classes
    else:
        means = np.stack([x[y == c].mean(0) for c in range(classes)])
        means /= np.linalg.norm(means, axis=1, keepdims=True)
        sim = means @ means.T
        np.fill_diagonal(sim, -np.inf)
        similar = np.argsort(-sim, axis=1)[:, :NUM_SIMILAR]
        changed[rows] = similar[y[rows], rng.integers(0, NUM_SIMILAR, len(rows))]
    return changed, rows


def votes(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    from nearkin import neighbours

    index, similarity = neighbours(x, k=10)
    # Equal votes are ordered by the similarity of the voters.
    return (y[index] != y[:, None]).mean(1) + 1e-3 * similarity.mean(1)


def means(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    sums = np.stack([x[y == c].sum(0) for c in range(int(y.max()) + 1)])
    others = sums[y] - x
    sim = x @ (sums / np.linalg.norm(sums, axis=1, keepdims=True)).T
    own = (x * others).sum(1) / np.linalg.norm(others, axis=1)
    sim[np.arange(len(y)), y] = -np.inf
    return sim.max(1) - own


def cleanlab(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    from cleanlab.rank import get_label_quality_scores
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import cross_val_predict

    scaled = (x - x.mean(0)) / x.std()
    model = LogisticRegression(C=INVERSE_PENALTY, max_iter=200)
    probabilities = cross_val_predict(model, scaled, y, cv=5, method="predict_proba")
    return -get_label_quality_scores(y, probabilities, method="self_confidence")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("features")
    parser.add_argument("--classes", nargs="*", default=["0:100", "100:200", "0:200"])
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--share", type=float, default=0.03)
    parser.add_argument("--kinds", nargs="*", default=["blind", "similar"])
    parser.add_argument("--methods", nargs="*", default=["votes", "means", "cleanlab", "ours"])
    args = parser.parse_args()
    if "cleanlab" in args.methods:
        try:
            import cleanlab as _  # noqa: F401
        except ImportError:
            print("cleanlab is not installed and skipped. Run: pip install cleanlab\n")
            args.methods.remove("cleanlab")
    from nearkin.analysis.label_errors import find_label_errors

    with np.load(args.features) as stored:
        features, labels = stored["features"].astype(np.float32), stored["labels"].astype(np.int64)
    features /= np.linalg.norm(features, axis=1, keepdims=True)
    print("| classes | errors | method | precision % (each draw) | expected % | suggested class correct % | seconds |")
    print("|---|---|---|---|---:|---:|---:|", flush=True)
    for span in args.classes:
        first, last = map(int, span.split(":"))
        inside = (labels >= first) & (labels < last)
        x, y = features[inside], labels[inside] - first
        for kind in args.kinds:
            for method in args.methods:
                hits, expected, named, start = [], [], [], time.perf_counter()
                for seed in range(args.draws):
                    changed, rows = plant(x, y, args.share, kind, seed)
                    if method == "ours":
                        errors = find_label_errors(x, changed)
                        order = errors.order
                    else:
                        order = np.argsort(-{"votes": votes, "means": means, "cleanlab": cleanlab}[method](x, changed))
                    top = order[: len(rows)]
                    correct = top[np.isin(top, rows)]
                    hits.append(100 * len(correct) / len(rows))
                    if method == "ours":
                        expected.append(100 * errors.expected(len(rows)) / len(rows))
                        named.append(100 * np.mean(errors.suggested[correct] == y[correct]))
                seconds = (time.perf_counter() - start) / args.draws
                each = f"**{np.mean(hits):.1f}** ({', '.join(f'{h:.1f}' for h in hits)})"
                extra = [f"{np.mean(v):.1f}" if v else "" for v in (expected, named)]
                cells = [f"{first}-{last - 1}", kind, method, each, *extra, f"{seconds:.1f}"]
                print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
