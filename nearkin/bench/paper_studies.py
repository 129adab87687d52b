"""The tables and figures of the four papers as studies: `nearkin bench run thesis-table7`.

paper_studies.toml defines them. A row of a table is a method of the study; a method whose loss is not registered (yet)
is not trained and shown as "not yet".
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, Literal

from nearkin.bench import papers
from nearkin.bench.study import Study, merge
from nearkin.config._parsing import from_dict
from nearkin.losses import LOSSES, MINERS

PAPERS = {"ice": "ice", "ce": "cross_entropy", "thesis": "thesis", "mpa": "mpa"}  # prefix of a name -> paper
UNTUNED, EUCLIDEAN = "untuned", " (euclidean)"  # rows that are other results of a trial
# Methods that papers quote and that are not one of our losses, as printed -> the loss or miner that would be one.
TO_COME = {
    "HTL": "hierarchical_triplet",
    "Clusteing": "facility_location",
    "EPSHN": "easy_positive",
    **dict.fromkeys(("ABE", "HDC", "DREML", "D&C"), ""),  # ensembles and divided embeddings: more than a loss
}


@dataclass(frozen=True)
class PaperStudy:
    """A table or figure of a paper."""

    name: str  # what a user types
    title: str  # paper, number and contents
    varies: str = ""  # what differs between its rows
    table: str = ""  # numbers of the tables with its published values, separated by spaces
    rows: Mapping[str, str] = field(default_factory=dict)  # printed name -> method of the study, in the printed order
    rows_are: Literal["methods", "folds", "val_fractions"] = "methods"  # the last two: of a single method
    columns: tuple[str, ...] = ()  # "val:R@1" for the validation classes; by default R@k and what the recipe names
    figures: tuple[str, ...] = ()  # bars, sizes, networks, recall (over k), variants, ratios, training, tsne
    x_label: str = ""  # what numbers in the names of the rows mean
    # how the table is computed, if it is more than the results of trials
    computed: Literal["", "decomposition", "tournament", "grid_search", "gradient_factors", "toy_rankings"] = ""
    notes: tuple[str, ...] = ()  # what a reader of the table must know
    study: Mapping[str, Any] = field(default_factory=dict)  # keys of a study file; datasets are names

    @property
    def paper(self) -> str:
        return PAPERS[self.name.partition("-")[0]]

    @property
    def not_yet(self) -> list[str]:
        """The rows that cannot be trained yet: their loss is not registered."""
        quoted = {papers._bare_name(p.method) for p in self.published if not p.own}
        missing = [name for name in quoted if name in TO_COME and TO_COME[name] not in (*LOSSES, *MINERS)]
        return [*(name for name, method in self.rows.items() if not self._is_known(method)), *sorted(missing)]

    def _is_known(self, method: str) -> bool:
        name = method.removesuffix(EUCLIDEAN)
        settings = self.study.get("methods", {}).get(name, {})
        return name == UNTUNED or settings.get("loss", {}).get("name", name) in LOSSES

    @cached_property
    def published(self) -> list[papers.Published]:
        """The published values of its table; for ICE's table 3, which is missing from our text, those of its prose."""
        numbers = self.table.split()
        text = "text of 4.2" if self.name == "ice-table3" else ""
        own = [p for p in papers.all_values() if p.paper == self.paper]
        return [p for p in own if p.table.rstrip("abcd") in numbers or p.table == text]

    def build(self) -> Study | None:
        """Return the study; None if nothing is trained."""
        if not self.study:
            return None
        trained = {m for m in self.rows.values() if self._is_known(m) and m != UNTUNED and not m.endswith(EUCLIDEAN)}
        methods = {name: change for name, change in self.study.get("methods", {}).items() if name in trained}
        values = {
            **self.study,
            "name": self.name,
            "paper": self.name,
            "losses": [m for m in self.rows.values() if m in trained and (m not in methods or m in LOSSES)],
            "methods": methods,
            "datasets": [{"name": name, "source": name} for name in self.study["datasets"]],
        }
        return from_dict(Study, values, "")


def papers_of_losses() -> dict[str, list[str]]:
    """Return the papers whose tables have each loss, by its name; also rows that a paper quotes."""
    found: dict[str, list[str]] = {}
    for study in paper_studies().values():
        methods = study.study.get("methods", {})
        names = [methods.get(row, {}).get("loss", {}).get("name", row) for row in study.rows.values()]
        for name in [*names, *(value.loss or "" for value in study.published)]:
            if study.paper not in found.setdefault(name, []):
                found[name].append(study.paper)
    return found


@cache
def paper_studies() -> dict[str, PaperStudy]:
    entries: dict[str, dict[str, Any]] = {}
    for name, entry in papers.study_entries().items():
        base = entries.get(entry.pop("like", ""), {})
        study = merge(base.get("study", {}), entry.get("study", {}))
        entries[name] = {**base, **entry, "study": study, "name": name}
    return {name: from_dict(PaperStudy, entry, f"{name}.") for name, entry in entries.items()}
