"""Names of tensors and layers: transformer blocks, projections with one input, usual splits, PEFT adapters.

`model.layers.3.mlp.up_proj.qweight` has the pattern `model.layers.*.mlp.up_proj.qweight`, like the `up_proj`
of all other blocks.

A model saved inside PEFT's wrapper stores `NAME.base_layer.qweight` and `NAME.lora_A.default.weight`, with or
without `base_model.model.` before all names. A fully trained module is `NAME.modules_to_save.default`, with
`NAME.original_module`. Old versions of PEFT keep the name `NAME.qweight`. Source: the names of parameters in
huggingface/peft, src/peft/tuners.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from qload.errors import MismatchError

if TYPE_CHECKING:
    from qload.loader import Split

# Lists of blocks with equal members, by the names of published checkpoints.
BLOCK_LIST = re.compile(
    r"(?:[a-z]\w*\.)*"
    r"(?:model|encoder|decoder|backbone|transformer|llm|\w*gpt\w*)\.(?:layers?|h|blocks)|layers|h|.*\.experts"
)

TOWER = re.compile(r"vision|visual|image|audio")  # in names of encoders next to a text model

# Projections with one input, quantized in the same way.
PROJECTION_GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))

NUMBER = re.compile(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)")
# Tensors that may be copies of others, or empty.
NOT_A_LAYER = re.compile(r"embed|lm_head|lora|adapter|wte|wpe|shared_head")
MATRIX_ENDINGS = (".weight", "_proj")  # of plain layers; masks and tables of positions have others


def is_matrix_name(name: str) -> bool:
    """Return whether a plain tensor of several axes is a layer's matrix, or a stack of matrices."""
    return name.endswith(MATRIX_ENDINGS)


@cache
def is_block_list(lead: str) -> bool:
    """Return whether numbered blocks with equal members follow these segments of a name."""
    return BLOCK_LIST.fullmatch(lead) is not None


def pattern_of(name: str) -> str:
    """Return the name with a star for each number."""
    return NUMBER.sub("*", name)


def block_of(name: str) -> str | None:
    """Return the transformer block of a name, as `model.layers.3`; None outside of blocks."""
    parts = name.split(".")
    for at, part in enumerate(parts[:-1]):
        if part.isdecimal() and is_block_list(".".join(parts[:at])):
            return ".".join(parts[: at + 1])
    return None


def group_by_pattern(names: Iterable[str]) -> Mapping[str, list[str]]:
    """Return pattern -> its names, in their order."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(pattern_of(name), []).append(name)
    return groups


def projection_groups(prefixes: Iterable[str]) -> Mapping[str, list[str]]:
    """Return the first stored projection of each group with one input -> all stored ones, if several."""
    stored = set(prefixes)
    groups = {}
    for prefix in sorted(stored):
        parent, dot, last = prefix.rpartition(".")
        for names in PROJECTION_GROUPS:
            if last in names:
                together = [f"{parent}{dot}{name}" for name in names if f"{parent}{dot}{name}" in stored]
                if together[0] == prefix and len(together) > 1:
                    groups[prefix] = together
    return groups


# Last parts of names of matrices that engines usually split by outputs, and by inputs.
COLUMN = re.compile(
    r"(q|k|v|qkv|gate|up|gate_up|q_b|kv_b)_proj|w1|w3|fc1|query_key_value|dense_h_to_4h|c_fc|lm_head"
)
ROW = re.compile(r"(o|out|down)_proj|w2|fc2|dense|dense_4h_to_h|c_proj")


def usual_split(prefix: str) -> "Split | None":
    """Return the axis of the usual cut by the last part of a name; None: unknown name, or no cut."""
    name = prefix.rpartition(".")[2]
    return "N" if COLUMN.fullmatch(name) else "K" if ROW.fullmatch(name) else None


WRAPPER = "base_model.model."
# Name segments of adapter parameters: LoRA, DoRA, AdaLoRA, VeRA, IA3, LoHa, LoKr, OFT.
ADAPTER = re.compile(
    r"lora_(A|B|E|embedding_A|embedding_B|magnitude_vector|ranknum|bias)"
    r"|vera_lambda_[bd]|ia3_l|hada_[wt][12](_[ab])?|lokr_[wt][12](_[ab])?|oft_[rR]|boft_[RsS]"
)
BASE, SAVED, ORIGINAL = "base_layer", "modules_to_save", "original_module"
REMEDY = "merge them with PEFT (merge_and_unload) and save the model again, or load the base and the adapter"


@dataclass(frozen=True)
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
