"""Weights in the orders that kernels read, a module each, and the ways between them: `repack`, `restore`.

`LAYOUTS` has the name of every layout that `repack` takes.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
