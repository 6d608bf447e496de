"""Comparison of two checkpoints by their weights, across formats, shards and names."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
