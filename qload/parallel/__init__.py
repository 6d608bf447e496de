"""Process groups, their collectives, and worlds of ranks.

A process group is any object with `rank()` and `size()`, such as a group of torch.distributed. Loads never
communicate. Layers sum and gather with `collectives_of` a group; a row-parallel layer with dynamically
quantized inputs also reduces their maximum with `maximum_over`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
