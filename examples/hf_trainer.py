"""A loss of nearkin in the Trainer of Hugging Face transformers: `gather=True` makes N processes equal one.

python examples/hf_trainer.py
torchrun --nproc-per-node 2 examples/hf_trainer.py
"""

import tempfile

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import Trainer, TrainingArguments

import nearkin as nk


class Rows(Dataset):
    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {"x": self.images[row], "labels": self.labels[row]}


class Model(nn.Module):
    """The network with its loss; the Trainer takes the loss from the first output."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Linear(16, 8)
        self.objective = nk.Objective("proxy_anchor", num_classes=6, dim=8, gather=True)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        emb = self.network(x)
        return self.objective(emb, labels), emb


class BalancedTrainer(Trainer):
    def get_train_dataloader(self) -> DataLoader:
        sampler = nk.samplers.BalancedSampler(
            self.train_dataset.labels,
            batch_size=12,  # of all processes together
            samples_per_class=4,
            seed=0,
            rank=self.args.process_index,
            world_size=self.args.world_size,
        )
        return DataLoader(self.train_dataset, batch_sampler=sampler)


def main() -> None:
    torch.manual_seed(0)
    data = Rows(torch.randn(24, 16), torch.arange(6).repeat_interleave(4))
    model = Model()
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            folder,
            use_cpu=True,
            num_train_epochs=2,
            learning_rate=0.01,
            lr_scheduler_type="constant",
            optim="sgd",
            max_grad_norm=0.0,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = BalancedTrainer(model, settings, train_dataset=data)
        trainer.train()
        if trainer.is_world_process_zero():
            weight, proxies = model.network.weight, model.objective.proxies
            print(f"weight {weight.norm():.6f} proxies {proxies.norm():.6f}")


if __name__ == "__main__":
    main()
