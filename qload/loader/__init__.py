"""Loaders of typed weights from named tensors: the interface, and the loader of all formats."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
