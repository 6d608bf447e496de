"""qload: the place where a quantized LLM weight is true.

The public names, imported when they are first used, so that a command line can answer before torch
is loaded. `__init__.pyi` lists them.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
