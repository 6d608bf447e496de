"""Content of a checkpoint before any weight is read: layers, bytes, and unread tensors."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
