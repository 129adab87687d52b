"""Analysis of embeddings: diagnostics, information-theoretic measures, hard classes, label errors."""

from nearkin.analysis.diagnostics import Alarm, Diagnosis, alarms, diagnose, effective_rank
from nearkin.analysis.hardness import class_table, confused_pairs, find_duplicates, hardest, hubness, hubs
from nearkin.analysis.information import (
    Bound,
    conditional_entropy,
    decompose,
    feature_entropy,
    label_entropy,
    lemma_1,
    mutual_information,
    mutual_information_bound,
    pce_lambda,
)
from nearkin.analysis.label_errors import LabelErrors, find_label_errors

# fmt: off
__all__ = [
    "Alarm", "Bound", "Diagnosis", "LabelErrors", "alarms", "class_table", "conditional_entropy", "confused_pairs",
    "decompose", "diagnose", "effective_rank", "feature_entropy", "find_duplicates", "find_label_errors", "hardest",
    "hubness", "hubs", "label_entropy", "lemma_1", "mutual_information", "mutual_information_bound", "pce_lambda",
]
