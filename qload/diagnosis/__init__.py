"""Diagnosis of a read-back weight: the known fault behind its errors, and their location."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
