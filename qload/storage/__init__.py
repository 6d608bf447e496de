"""Storages of named tensors: in memory, and in safetensors files with validated headers."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
