"""pytorch-metric-learning's utilities that a script uses: accuracy, inference, several processes."""

from nearkin.compat.pml.utils import accuracy_calculator, distributed, inference

__all__ = ["accuracy_calculator", "distributed", "inference"]
