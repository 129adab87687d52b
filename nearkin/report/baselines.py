"""Results in words: how a trained model, and the methods of a study, compare with the baselines without training."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from nearkin.training.run import Run

FEW_TEST_CLASSES = 10  # a bootstrap over fewer is much too narrow
# How to get a model that equals a baseline, where one is worth having.
_WITHOUT_TRAINING = {
    "whitened start": "--train.epochs 0",
    **dict.fromkeys(("raw backbone", "tuned backbone"), "--train.epochs 0 --model.dim 0 --model.head-init random"),
}


def headline(run: Run | dict[str, Any]) -> str:
    """Summarize a result in a few sentences, and claim no more than the paired intervals support.

    Args:
        run: A finished run, or its result.

    Returns:
        The R@1, the best baseline, and whether training helped.
    """
    result = run if isinstance(run, dict) else run.result
    assert result is not None
    epoch, recall = result["protocol"]["epoch"], result["val_R@1"]
    if result["test"] is None and recall is None:
        reason = "there are no validation classes, and the test classes are sealed"
        return f"Trained to epoch {epoch}, not evaluated: {reason}."
    if result["test"] is None:
        share = f"{100 * recall:.1f}"
        return (
            f"Validation R@1 {share}: the nearest neighbour of {share} % of the validation images has the same class "
            f"(epoch {epoch}, selected on these classes). The test classes are still sealed."
        )
    recalls = {name: 100 * metrics["R@1"]["mean"] for name, metrics in result["test"].items()}
    trained = recalls.pop("trained")
    best = max(reversed(recalls), key=lambda name: recalls[name])
    return (
        f"R@1 {trained:.1f}: the nearest neighbour of {trained:.1f} % of the test images has the same class "
        f"({best}: {recalls[best]:.1f}). {_conclusion(result)}"
    )


def comparison_lines(result: Mapping[str, Any]) -> list[str]:
    """Say how the trained model compares with every baseline, in R@1 and MAP@R: one line for each."""
    if result["test"] is None:
        return []
    names = list(result["differences"])
    lines = []
    for name, metrics in result["differences"].items():
        words = ", ".join(describe_difference(metric, d["mean"], *d["interval"]) for metric, d in metrics.items())
        is_start = not result["protocol"]["epoch"] and name == names[-1]
        lines.append(f"vs. {name}: {'these are its weights' if is_start else words}")
    classes = result["protocol"]["classes"]["test"]
    if classes < FEW_TEST_CLASSES:
        lines.append(f"only {classes} test classes: these intervals say little about other classes")
    return lines


def describe_difference(metric: str, mean: float, low: float, high: float) -> str:
    """Describe a difference, given as fractions, in words.

    Example:
        >>> describe_difference("R@1", 0.021, 0.012, 0.031), describe_difference("MAP@R", -0.004, -0.012, 0.003)
        ('R@1 better by 1.2 to 3.1 points', 'MAP@R not significantly different (-1.2 to +0.3 points)')
    """
    if math.isnan(low):
        return f"{metric} {100 * mean:+.1f} points (too few classes for an interval)"
    if low > 0:
        return f"{metric} better by {100 * low:.1f} to {100 * high:.1f} points"
    if high < 0:
        return f"{metric} worse by {-100 * high:.1f} to {-100 * low:.1f} points"
    if low == high:
        return f"{metric} the same for every class"
    return f"{metric} not significantly different ({100 * low:+.1f} to {100 * high:+.1f} points)"


def _sign(found: Mapping[str, Any]) -> int:
    """1 if the trained model is significantly better, -1 if worse, 0 if neither."""
    low, high = found["interval"]
    return int(low > 0) - int(high < 0)


def _conclusion(result: Mapping[str, Any]) -> str:
    """Say whether training helped and, if not, which baseline to use instead."""
    signs = {name: (_sign(m["R@1"]), _sign(m["MAP@R"])) for name, m in result["differences"].items()}
    start = list(signs)[-1]
    recalls = {name: result["test"][name]["R@1"]["mean"] for name in signs}
    text = ""
    if not result["protocol"]["epoch"]:
        text = f"No epoch improved on the initial weights ({start}) on the validation classes, so these are the result."
        if not result["protocol"].get("epochs", True):
            text = f"These are the initial weights ({start}), without training."
            if result["protocol"].get("tuned_weights"):
                text = f"The backbone has the weights of other runs; only the head was fitted ({start})."
        del signs[start]
    signs = dict(reversed(signs.items()))  # of equal baselines, the last one is recommended
    better = [name for name, (recall, precision) in signs.items() if (recall, precision) < (0, 0)]
    equal = [name for name, pair in signs.items() if pair == (0, 0)]
    if better:
        name = max(better, key=lambda name: recalls[name])
        return f"{text or 'Training did not help.'} Better on the test classes: {name}{_advice(name, result)}."
    if text:
        return text
    if equal:
        name = max(equal, key=lambda name: recalls[name])
        recall, precision = (100 * result["test"][name][metric]["mean"] for metric in ("R@1", "MAP@R"))
        values = f"R@1 {recall:.1f}, MAP@R {precision:.1f}"
        return f"Training did not help measurably. As good without it: {name}, {values}{_advice(name, result)}."
    doubtful = [name for name, pair in signs.items() if pair != (1, 1)]
    if not doubtful:
        return "Training helped: R@1 and MAP@R are significantly better than those of every baseline."
    metric, other = ("R@1", "MAP@R") if signs[doubtful[0]][0] > 0 else ("MAP@R", "R@1")
    return f"Training helped, but compared with {doubtful[0]} only in {metric}, not in {other}."


def no_run_helped(results: Sequence[Mapping[str, Any]]) -> str:
    """Say so if none of several runs is measurably better than a baseline without training; else an empty string."""
    evaluated = [result for result in results if result["test"] is not None]
    if len(evaluated) < 2 or any(_conclusion(result).startswith("Training helped") for result in evaluated):
        return ""
    return "No run is measurably better than the best baseline without training."


def _advice(name: str, result: Mapping[str, Any]) -> str:
    """Return how to use a baseline instead of the trained model, or what to change if it is not worth using."""
    if name == "raw backbone" and "raw pixels" not in result["test"]:
        return ", your features as they are"
    if name in _WITHOUT_TRAINING:
        return f" (to use it, repeat the command with {_WITHOUT_TRAINING[name]})"
    return ". The loss, its learning rate or the number of epochs does not suit these data"


def unchanged_line(epochs: Sequence[int | None]) -> str:
    """Say in how many trials, by their selected epochs, the start was kept; empty if in none."""
    kept = sum(epoch == 0 for epoch in epochs)
    where = "all trials" if kept == len(epochs) else f"{kept} of {len(epochs)} trials"
    return f"In {where} no epoch was better than the initial model, which is what is compared there." if kept else ""


def compare_study(
    metric: str, scores: Mapping[str, Mapping[str, float]], baselines: Mapping[str, Mapping[str, float]]
) -> tuple[str, bool]:
    """Say which methods, best first, beat the best baseline, and whether any does; scores are percent by experiment."""
    best = max(baselines, key=lambda name: fmean(baselines[name].values()), default="")
    leads = {
        method: fmean(common)
        for method, values in scores.items()
        if (common := [values[e] - baselines[best][e] for e in values if best and e in baselines[best]])
    }
    if not leads:
        return "", True
    above = sum(lead > 0 for lead in leads.values())
    leader = max(leads, key=lambda method: leads[method])
    baseline = f"the best baseline, {best} ({metric} {fmean(baselines[best].values()):.1f})"
    if not above:
        closest = f"{leader} is closest, {leads[leader]:+.1f} points"
        return f"No method beats {baseline}: use it without training ({closest}).", False
    count = len(leads)
    share = "Every method is" if above == count else f"{above} of {count} methods {'is' if above == 1 else 'are'}"
    first, lead = next(iter(leads.items()))
    exception = f" {first} is not." if lead <= 0 else ""
    return f"{share} above {baseline}, {leader} by {leads[leader]:.1f} points.{exception}", True


def study_lines(method: str, differences: Mapping[str, Mapping[str, Sequence[float]]]) -> list[str]:
    """Say how a method of a study compares with every baseline: one line for each."""
    return [
        f"{method} vs. {name}: {', '.join(describe_difference(metric, *found) for metric, found in metrics.items())}"
        for name, metrics in differences.items()
    ]
