"""The losses of pytorch-metric-learning, with its arguments, defaults and values, on our core."""

from nearkin.compat.pml._batch_losses import (
    AngularLoss,
    FastAPLoss,
    InstanceLoss,
    NCALoss,
    NPairsLoss,
    PNPLoss,
    RankedListLoss,
    SmoothAPLoss,
    ThresholdConsistentMarginLoss,
    VICRegLoss,
)
from nearkin.compat.pml._class_losses import (
    ArcFaceLoss,
    CosFaceLoss,
    LargeMarginSoftmaxLoss,
    ManifoldLoss,
    NormalizedSoftmaxLoss,
    P2SGradLoss,
    ProxyAnchorLoss,
    ProxyNCALoss,
    SoftTripleLoss,
    SphereFaceLoss,
    SubCenterArcFaceLoss,
)
from nearkin.compat.pml._loss_base import BaseMetricLossFunction, GenericPairLoss
from nearkin.compat.pml._pair_losses import (
    CircleLoss,
    ContrastiveLoss,
    GeneralizedLiftedStructureLoss,
    IntraPairVarianceLoss,
    LiftedStructureLoss,
    MultiSimilarityLoss,
    NTXentLoss,
    SignalToNoiseRatioContrastiveLoss,
    SupConLoss,
    TupletMarginLoss,
)
from nearkin.compat.pml._triplet_losses import DynamicSoftMarginLoss, HistogramLoss, MarginLoss, TripletMarginLoss
from nearkin.compat.pml._wrappers import BaseLossWrapper, CrossBatchMemory, MultipleLosses, SelfSupervisedLoss
from nearkin.compat.pml.coverage import absent_names

__all__ = [
    "AngularLoss", "ArcFaceLoss", "BaseLossWrapper", "BaseMetricLossFunction", "CircleLoss", "ContrastiveLoss",
    "CosFaceLoss", "CrossBatchMemory", "DynamicSoftMarginLoss", "FastAPLoss", "GeneralizedLiftedStructureLoss",
    "GenericPairLoss", "HistogramLoss", "InstanceLoss", "IntraPairVarianceLoss", "LargeMarginSoftmaxLoss",
    "LiftedStructureLoss", "ManifoldLoss", "MarginLoss", "MultiSimilarityLoss", "MultipleLosses", "NCALoss",
    "NPairsLoss", "NTXentLoss", "NormalizedSoftmaxLoss", "P2SGradLoss", "PNPLoss", "ProxyAnchorLoss",
    "ProxyNCALoss", "RankedListLoss", "SelfSupervisedLoss", "SignalToNoiseRatioContrastiveLoss", "SmoothAPLoss",
    "SoftTripleLoss", "SphereFaceLoss", "SubCenterArcFaceLoss", "SupConLoss", "ThresholdConsistentMarginLoss",
    "TripletMarginLoss", "TupletMarginLoss", "VICRegLoss",
]  # fmt: skip
__getattr__ = absent_names("losses")
