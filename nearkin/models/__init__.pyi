from .backbones import BACKBONES as BACKBONES
from .bn_inception import BNInception as BNInception
from .embedder import Embedder as Embedder
from .frozen import FrozenFeatures as FrozenFeatures
from .heads import POOLINGS as POOLINGS
from .saved import load as load
