"""Your own training loop with nearkin's loss, sampler and metrics.

python examples/plain_loop.py
"""

import argparse

import torch
from torch import nn

import nearkin as nk
from nearkin.data import Table, glyphs, make_sampler


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--classes", type=int, default=116, help="number of training classes, and of test classes")
    args = parser.parse_args()

    table = glyphs.load()
    train = table.of_classes(list(range(args.classes)))
    test = table.of_classes(list(range(args.classes, 2 * args.classes)))

    torch.manual_seed(0)
    channels = table.images.shape[0]
    network = nn.Sequential(
        *(nn.Conv2d(channels, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.AdaptiveAvgPool2d(2)),
        *(nn.Flatten(), nn.Linear(256, 64)),
    )
    objective = nk.Objective("proxy_anchor", num_classes=args.classes, dim=64)
    optimizer = torch.optim.AdamW(
        [{"params": network.parameters(), "lr": 2e-3}, {"params": objective.parameters(), "lr": 3e-2}]
    )
    sampler = make_sampler(train.labels, batch_size=64, samples_per_class=4, seed=0)  # 16 classes of 4 images
    labels = torch.from_numpy(train.labels)

    for epoch in range(args.epochs):
        network.train()
        for rows in sampler.epoch(epoch):
            loss = objective(network(read(train, rows)), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        network.eval()
        with torch.no_grad():
            emb = network(read(test, range(len(test))))
        scores = nk.score(emb, test.labels)
        low, high = scores.interval("R@1")
        print(
            f"epoch {epoch + 1}: loss {loss:.2f}, R@1 on unseen classes {100 * scores['R@1']:.1f} "
            f"({100 * low:.1f} to {100 * high:.1f})"
        )


def read(table: Table, rows) -> torch.Tensor:
    """Read images as floats from -0.5 to 0.5."""
    return table.images.read(torch.as_tensor(list(rows)).numpy()).float() / 255 - 0.5


if __name__ == "__main__":
    main()
