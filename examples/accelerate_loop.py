"""A loss of nearkin in a loop with Hugging Face accelerate: `gather=True` makes N processes equal one.

python examples/accelerate_loop.py
torchrun --nproc-per-node 2 examples/accelerate_loop.py          # or: accelerate launch
"""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import nearkin as nk


def main() -> None:
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    images, labels = torch.randn(24, 16), torch.arange(6).repeat_interleave(4)
    # The sampler shares every batch between the processes itself, so the loader is not passed to `prepare`.
    sampler = nk.samplers.BalancedSampler(
        labels,
        batch_size=12,  # of all processes together
        samples_per_class=4,
        seed=0,
        rank=accelerator.process_index,
        world_size=accelerator.num_processes,
    )
    loader = DataLoader(TensorDataset(images, labels), batch_sampler=sampler)
    network = nn.Linear(16, 8)
    objective = nk.Objective("proxy_anchor", num_classes=6, dim=8, gather=True)
    optimizer = torch.optim.SGD([*network.parameters(), *objective.parameters()], lr=0.01)
    network, objective, optimizer = accelerator.prepare(network, objective, optimizer)
    for _ in range(2):
        for x, y in loader:
            loss = objective(network(x), y)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
    if accelerator.is_main_process:
        weight = accelerator.unwrap_model(network).weight
        proxies = accelerator.unwrap_model(objective).proxies
        print(f"weight {weight.norm():.6f} proxies {proxies.norm():.6f}")
    accelerator.wait_for_everyone()  # a process that ends first would close the connections of the others
    accelerator.end_training()


if __name__ == "__main__":
    main()
