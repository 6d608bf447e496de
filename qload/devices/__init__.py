"""Execution of layouts on tensors: one module per device, and `dispatch`, which chooses the device's code.

`reference` does everything in plain torch; where the native modules were built, `cpu` and `cuda` do the same
bits at the speed of memory.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
