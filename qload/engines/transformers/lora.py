"""LoRA by peft: adapters on layers whose weights are qload's.

    from peft import get_peft_model
    from qload.engines.transformers import lora_config

    model = get_peft_model(model, lora_config(r=8, target_modules=["q_proj", "v_proj"]))

peft is imported when a config is made.
"""

from typing import Any

from qload.engines.transformers.slots import LinearSlot
from qload.errors import ArgumentError


def lora_config(**options: Any) -> Any:
    """A `peft.LoraConfig` that knows the layers of a model on qload.

    Gradients are those of adapters, of inputs and of biases: a quantized weight is no parameter, so that
    nothing of it can be merged either, and peft's `merge` is refused.

    Parameters
    ----------
    options
        Those of `peft.LoraConfig`.

    Raises
    ------
    ArgumentError
        Where peft is not installed, or has no `_register_custom_module`.
    """
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise ArgumentError("peft", "the package, which `pip install peft` brings", str(error)) from None
    config = LoraConfig(**options)
    register: Any = getattr(config, "_register_custom_module", None)
    if register is None:
        raise ArgumentError("peft", "LoraConfig._register_custom_module", "a version without it")
    register({LinearSlot: lora_slot()})
    return config


def lora_slot() -> type[Any]:
    """The class of adapters on a `LinearSlot`: peft's own for linear layers, which merges nothing."""
    from peft.tuners.lora import Linear

    class LoraSlot(Linear):  # type: ignore[misc]
        """An adapter beside a layer whose weight is quantized."""

        def merge(self, safe_merge: bool = False, adapter_names: Any = None) -> None:
            """ArgumentError: a quantized weight takes no sum."""
            raise ArgumentError("merge", "an adapter beside the layer", "a weight that is quantized")

        def unmerge(self) -> None:
            """Nothing was merged."""

    return LoraSlot
