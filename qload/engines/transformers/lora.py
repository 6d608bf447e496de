"""LoRA by peft: adapters on layers whose weights are qload's.

    from peft import get_peft_model
    from qload.engines.transformers import lora_config

    model = get_peft_model(model, lora_config(r=8, target_modules=["q_proj", "v_proj"]))

peft is imported when a config is made. What reads the weight beside which an adapter stands (DoRA, and first
values of adapters that are taken from it) is refused: there are no numbers where peft looks for them.
"""

from os import PathLike
from typing import Any

from qload.engines.transformers.slots import LinearSlot
from qload.errors import ArgumentError

WITHOUT_WEIGHTS = (True, False, "gaussian", "orthogonal", "eva")  # peft's ways to fill an adapter
EVERY_LINEAR = "all-linear"  # of peft's own classes


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
        Where peft is not installed, or has no `_register_custom_module`; for what needs the numbers of a
        weight; and for "all-linear", by which peft finds layers that are not quantized alone.
    """
    return _known(_peft().LoraConfig(**options))


def saved_lora_config(path: str | PathLike[str], **options: Any) -> Any:
    """The config of an adapter that peft's `save_pretrained` wrote, for `PeftModel.from_pretrained`.

    Parameters
    ----------
    path
        The adapter's folder, or its name on the hub.
    options
        Those of `peft.LoraConfig.from_pretrained`.

    Raises
    ------
    ArgumentError
        As of `lora_config`.
    """
    return _known(_peft().LoraConfig.from_pretrained(path, **options))


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ArgumentError("peft", "the package, which `pip install peft` brings", str(error)) from None
    return peft


def _known(config: Any) -> Any:
    """The `config`, which is told of slots."""
    if config.use_dora or config.init_lora_weights not in WITHOUT_WEIGHTS:
        name = "use_dora" if config.use_dora else "init_lora_weights"
        said = ", ".join(map(repr, WITHOUT_WEIGHTS))
        expected = "False: it reads weights, which are quantized" if config.use_dora else f"one of {said}"
        raise ArgumentError(name, expected, repr(getattr(config, name)))
    if str(config.target_modules).lower() == EVERY_LINEAR:
        expected = "names of layers: peft takes none that is quantized for a linear one"
        raise ArgumentError("target_modules", expected, repr(config.target_modules))
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
