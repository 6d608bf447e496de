"""Quantization configs as hostile input: sections, their validation, patterns of module names, claims."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
