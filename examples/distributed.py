"""Several processes, one batch: the gradient is that of one process on the whole batch.

    torchrun --nproc-per-node 2 examples/distributed.py          # gloo on CPUs, nccl on GPUs
    python examples/distributed.py                               # the same in one process, for comparison

For whole trainings there is nothing to write: torchrun --nproc-per-node 4 -m nearkin train ...
"""

import torch
from torch import nn

import nearkin as nk
from nearkin.training.distributed import (
    all_gather_with_grad,
    all_reduce_gradients,
    is_main_process,
    process_group,
    rank,
    rank_slice,
)
from nearkin.training.factory import choose_device


def main() -> None:
    with process_group(choose_device("cpu")):
        torch.manual_seed(0)  # the same first weights everywhere
        network = nn.Linear(16, 8)
        images, labels = torch.randn(24, 16), torch.arange(6).repeat_interleave(4)

        mine = rank_slice(len(images))  # this process's part of the batch
        objective = nk.Objective("multi_similarity")
        everyone, kinds = all_gather_with_grad(
            network(images[mine]), labels[mine]
        )  # of all; gradients go to this process's own
        loss = objective(everyone, kinds)
        loss.backward()
        all_reduce_gradients(network.parameters())
        print(f"rank {rank()}: rows {mine.start} to {mine.stop}, loss {loss:.6f}")
        if is_main_process():
            print(f"gradient norm {network.weight.grad.norm():.6f}")


if __name__ == "__main__":
    main()
