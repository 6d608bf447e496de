"""Checkpoints written again: in another format, or in the shares of ranks, proven to mean the same."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
