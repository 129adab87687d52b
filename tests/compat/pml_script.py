"""A training script as it is written for pytorch-metric-learning. The test runs it with only the imports changed."""

import numpy as np
import torch
from pytorch_metric_learning import distances, losses, miners, reducers, samplers
from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
from pytorch_metric_learning.utils.inference import CustomKNN

CLASSES, DIM = 8, 16


def run(dtype: torch.dtype) -> dict[str, object]:
    """Train a linear model for three steps with each loss. Returns losses, gradients and final metrics."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(CLASSES).repeat_interleave(12)
    centers = torch.randn(CLASSES, 24, generator=generator)
    data = (centers[labels] + 1.5 * torch.randn(len(labels), 24, generator=generator)).to(dtype)
    dataset = torch.utils.data.TensorDataset(data, labels)

    setups = {
        "contrastive": (lambda: losses.ContrastiveLoss(pos_margin=0.1, neg_margin=1.0), None),
        "multi_similarity": (
            lambda: losses.MultiSimilarityLoss(alpha=2, beta=50, base=0.5),
            miners.MultiSimilarityMiner(),
        ),
        "triplet": (
            lambda: losses.TripletMarginLoss(
                distance=distances.CosineSimilarity(), reducer=reducers.ThresholdReducer(low=0.01)
            ),
            miners.TripletMarginMiner(margin=0.2, type_of_triplets="semihard"),
        ),
        "all_triplets": (losses.TripletMarginLoss, None),
        "proxy_anchor": (lambda: losses.ProxyAnchorLoss(CLASSES, DIM), None),
        "subcenter_arcface": (lambda: losses.SubCenterArcFaceLoss(num_classes=CLASSES, embedding_size=DIM), None),
        "memory": (lambda: losses.CrossBatchMemory(losses.NTXentLoss(temperature=0.1), DIM, memory_size=64), None),
    }
    found: dict[str, object] = {}
    for name, (make_loss, miner) in setups.items():
        torch.manual_seed(1)
        np.random.seed(1)  # noqa: NPY002
        model = torch.nn.Linear(24, DIM).to(dtype)
        loss_func = make_loss()
        optimizer = torch.optim.SGD([*model.parameters(), *loss_func.parameters()], lr=0.05)
        sampler = samplers.MPerClassSampler(labels, m=4, batch_size=24, length_before_new_iter=72)
        for step, (x, y) in enumerate(torch.utils.data.DataLoader(dataset, batch_size=24, sampler=sampler)):
            optimizer.zero_grad()
            embeddings = model(x)
            loss = loss_func(embeddings, y, miner(embeddings, y)) if miner else loss_func(embeddings, y)
            loss.backward()
            optimizer.step()
            found[f"{name} loss {step}"] = loss.detach()
            found[f"{name} gradient {step}"] = model.weight.grad.clone()
        found[f"{name} weight"] = model.weight.detach()
        for key, value in loss_func.named_parameters():
            found[f"{name} {key}"] = value.detach()
        with torch.no_grad():
            embeddings = torch.nn.functional.normalize(model(data))
        calculator = AccuracyCalculator(
            exclude=("AMI", "NMI"), device=torch.device("cpu"), knn_func=CustomKNN(distances.LpDistance())
        )
        metrics = calculator.get_accuracy(embeddings, labels)
        per_query = AccuracyCalculator(include=("precision_at_1",), k=5, device=torch.device("cpu"), avg_of_avgs=True)
        even, odd = embeddings[::2].contiguous(), embeddings[1::2].contiguous()
        found |= {f"{name} {key}": value for key, value in metrics.items()}
        found[f"{name} query"] = per_query.get_accuracy(even, labels[::2], odd, labels[1::2])["precision_at_1"]
    return found
