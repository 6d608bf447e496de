"""Orders in memory as data: one line of einops notation and its inverse.

`STORED_MINUS_ONE` is the convention of GPTQ zero points, unless the checkpoint is gptq_v2.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
