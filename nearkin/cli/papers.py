"""`nearkin papers`: the tables and figures of the four papers, and how to rerun each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nearkin.bench.papers import papers, study_entries
from nearkin.cli._arguments import parse, show
from nearkin.errors import ConfigError, did_you_mean, require_extra
from nearkin.report.tables import Grid

if TYPE_CHECKING:
    from nearkin.bench.paper_studies import PaperStudy


@dataclass(frozen=True)
class PapersArgs:
    """List the tables and figures of the four papers, or show one: what it varies, its published values, what it needs,
    how long it takes, and the command.

    nearkin papers

    nearkin papers thesis-table7

    nearkin papers ce-table2 runs/<key>                              (tightness and contrast on a run's embeddings)

    nearkin papers thesis-table11 studies/thesis-table6 studies/thesis-table7    (the tournament of your own studies)

    nearkin papers mpa-table7 studies/mpa-table7                     (the table of a study so far)
    """

    tflops: float = 60.0  # Throughput in TFLOP/s of the GPU of the second time estimate.


def run(argv: list[str]) -> None:
    words = []
    while argv and not argv[0].startswith("-"):
        words.append(argv[0])
        argv = argv[1:]
    args = parse(PapersArgs, argv, "nearkin papers [NAME]")
    require_extra("bench", "scipy")
    if words and words[0] not in study_entries():  # before torch is imported
        hint = did_you_mean(words[0], study_entries()) or " See: nearkin papers."
        raise ConfigError(f"No table or figure named '{words[0]}'.{hint}")
    from nearkin.bench.paper_studies import paper_studies

    if not words:
        _list()
        return
    paper, paths = paper_studies()[words[0]], list(map(Path, words[1:]))
    if paths or not paper.study:
        _show_results(paper, paths)
    if not paths:
        _describe(paper, args)


def _list() -> None:
    from nearkin.bench.paper_studies import paper_studies

    studies = paper_studies()
    for name, paper in papers().items():
        print(f"{paper.title} ({paper.authors}, {paper.year})")
        for study in studies.values():
            if study.paper == name:
                print(f"  {study.name:15} {study.title.partition(': ')[2]}")
        print()
    waiting = sorted({row for study in studies.values() for row in study.not_yet})
    print(f"{len(studies)} studies; {len(waiting)} methods not yet available: {', '.join(waiting)}")
    print("details: nearkin papers NAME      try: nearkin bench run NAME --rehearse")


def _describe(paper: PaperStudy, args: PapersArgs) -> None:
    from nearkin._common.progress import format_duration
    from nearkin.bench import estimates, narrow, tune_space

    print(paper.title)
    print(f"varies:    {paper.varies}")
    study = paper.build()
    if study is None:
        print(f"computed:  nothing is trained; nearkin bench run {paper.name} writes it to studies/{paper.name}")
        return
    trials = study.trials()
    metrics = list(dict.fromkeys(p.metric for p in paper.published)) or list(paper.columns) or ["R@k"]
    print(f"metrics:   {', '.join(metrics)}")
    print(f"protocol:  {'; '.join(dict.fromkeys(t.label for t in trials))} (other: --protocol fixed)")
    for setup in dict.fromkeys(p.setup for p in paper.published if p.own):
        print(f"published: {setup}")
    if paper.not_yet:
        print(f"not yet:   {len(paper.not_yet)} methods: {', '.join(paper.not_yet)}")
    for note in paper.notes:
        print(f"note:      {note}")
    if paper.published:
        show(_published_grid(paper))
    count, what = len(trials), "models"
    if paper.computed == "grid_search":
        count, what = sum(len(tune_space.grid_points(t.method)) for t in trials), "models for a quarter of the epochs"
    share = count / len(trials) * (0.25 if paper.computed == "grid_search" else 1.0)
    both = [estimates.Estimate(trials, {}, tflops=tflops) for tflops in (None, args.tflops)]
    here, gpu = (format_duration(share * sum(map(estimate.seconds, trials))) for estimate in both)
    print(f"cost:      {count} {what}: {here} on this machine, {gpu} on a GPU that reaches {args.tflops:g} TFLOP/s")
    needed = narrow.requirements(study, trials)
    for line in needed:
        print(f"needed:    {line}")
    flags = " --data FOLDER" + " --weights bn_inception=FILE" * any("bn_inception:" in line for line in needed)
    print(f"run:       nearkin bench run {paper.name}{flags}")
    print(f"rehearse:  nearkin bench run {paper.name} --rehearse   (tiny data and network, about a minute)")


def _published_grid(paper: PaperStudy) -> Grid:

    values = paper.published
    metrics = list(dict.fromkeys((p.split, p.metric) for p in values))
    rows: dict[tuple[str, ...], dict[tuple[str, str], str]] = {}
    for p in values:
        setting = (p.table, p.dataset, p.network or "", "" if p.dim is None else str(p.dim))
        label = " ".join(filter(None, (p.method, p.variant, f"({p.distance})" if p.paper == "cross_entropy" else "")))
        rows.setdefault((label, *setting), {})[p.split, p.metric] = f"{p.printed:g}{'*' if p.note else ''}"
    heads = [f"{'val ' if split == 'validation' else ''}{metric}" for split, metric in metrics]
    cells = [(*key, *(row.get(metric, "-") for metric in metrics)) for key, row in rows.items()]
    return Grid("published, percent (* has a note)", ("", "table", "data", "network", "size", *heads), cells, names=5)


def _show_results(paper: PaperStudy, paths: list[Path]) -> None:
    from nearkin.bench.trials import StudyFolder
    from nearkin.report import paper_computed, paper_tables

    if paper.computed == "decomposition" and not (paths[0] / "study.toml").exists():
        grids = [paper_computed.decomposition(*paper_computed.embeddings_of(path)) for path in paths]
    elif paper.computed == "tournament":
        grids = [paper_computed.tournament_table([StudyFolder.open(path) for path in paths])]
    elif paper.computed in paper_computed.WITHOUT_TRAINING:
        if paths:
            raise ConfigError(f"{paths[0]}: {paper.name} is computed from nothing. Run: nearkin papers {paper.name}")
        grids = [paper_computed.WITHOUT_TRAINING[paper.computed]()]
    else:
        grids = []
        for folder in map(StudyFolder.open, paths):
            if folder.study.paper != paper.name:
                raise ConfigError(f"{folder.path}: not a study of {paper.name} (but of '{folder.study.name}').")
            grids += paper_tables.paper_grids(folder, paper_tables.paper_cells(folder))
    show(*grids)


def compute_paper(name: str, args: Any) -> None:
    """Compute a table that nothing is trained for, and write it to studies/NAME."""
    from nearkin.bench.paper_studies import paper_studies
    from nearkin.report.paper_computed import WITHOUT_TRAINING

    flags = ("data", "weights", "protocol", "datasets", "losses", "sizes", "seeds")
    if given := [flag for flag in flags if getattr(args, flag)]:
        raise ConfigError(f"--{given[0]}: nothing is trained for {name}. Remove the flag.")
    write_computed(WITHOUT_TRAINING[paper_studies()[name].computed](), args.out or Path("studies") / name)


def write_computed(grid: Grid, folder: Path) -> None:
    """Write a computed table to a folder and show it."""
    from nearkin.report.paper_tables import write_grid

    written = write_grid(grid, folder)
    show(grid, f"files: {folder}/  ({', '.join(path.name for path in written)})")
