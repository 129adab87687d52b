"""pytorch-metric-learning's names on our core: change the import line of a script, and it gives the same numbers.

    from nearkin.compat.pml import losses, miners  # was: from pytorch_metric_learning import losses, miners

All pairs and triplets of a batch are masks rather than lists, so memory grows with the square of the batch.
`coverage.COVERAGE` has what is the same, and `coverage.DIFFERENCES` what is not, and why.
"""

from nearkin.compat.pml import distances, losses, miners, reducers, regularizers, samplers, utils
from nearkin.compat.pml.coverage import absent_names

__all__ = ["distances", "losses", "miners", "reducers", "regularizers", "samplers", "utils"]
__getattr__ = absent_names(__name__)
for _module in (distances, losses, miners, reducers, regularizers, samplers, utils):
    setattr(_module, "__getattr__", absent_names(_module.__name__))  # noqa: B010  # mypy would take any name for defined
