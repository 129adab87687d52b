"""Train on items with several labels each, and test on combinations of labels that training never saw.

python examples/multi_label.py tagged.npz    # arrays `features` [N, F] and `tags` [N], such as "sooty albatross"
"""

import argparse
from pathlib import Path

import numpy as np
import torch

import nearkin as nk


def whitening(features: torch.Tensor, dim: int) -> torch.nn.Linear:
    """A linear map to the first principal components, scaled: a better start than random weights."""
    mean = features.mean(0)
    _, scale, axes = torch.pca_lowrank(features - mean, q=dim, center=False)
    model = torch.nn.Linear(features.shape[1], dim)
    with torch.no_grad():
        model.weight.copy_((axes / (scale + 0.3 * scale.mean())).T * len(features) ** 0.5)
        model.bias.copy_(-model.weight @ mean)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tagged", type=Path)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()

    with np.load(args.tagged) as arrays:
        features, texts = torch.as_tensor(arrays["features"]).float(), arrays["tags"]
    words = sorted({word for text in texts for word in text.split()})
    tags = torch.tensor([[word in text.split() for word in words] for text in texts.tolist()])
    # Half of the distinct combinations are for the test.
    combinations = np.random.default_rng(0).permutation(np.unique(texts))
    is_test = torch.as_tensor(np.isin(texts, combinations[: len(combinations) // 2]))
    print(f"{len(words)} labels, {tags.sum(1).float().mean():.1f} per item, {int(is_test.sum())} items for the test")

    torch.manual_seed(0)
    rows = torch.nonzero(~is_test).ravel()
    model = whitening(features[rows], args.dim)
    objective = nk.Objective("supcon")  # items that share a label are positives
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    sampler = nk.samplers.BalancedSampler(tags[rows], batch_size=128, samples_per_class=4, seed=0)
    for _ in range(args.epochs):
        for batch in sampler:
            loss = objective(model(features[rows[batch]]), tags[rows[batch]])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    for name, emb in (("raw features", features), ("trained", model(features).detach())):
        scores = nk.score(emb[is_test], tags[is_test], ks=(1,))
        low, high = scores.interval("MAP@R")
        text = f"R@1 {100 * scores['R@1']:.1f}  MAP@R {100 * scores['MAP@R']:.1f}"
        print(f"{name:12}  {text} ({100 * low:.1f} to {100 * high:.1f})")


if __name__ == "__main__":
    main()
