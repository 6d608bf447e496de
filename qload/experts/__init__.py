"""Experts: a layer's experts by names of their own, and as stacked typed weights; their routing."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
