"""A study of a paper's table or figure in the paper's own arrangement: published value, ours, difference, interval."""

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path

import numpy as np

from nearkin.bench.paper_studies import EUCLIDEAN, UNTUNED, PaperStudy, paper_studies
from nearkin.bench.papers import Published
from nearkin.bench.study import REHEARSAL, Trial
from nearkin.bench.trials import Outcome, StudyFolder
from nearkin.report.tables import Grid, csv_text, latex, markdown, write_texts
from nearkin.training.evaluation import reported_metrics


@dataclass(frozen=True)
class Cell:
    """One value of a table, in percent; NaN where there is none."""

    part: str  # the part of the table: dataset, and network and size if the study has several
    dataset: str
    backbone: str
    size: int
    row: str  # as printed
    metric: str
    published: float
    ours: float  # mean over seeds and folds
    std: float  # sample standard deviation over them
    low: float  # 95 % interval over test classes
    high: float
    runs: int  # finished trials behind it
    status: str  # "", "quoted" (not trained), "not yet" (no such loss yet), "failed" or "left"

    @property
    def difference(self) -> float:
        return self.ours - self.published

    def text(self) -> str:
        """Format as a cell: ours ± standard deviation (published, difference)."""
        if self.status == "not yet" and math.isnan(self.published):
            return "not yet"
        ours = "-" if math.isnan(self.ours) else f"{self.ours:.1f}"
        spread = "" if math.isnan(self.std) else f" ± {self.std:.1f}"
        gap = "" if math.isnan(self.difference) else f", {self.difference:+.1f}"
        published = "" if math.isnan(self.published) else f" ({self.published:g}{gap})"
        return f"{'not yet' if self.status == 'not yet' else ours}{spread}{published}"


def paper_cells(folder: StudyFolder) -> list[Cell]:
    """Return every value of the table of a study, part by part in the printed order."""
    paper = paper_studies()[folder.study.paper]
    outcomes, not_yet = folder.outcomes(), paper.not_yet
    parts: dict[str, list[Trial]] = {}
    for trial in folder.trials:
        parts.setdefault(trial.experiment.partition(" val ")[0], []).append(trial)

    def cell(part: str, first: Trial, row: str, chosen: Sequence[Trial] | None, metric: str) -> Cell:
        method = paper.rows.get(row, "")
        done = [outcomes[t.id] for t in chosen or () if t.id in outcomes and outcomes[t.id].test is not None]
        values = [v for o in done if (v := _value(o, method, metric)) is not None]
        plain = not metric.startswith("val:") and method != UNTUNED and not method.endswith(EUCLIDEAN)
        bounds = [o.intervals[metric] for o in done if plain and o.intervals and metric in o.intervals]
        low, high = (100 * np.mean(bounds, axis=0)).tolist() if bounds else (math.nan, math.nan)
        if chosen is None:
            status = "not yet" if any(row.startswith(name) for name in not_yet) else "quoted"
        else:
            status = "" if values else "failed" if any(t.id in outcomes for t in chosen) else "left"
        found = next((p.percent for p in paper.published if _is_published(p, folder, first, row, metric)), None)
        return Cell(
            *(part, first.dataset, first.backbone, first.size, row, metric),
            published=math.nan if found is None else found,
            ours=100 * float(np.mean(values)) if values else math.nan,
            std=100 * float(np.std(values, ddof=1)) if len(values) > 1 else math.nan,
            low=low,
            high=high,
            runs=len(values),
            status=status,
        )

    return [
        cell(part, trials[0], row, chosen, metric)
        for part, trials in parts.items()
        for row, chosen in _rows(paper, folder, trials, not_yet).items()
        for metric in _columns(paper, trials[0])
    ]


def _columns(paper: PaperStudy, trial: Trial) -> list[str]:
    reported = reported_metrics(trial.recipe.eval, trial.recipe.data.source)
    wanted = [name for name in paper.columns if name.startswith("val:") or name in reported]
    return wanted or [name for name in reported if name.startswith("R@") or name in trial.recipe.eval.metrics]


def _rows(
    paper: PaperStudy, folder: StudyFolder, trials: Sequence[Trial], not_yet: Sequence[str]
) -> dict[str, list[Trial] | None]:
    """Return each row of a part with its trials; None for a method that is not trained."""
    rows: dict[str, list[Trial] | None] = {}
    if paper.rows_are != "methods":
        for t in trials:
            share = t.recipe.data.val_fraction
            row = f"fold {t.part + 1}" if paper.rows_are == "folds" else f"{100 * (1 - share):g}/{100 * share:g}"
            rows[row] = [*(rows.get(row) or ()), t]
        return rows
    quoted = [p.method for p in paper.published if not p.own and p.dataset == trials[0].dataset]
    rows.update(dict.fromkeys(quoted))
    for row, method in paper.rows.items():
        name = method.removesuffix(EUCLIDEAN)
        if row in not_yet or name == UNTUNED or name in folder.study.method_names:
            rows[row] = None if row in not_yet else [t for t in trials if name in (UNTUNED, t.method)]
    return rows


