"""Models of Hugging Face's transformers with quantized layers loaded and computed by qload.

    from qload.engines import transformers as engine

    model = engine.load("Llama-3-8B-GPTQ", device_map="cuda")
    model.generate(ids, max_new_tokens=32)

After `install()`, transformers' own `from_pretrained` does the same for every quantized checkpoint.
"""

from qload.engines.transformers.config import QloadConfig
from qload.engines.transformers.loading import TRIED, check_version, install, load, uninstall
from qload.engines.transformers.placeholder_layers import (
    LinearSlot,
    TypedExperts,
    lora_config,
    lora_slot,
    saved_lora_config,
)

check_version()

__all__ = [
    "TRIED",
    "LinearSlot",
    "QloadConfig",
    "TypedExperts",
    "check_version",
    "install",
    "load",
    "lora_config",
    "lora_slot",
    "saved_lora_config",
    "uninstall",
]
