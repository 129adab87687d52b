"""Your own network and your own dataset: train, evaluate, report, index, search, export.

python examples/own_model_and_data.py
"""

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import nearkin as nk
from nearkin.deploy.export import export
from nearkin.report import headline, write_page


class Stripes(Dataset):
    """Images of coloured stripes, a class for each colour and width: any dataset of (image, label) will do."""

    def __init__(self, classes: int, per_class: int) -> None:
        self.classes = [f"stripes {c}" for c in range(classes)]
        self.per_class = per_class

    def __len__(self) -> int:
        return len(self.classes) * self.per_class

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        label, rng = index // self.per_class, np.random.default_rng(index)
        colours = np.random.default_rng(1000 + label).uniform(0, 255, (2, 3))
        bands = (np.arange(32) + rng.integers(8)) // (2 + label % 4) % 2
        pixels = colours[bands][:, None] + rng.normal(0, 60, (32, 32, 3))
        return pixels.clip(0, 255).astype(np.uint8), label


class Network(nn.Module):
    """Maps a float batch [B, 3, 32, 32] to vectors [B, 64]: any module that does so will do."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(
            *(nn.Conv2d(3, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
            *(nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.BatchNorm2d(64), nn.ReLU()),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.conv(images).mean((2, 3))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--classes", type=int, default=40)
    parser.add_argument("--out", type=Path, default=Path("own"))
    args = parser.parse_args()
    data = Stripes(args.classes, per_class=12)

    torch.manual_seed(0)  # the initial weights are part of the name of the run: seed them to resume
    mean, std = (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)
    model = nk.Embedder.wrap(Network(), preprocess=(mean, std, 32))  # dim=128 would add a linear head

    recipe = nk.recipes.from_scratch()
    recipe = replace(recipe, train=replace(recipe.train, epochs=args.epochs, batch_size=64))
    run = nk.fit(recipe, args.out / "runs", data=data, model=model)  # classes are split, the test classes sealed
    print(headline(run))
    print(f"report: {write_page(run, args.out / 'report.html', data=data)}")

    trained = nk.load(run.path, module=Network())  # the run folder has the weights, not the code
    other = Stripes(args.classes + 10, per_class=12)
    unseen = torch.utils.data.Subset(other, range(len(data), len(other)))
    print(nk.evaluate(trained, unseen))

    index = nk.Index.build(trained, data)
    index.save(args.out / "index")
    query, _ = unseen[0]
    for hit in nk.Index.load(args.out / "index", trained).search(query.transpose(2, 0, 1), k=3):
        print(f"  {hit.similarity:.3f}  {hit.label}")
    print(export(trained, "torch", args.out / "model.pt2"))


if __name__ == "__main__":
    main()
