"""Cross-entropy through its pairwise bound (Boudiaf et al. 2020): in turns, fit the classifier and minimise PCE.

python examples/bound_optimizer.py --figure bounds.png
"""

import argparse

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import nearkin as nk
from nearkin.analysis import lemma_1, pce_lambda
from nearkin.data import glyphs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--classes", type=int, default=24)
    parser.add_argument("--lam", type=float, default=1.0, help="smallest lambda of PCE")
    parser.add_argument("--figure", help="write the losses and the bounds of Lemma 1 along training to this file")
    args = parser.parse_args()

    torch.manual_seed(0)
    table = glyphs.load().of_classes(list(range(args.classes)))
    images = table.images.read(np.arange(len(table))).float() / 255 - 0.5
    x, labels = F.adaptive_avg_pool2d(images, 12).flatten(1), torch.from_numpy(table.labels)
    network = nn.Sequential(nn.Linear(x.shape[1], 64), nn.ReLU(), nn.Linear(64, 16))
    theta = nn.Linear(16, args.classes, bias=False)
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)

    history = []
    for number in range(args.rounds):
        emb = network(x).detach()
        cross_entropy = fit_classifier(theta, emb, labels)  # majorise: the bound is taken at this classifier
        probabilities = theta(emb).softmax(1).detach()
        eigenvalue = pce_lambda(emb, probabilities)  # close to 0 as soon as some class is almost certain
        lam = max(eigenvalue, args.lam)
        for _ in range(20):  # minimise
            optimizer.zero_grad()
            loss = nk.losses.pce(network(x), labels, probabilities, lam=lam)
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            after = network(x)
            spce = float(nk.losses.spce(after, labels, num_classes=args.classes))
        pce = float(loss.detach())
        history.append((cross_entropy, pce, spce, lemma_1(after, labels)))
        recall = nk.score(after, labels)["R@1"]
        print(
            f"round {number + 1}: cross-entropy {cross_entropy:.3f}, PCE {pce:.3f}, SPCE {spce:.3f}, "
            f"R@1 {100 * recall:.1f} (lambda {lam:.2g}, by eigenvalues {eigenvalue:.2g})"
        )
    if args.figure:
        draw(history, args.figure)


def fit_classifier(theta: nn.Linear, emb: torch.Tensor, labels: torch.Tensor) -> float:
    """Minimise the cross-entropy of fixed embeddings over the classifier, with a little weight decay."""
    optimizer = torch.optim.LBFGS(theta.parameters(), max_iter=40, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(theta(emb), labels) + 1e-3 * theta.weight.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    with torch.no_grad():
        return float(F.cross_entropy(theta(emb), labels))


def draw(history: list, path: str) -> None:
    """Draw the three losses, and each quantity of Lemma 1 with its bound (dashed)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 9), layout="constrained")
    names = list(history[0][3])
    plots = figure.subplots(len(names) + 1, 1, sharex=True)
    rounds = range(1, len(history) + 1)
    for i, (name, style) in enumerate((("cross-entropy", "-"), ("PCE", "--"), ("SPCE", ":"))):
        plots[0].plot(rounds, [row[i] for row in history], style, color="black", label=name)
    for axes, name in zip(plots[1:], names, strict=True):
        bounds = [row[3][name] for row in history]
        axes.plot(rounds, [bound.value for bound in bounds], "-", color="black", label=name)
        axes.plot(rounds, [bound.bound for bound in bounds], "--", color="grey", label=f"{bounds[0].relation} bound")
    for axes in plots:
        axes.legend(fontsize=7)
    plots[-1].set_xlabel("round")
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
