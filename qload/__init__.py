"""qload: the place where a quantized LLM weight is true.

Public names are imported at first use; the command line answers without torch. `__init__.pyi` lists them.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
