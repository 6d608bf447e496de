"""Tensors of a model, by its config: names, shapes (N, K), presence, and matrices with a common input."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
