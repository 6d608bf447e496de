"""What a checkpoint holds, layer by layer and byte by byte, before any weight of it is read."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