def _value(outcome: Outcome, method: str, metric: str) -> float | None:
    if metric == "val:R@1":
        return outcome.val
    table = outcome.euclidean if method.endswith(EUCLIDEAN) else outcome.test
    if method == UNTUNED:
        baselines = outcome.baselines or {}
        table = baselines.get("raw backbone", baselines.get("untrained"))
    return (table or {}).get(metric)


def _is_published(p: Published, folder: StudyFolder, trial: Trial, row: str, metric: str) -> bool:
    """Whether a published value is that of a cell; an own run of the paper only in the same set-up."""
    names = {p.method, p.variant, f"{p.method} ({p.distance})"} if p.own else {p.method}
    split, _, name = metric.rpartition(":")
    wanted = (trial.dataset, name, "validation" if split else "test")
    if row not in names or (p.dataset, p.metric, p.split) != wanted:
        return False
    study = folder.study
    same_network = p.network in (None, trial.backbone) or (study.rehearsal and not study.backbones)
    same_size = p.dim is None or not trial.size or p.dim == trial.size
    return not p.own or (same_network and same_size)


def paper_grids(folder: StudyFolder, cells: Sequence[Cell]) -> list[Grid]:
    """Build one table per part, in the paper's arrangement."""
    grids = []
    for part in dict.fromkeys(cell.part for cell in cells):
        own = [cell for cell in cells if cell.part == part]
        columns = list(dict.fromkeys(cell.metric for cell in own))
        rows = []
        for row in dict.fromkeys(cell.row for cell in own):
            by_metric = {cell.metric: cell for cell in own if cell.row == row}
            last = by_metric[columns[-1] if columns[0].startswith("val:") else columns[0]]
            interval = "" if math.isnan(last.low) else f"{last.low:.1f}-{last.high:.1f}"
            rows.append((row, *(by_metric[name].text() for name in columns), interval))
        counted = last.metric
        title = f"{REHEARSAL if folder.study.rehearsal else ''}{folder.study.paper}, {part}"
        heads = [f"{name.removeprefix('val:')} validation" if name.startswith("val:") else name for name in columns]
        grids.append(Grid(title, ("", *heads, f"95 % of {counted}"), rows))
    return grids


def write_paper_tables(folder: StudyFolder) -> list[Path]:
    """Write table.md, table.tex and table.csv of a paper's study into its folder."""
    paper = paper_studies()[folder.study.paper]
    mark = REHEARSAL if folder.study.rehearsal else ""
    if paper.computed == "decomposition":
        from nearkin.report.paper_computed import decomposition, embeddings_of

        run = next((o.run for o in folder.outcomes().values() if o.run), None)
        if run is None:
            return []
        grid = decomposition(*embeddings_of(Path(run)))
        return write_grid(replace(grid, title=mark + grid.title), folder.path)
    cells = paper_cells(folder)
    grids = paper_grids(folder, cells)
    lines = [f"# {paper.title}", "", *([f"**{mark.rstrip(': ')}.**", ""] if mark else [])]
    lines += [f"- {note}" for note in paper_notes(paper, folder)]
    text = "\n".join([*lines, "", *(f"## {grid.title}\n\n{markdown(grid)}" for grid in grids)])
    head = [*(field.name for field in fields(Cell)), "difference"]
    rows = [(*astuple(cell), cell.difference) for cell in cells]
    texts = {"table.md": text, "table.tex": "\n".join(map(latex, grids)), "table.csv": csv_text(head, rows)}
    return write_texts(texts, folder.path)


def write_grid(grid: Grid, folder: Path) -> list[Path]:
    """Write a computed table as table.md, table.tex and table.csv."""
    texts = {"table.md": f"# {grid.title}\n\n{markdown(grid)}", "table.tex": latex(grid)}
    return write_texts(texts | {"table.csv": csv_text(grid.head, grid.rows)}, folder)


def paper_notes(paper: PaperStudy, folder: StudyFolder) -> list[str]:
    """Return what a reader of the table must know."""
    study = folder.study
    notes = ["Percent: ours ± sample deviation over runs (published value, difference); 95 % interval over classes."]
    notes += [f"Protocol: {label}." for label in folder.labels]
    setups = dict.fromkeys(p.setup for p in paper.published if p.own)
    notes += [f"Protocol of the published values: {setup}." for setup in setups]
    if study.change:
        notes.append(f"Changed settings: {dict(study.change)}.")
    if paper.not_yet:
        notes.append(f"{len(paper.not_yet)} methods are not available yet: {', '.join(paper.not_yet)}.")
    failed = sum(outcome.status == "failed" for outcome in folder.outcomes().values())
    left = len(folder.unfinished())
    if failed or left:
        notes.append(f"{failed} trials failed, {left} are not finished.")
    return [*notes, *paper.notes]
