"""Before a checkpoint is loaded: among how many ranks it can be shared, and which kernels will run."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
