"""Tables of the papers that are computed rather than trained: toy rankings, gradients, decompositions, ranks, grids."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nearkin._common.progress import Reporter
from nearkin.analysis.information import Parts, decompose
from nearkin.bench.aggregate import available_results
from nearkin.bench.papers import table_11, table_15, thesis_results
from nearkin.bench.results import Result
from nearkin.bench.study import REHEARSAL
from nearkin.bench.tournament import run_tournament
from nearkin.bench.trials import StudyFolder
from nearkin.errors import ConfigError
from nearkin.losses import LOSSES
from nearkin.losses.classes import ToClasses
from nearkin.metrics.scores import score
from nearkin.ops.geometry import unit
from nearkin.report.tables import Grid

MAX_ROWS = 2000  # embeddings that are decomposed; the pairs grow with their square

TOY_METRICS = {"R@10": "R@10", "P@10": "P@10", "MAP@R": "MAP@R", "MAP@10": "MAP@10/k", "nDCG@10": "nDCG@10"}
TOY_RELEVANT = 4  # R of the paper
TOY_RANKINGS = ((1,), (1, 10), (1, 3), (1, 3, 7, 10), (1, 2, 3, 4))  # ranks of the relevant items in the first ten


def toy_rankings() -> Grid:
    """Multi-proxy anchor, table 3: the metrics of its five rankings; its MAP@10 divides by k."""
    rows = []
    for ranks in TOY_RANKINGS:
        # Relevant items that are not among the first ten come after them.
        relevant = [*ranks, *range(11, 11 + TOY_RELEVANT - len(ranks))]
        angle = torch.arange(1, 21) * 0.05
        gallery = torch.stack([angle.cos(), angle.sin()], 1)
        labels = [int(rank in relevant) for rank in range(1, 21)]
        scores = score([[1.0, 0.0]], [1], gallery, labels, ks=(10,))
        shown = "[" + ", ".join(str(int(rank in ranks)) for rank in range(1, 11)) + "]"
        rows.append((shown, *(f"{100 * scores[name]:.1f}" for name in TOY_METRICS.values())))
    return Grid("mpa-table3: metrics of five rankings, percent; MAP@10 divided by k", ("ranking", *TOY_METRICS), rows)


FACTOR_LOSSES = {
    "ProxyNCA": "proxy_nca",
    "ProxyAnchor": "proxy_anchor",
    "SoftTriple": "soft_triple",
    "MPA": "mpa",
    "MPA-DW": "mpa_dw",
    "MPA-AP": "mpa_ap",
}


def gradient_factors() -> Grid:
    """Multi-proxy anchor, table 1: which similarities the gradient of each loss depends on, changed one at a time."""
    rows = []
    for printed, name in FACTOR_LOSSES.items():
        marks = {factor: ("(yes)" if factor == "P-P" else "yes") * seen for factor, seen in _factors(name).items()}
        rows.append((printed, *marks.values()))
    title = "mpa-table1: what the gradient of a pair depends on; (yes): if the batch has another image of the class"
    return Grid(title, ("loss", *marks), rows)


def _factors(name: str) -> dict[str, bool]:
    """Images 0 and 1 are of class 0. `gradient(i, c)` is that of the similarity of image i and class c."""
    loss, labels = LOSSES[name], torch.tensor([0, 0, 1, 2])
    several = "K" in loss.inputs.params[0].shape
    generator = torch.Generator().manual_seed(0)
    start = 0.3 * torch.rand(4, 5, generator=generator, dtype=torch.float64)
    proxies = unit(torch.randn((5, 2, 6) if several else (5, 6), generator=generator, dtype=torch.float64))

    def gradient(sim: Tensor) -> Tensor:
        sim = sim.clone().requires_grad_()
        batch = ToClasses(sim[:, :, None].expand(-1, -1, 2) if several else sim, labels, proxies)
        value = loss.function(batch, **loss.loss_kwargs)
        assert isinstance(value, Tensor)
        return torch.autograd.grad(value.sum(), sim)[0]

    def depends(on: Sequence[tuple[Any, Any]], of: tuple[Any, Any]) -> bool:
        before = gradient(start)[of]
        for where in on:
            changed = start.clone()
            changed[where] += 0.05
            if not torch.allclose(gradient(changed)[of], before, rtol=1e-6, atol=1e-12):
                return True
        return False

    every, others = slice(None), slice(1, None)
    return {
        "stability": not depends([(others, every)], (0, every)),
        "manifold": several,
        "similarity": depends([(0, every)], (0, every)),
        "P-P": depends([(1, 0)], (0, 0)),
        "N-N": depends([(0, 2), (1, 1)], (0, 1)),
        "P-N": depends([(0, 1), (2, 0)], (0, 0)),
    }


def decomposition(vectors: Any, labels: Any) -> Grid:
    """Cross-entropy, table 2: each loss split into tightness and contrast, on (a sample of) unit embeddings."""
    emb, classes = unit(torch.as_tensor(np.asarray(vectors), dtype=torch.float64)), np.asarray(labels)
    _, codes = np.unique(classes, return_inverse=True)
    if len(codes) > MAX_ROWS:  # whole classes, so that positives stay
        order = np.random.default_rng(0).permutation(codes.max() + 1)[codes]
        keep = np.sort(np.argsort(order, kind="stable")[:MAX_ROWS])
        emb, codes = emb[torch.from_numpy(keep)], np.unique(codes[keep], return_inverse=True)[1]
    target = torch.from_numpy(codes)
    means = torch.stack([emb[target == k].mean(0) for k in range(int(target.max()) + 1)])
    nearest_mean = (means, -means.square().sum(1) / 2)  # the linear classifier that selects the nearest class mean
    losses: dict[str, tuple[str, tuple[Tensor, ...], dict[str, float]]] = {
        "Center": ("center", nearest_mean, {}),
        "Contrastive": ("contrastive_l2", (), {"margin": 1.0}),
        "SNCA": ("snca", (), {}),
        "Multi-Similarity": ("multi_similarity", (), {}),
        "PCE": ("pce", (), {}),
        "SPCE": ("spce", (), {}),
    }
    rows = []
    for printed, (name, params, settings) in losses.items():
        parts: Parts = decompose(name, emb, target, *params, **settings)
        values = (parts.tightness, parts.contrastive, parts.tightness + parts.contrastive)
        rows.append((printed, *(f"{float(value):.4f}" for value in values)))
    title = f"ce-table2: tightness and contrast of {len(emb):,} unit embeddings of {len(means):,} classes"
    return Grid(title, ("loss", "tightness", "contrast", "sum"), rows)


def tournament_table(folders: Sequence[StudyFolder] = ()) -> Grid:
    """Thesis, table 11: ranks of the losses, from the published values of tables 6 to 8 or from one's own studies."""
    results: list[Result] = [r for folder in folders for r in available_results(folder)] or thesis_results()
    printed = {row.loss: row for row in table_11()}
    rows = []
    for s in run_tournament(results, draws=100).standings:  # only the ranks are shown
        row = printed.get(s.method)
        mark = " *" if row and row.note else ""
        printed_row = f"{row.total:g}, {row.mean:g}, {row.std:g}{mark}" if row else "-"
        rows.append((s.method, f"{s.total:g}", f"{s.mean:.2f}", f"{s.std:.2f}", printed_row))
    source = "your studies" if folders else "the published tables 6 to 8"
    title = f"thesis-table11: ranks by R@1, from {source} (* a misprint)"
    return Grid(title, ("loss", "total", "mean", "std", "printed"), rows)


