"""Models of Hugging Face's transformers with quantized layers loaded and computed by qload.

    from qload.engines import transformers as engine

    model = engine.load("Llama-3-8B-GPTQ", device_map="cuda")
    model.generate(ids, max_new_tokens=32)

After `install()`, transformers' own `from_pretrained` does the same for every quantized checkpoint.
"""

import lazy_loader

from qload.engines.transformers.loading import check_version

check_version()
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
