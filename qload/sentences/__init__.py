"""Layout sentences: positions of elements as data. `qload.devices` moves tensors by them."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
