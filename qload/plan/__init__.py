"""Plans made before a load: possible numbers of ranks, and the kernels that will run."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
