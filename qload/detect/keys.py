"""Keys of quantization configs that qload ignores although their owners act on them.

A key that changes the meaning of stored values is refused. A key that changes other computations, or that
only some programs act on, is a note. Settings of the quantizer, such as `damp_percent` and `iters`, change
neither. Sources: gptqmodel 7.7.0, auto-round 0.16.1, transformers 5.23.0.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from qload.detect.files import FoundConfig, shown
from qload.errors import UnsupportedFormatError

NOTHING: tuple[Any, ...] = (None, False, "", "none", [], {})


@dataclass(frozen=True)
class KnownKey:
    """A key of an owner's config.

    Attributes
    ----------
    meaning
        Its effect, as the predicate of a sentence about the key.
    refused
        Whether it changes the meaning of stored values.
    neutral
        Values without effect.
    """

    meaning: str
    refused: bool = False
    neutral: tuple[Any, ...] = NOTHING


_ROTATED = KnownKey("rotates the inputs of layers, and qload does not", refused=True)
_SCALES = KnownKey("quantizes the scales too, and qload does not dequantize them", refused=True)
_ADAPTER = KnownKey("adds a low-rank product to outputs; qload reads the stored weights without it")
_CACHE = KnownKey("configures the key/value cache and attention, which is left to the engine")
# Method -> the key of its entries for modules; an entry has the keys of the config itself.
ENTRIES: Mapping[str, str] = {"gptq": "dynamic", "auto-round": "extra_config"}
KEYS: Mapping[str, Mapping[str, KnownKey]] = {
    "gptq": {
        "adapter": _ADAPTER,
        "rotation": KnownKey("rotated weights before quantization; qload reads them as stored"),
    },
    "awq": {
        "dynamic": KnownKey("has settings of some modules; qload reads layers by their tensors"),
    },
    "auto-round": {
        "rotation_config": _ROTATED,
        "hadamard_config": _ROTATED,
        "transform_config": _ROTATED,
        "super_bits": _SCALES,
        "super_group_size": _SCALES,
        "static_kv_dtype": _CACHE,
        "static_attention_dtype": _CACHE,
    },
    "fp8": {
        "expert_dtype": KnownKey(
            "states the dtype of experts; qload reads them by their tensors", neutral=(*NOTHING, "fp8")
        ),
    },
}


def notes_of(found: FoundConfig, method: str) -> Iterator[str]:
    """Yield a note for each ignored key; raise UnsupportedFormatError for one that changes stored values."""
    known = KEYS.get(method, {})
    for path, values in _sections(found, method):
        for key, meant in known.items():
            value = values.get(key)
            if any(type(value) is type(other) and value == other for other in meant.neutral):
                continue
            place = f"{path}.{key}" if path else key
            if meant.refused:
                reason = f"{found.key(place)} of {found.file} {meant.meaning}"
                raise UnsupportedFormatError(f"{method} with {key}", reason)
            yield f"{found.file} has {place[:160]} = {shown(value)}, which {meant.meaning}"


def _sections(found: FoundConfig, method: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the config and its entries for modules, each with its path."""
    yield "", found.values
    name = ENTRIES.get(method)
    entries = found.values.get(name) if name else None
    if isinstance(entries, Mapping):
        for entry, values in entries.items():
            if isinstance(values, Mapping):
                yield f"{name}.{entry:.80}", values
