"""Distributed loss: several processes share a batch and get the gradient of one process on the whole batch.

    torchrun --nproc-per-node 2 examples/distributed.py          # gloo on CPUs, nccl on GPUs
    python examples/distributed.py                               # one process, for comparison

To train a whole recipe, no code is needed: torchrun --nproc-per-node 4 -m nearkin train ...
"""

import torch
from torch import nn

import nearkin as nk
from nearkin.training import choose_device, distributed


def main() -> None:
    with distributed.process_group(choose_device("cpu")):
        torch.manual_seed(0)  # the same initial weights on every rank
        network = nn.Linear(16, 8)
        images, labels = torch.randn(24, 16), torch.arange(6).repeat_interleave(4)

        rows = distributed.rank_slice(len(images))  # this rank's part of the batch
        objective = nk.Objective("multi_similarity")
        # Embeddings and labels of all ranks; gradients flow to this rank's own rows.
        emb, all_labels = distributed.all_gather_with_grad(network(images[rows]), labels[rows])
        loss = objective(emb, all_labels)
        loss.backward()
        distributed.all_reduce_gradients(network.parameters())
        print(f"rank {distributed.rank()}: rows {rows.start} to {rows.stop}, loss {loss:.6f}")
        if distributed.is_main_process():
            print(f"gradient norm {network.weight.grad.norm():.6f}")


if __name__ == "__main__":
    main()
