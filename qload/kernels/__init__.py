"""Kernels for linear layers and experts: `Linear`, native products, mixed-precision kernels.

`KERNELS` has every kernel, in the order in which `choose_mp_linear_kernel` asks them.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
