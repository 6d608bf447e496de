"""What a model's config tells of its tensors: names, (N, K), which there are, and which share an input."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
