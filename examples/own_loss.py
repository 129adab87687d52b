"""Your own loss: one registered function, which can be called, trained with, tuned and listed like any other.

python examples/own_loss.py
"""

import torch
from torch import Tensor

import nearkin as nk
from nearkin.losses import linear, log, loss
from nearkin.ops import log_sum_exp, softplus


@loss(
    family="tuple",
    paper="none; an example",
    formula="mean_a of  log(1 + exp(scale (soft max over negatives of s - soft min over positives of s + margin)))",
    use="Example only.",
    space={"scale": log(4, 64), "margin": linear(0, 0.5)},
)
def soft_gap(p: nk.Pairs, *, scale: float = 16.0, margin: float = 0.1) -> Tensor:
    """Separate the farthest positive from the nearest negative, both as soft extremes."""
    nearest_negative = log_sum_exp(p.sim, p.neg, scale)
    farthest_positive = log_sum_exp(p.sim, p.pos, -scale)
    return softplus(nearest_negative + farthest_positive + scale * margin)


def main() -> None:
    torch.manual_seed(0)
    labels = torch.arange(16).repeat_interleave(4)
    emb = torch.randn(64, 32, requires_grad=True)
    objective = nk.Objective("soft_gap", scale=8.0, miner="multi_similarity")  # by its registered name
    optimizer = torch.optim.Adam([emb], lr=0.05)
    for step in range(61):
        value = objective(emb, labels)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step:2}: loss {value:.3f}, R@1 {100 * nk.score(emb.detach(), labels)['R@1']:.0f}")
    print(f"\n{nk.losses.LOSSES['soft_gap'].name} is registered, as one of {len(nk.losses.LOSSES)} losses")


if __name__ == "__main__":
    main()