def grid_search_table(folder: StudyFolder, *, device: str, reporter: Reporter) -> Grid:
    """Thesis, table 15: search the settings of each loss of a study on its grids; compare with the published optima."""
    from nearkin.bench.tune import plan, standings, work, write_recipes

    rows = []
    mode: Any = "thesis_grid_coarse" if folder.study.rehearsal else "thesis_grid"
    for trial in folder.trials:
        loss = trial.method
        search = plan(trial.recipe, folder.path / loss, losses=(loss,), mode=mode, reporter=reporter)
        work(search, device=device, reporter=reporter)
        (standing,) = results = standings(search)
        write_recipes(search, results)
        found = {name.partition(".")[2]: value for name, value in (standing.settings or {}).items()}
        best = "-" if standing.best is None else f"{100 * standing.best:.1f}"
        for row in table_15():
            if row.loss == loss:
                value: Any = found.get(row.setting, math.nan)
                value = 1 / value if loss == "soft_triple" and row.setting == "gamma" else value
                span = f"{row.low:g} to {row.high:g} by {row.step:g}"
                rows.append((row.method, row.printed, span, f"{row.best:g}", f"{value:.4g}", best))
    mark = REHEARSAL if folder.study.rehearsal else ""
    head = ("loss", "setting", "grid", "published", "ours", "validation R@1")
    return Grid(f"{mark}thesis-table15: coordinate-wise grid search", head, rows, names=3)


WITHOUT_TRAINING: dict[str, Callable[[], Grid]] = {
    "toy_rankings": toy_rankings,
    "gradient_factors": gradient_factors,
    "tournament": tournament_table,
}


def embeddings_of(path: Path) -> tuple[Any, Any]:
    """Read vectors and labels of a run's saved test embeddings, or of an .npz file."""
    from nearkin.data.sources import load_features
    from nearkin.training.evaluation import saved_embeddings
    from nearkin.training.run import Run

    if path.is_dir():
        vectors, labels, _ = saved_embeddings(Run(path))
        return vectors, labels
    if path.suffix != ".npz":
        raise ConfigError(f"{path}: expected a run folder, or an .npz file with `features` [N, D] and `labels` [N].")
    table = load_features(path)
    return table.features, table.labels
