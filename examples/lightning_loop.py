"""A loss of nearkin in a LightningModule, on one device or several: `gather=True` makes N processes equal one.

python examples/lightning_loop.py
torchrun --nproc-per-node 2 examples/lightning_loop.py
"""

import os

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import nearkin as nk


class Embedding(lightning.LightningModule):
    def __init__(self, images: Tensor, labels: Tensor) -> None:
        super().__init__()
        self.images, self.labels = images, labels
        self.network = nn.Linear(16, 8)
        # A submodule, so Lightning moves, saves and synchronises its proxies like every other parameter.
        self.objective = nk.Objective("proxy_anchor", num_classes=6, dim=8, gather=True)

    def train_dataloader(self) -> DataLoader:
        sampler = nk.samplers.BalancedSampler(
            self.labels,
            batch_size=12,  # of all processes together
            samples_per_class=4,
            seed=0,
            rank=self.global_rank,
            world_size=self.trainer.world_size,
        )
        return DataLoader(TensorDataset(self.images, self.labels), batch_sampler=sampler)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        x, y = batch
        return self.objective(self.network(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def main() -> None:
    torch.manual_seed(0)
    images, labels = torch.randn(24, 16), torch.arange(6).repeat_interleave(4)
    module = Embedding(images, labels)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("WORLD_SIZE", 1)),
        max_epochs=2,
        use_distributed_sampler=False,  # ours shares every batch between the processes itself
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module)
    if trainer.is_global_zero:
        norms = (p.norm().item() for p in (module.network.weight, module.objective.proxies))
        print("weight {:.6f} proxies {:.6f}".format(*norms))


if __name__ == "__main__":
    main()
