"""nearkin: deep metric learning, from loss functions to image search.

    import nearkin as nk

    objective = nk.Objective("proxy_anchor", num_classes=100, dim=512)
    loss = objective(embeddings, labels)
    scores = nk.score(embeddings, labels, ks=(1, 2, 4, 8))

Names are imported on first use: `import nearkin` and `nearkin --help` are fast, and the losses and metrics never import
torchvision or timm.
"""

from nearkin._common.lazy import attach_stub
from nearkin._common.version import __version__ as __version__

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
