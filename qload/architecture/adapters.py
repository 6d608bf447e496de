"""PEFT adapters stored with the layers of a model, recognised by tensor names.

A model saved inside PEFT's wrapper stores `NAME.base_layer.qweight` and `NAME.lora_A.default.weight`, with or
without `base_model.model.` before all names. A fully trained module is `NAME.modules_to_save.default`, with
`NAME.original_module`. Old versions of PEFT keep the name `NAME.qweight`. Source: the names of parameters in
huggingface/peft, src/peft/tuners.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from qload.errors import MismatchError

WRAPPER = "base_model.model."
# Name segments of adapter parameters: LoRA, DoRA, AdaLoRA, VeRA, IA3, LoHa, LoKr, OFT.
ADAPTER = re.compile(
    r"lora_(A|B|E|embedding_A|embedding_B|magnitude_vector|ranknum|bias)"
    r"|vera_lambda_[bd]|ia3_l|hada_[wt][12](_[ab])?|lokr_[wt][12](_[ab])?|oft_[rR]|boft_[RsS]"
)
BASE, SAVED, ORIGINAL = "base_layer", "modules_to_save", "original_module"
REMEDY = "merge them with PEFT (merge_and_unload) and save the model again, or load the base and the adapter"


@dataclass(frozen=True, slots=True)
class Adapters:
    """Unmerged adapters of a model: the first tensor, its layer, and the number of layers with adapters."""

    name: str
    layer: str
    count: int

    def __str__(self) -> str:
        more = f", one of {self.count} such layers" if self.count > 1 else ""
        return f"{self.name} is an unmerged adapter of {self.layer}{more}"


def is_adapter(name: str) -> bool:
    """Return whether a tensor is a parameter of an adapter."""
    return any(map(ADAPTER.fullmatch, name.split(".")))


def base_name(name: str) -> str:
    """Name of a tensor in the model without PEFT's wrappers."""
    name = name.removeprefix(WRAPPER)
    if BASE not in name and SAVED not in name and ORIGINAL not in name:
        return name
    return ".".join(_unwrapped(name.split(".")))


def adapters_of(names: Iterable[str]) -> Adapters | None:
    """Adapters among the tensors of a whole model; None without adapters, and for adapters alone."""
    adapters: dict[str, str] = {}  # layer -> a tensor of its adapter
    bases: dict[str, str] = {}  # layer -> its stored name
    for name in names:
        parts = name.split(".")
        at = next((at for at, part in enumerate(parts) if part == SAVED or ADAPTER.fullmatch(part)), None)
        if at is not None:
            adapters.setdefault(".".join(parts[:at]), name)
            continue
        base = next((at for at, part in enumerate(parts) if part in (BASE, ORIGINAL)), None)
        if base is not None:
            bases.setdefault(".".join(parts[:base]), ".".join(parts[: base + 1]))
        else:
            bases.setdefault(".".join(parts[:-1]), ".".join(parts[:-1]))
    adapted = [layer for layer in adapters if layer in bases]
    layers = sorted(adapted, key=lambda layer: SAVED in adapters[layer])
    return Adapters(adapters[layers[0]], bases[layers[0]], len(layers)) if layers else None


def refuse_adapters(names: Iterable[str]) -> None:
    """Raise MismatchError for a model with unmerged adapters."""
    adapters = adapters_of(names)
    if adapters is not None:
        model = "a PEFT model that was saved whole"
        raise MismatchError(adapters.layer, model, "merged weights", str(adapters), f"remedy   {REMEDY}")


def _unwrapped(parts: list[str]) -> Iterator[str]:
    """Name segments without PEFT's; the segment after `modules_to_save` is the name of an adapter."""
    before = ""
    for part in parts:
        if part not in (BASE, SAVED, ORIGINAL) and before != SAVED:
            yield part
        before = part
