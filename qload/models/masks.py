"""Which tokens the tokens of a layer see: all before them, a window of these, or those of their chunk."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from qload.detect import FoundConfig
from qload.detect.files import shown
from qload.errors import ConfigError
from qload.models.families import Family

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"


@dataclass(frozen=True)
class Mask:
    """What a layer's tokens see.

    Attributes
    ----------
    window
        A token at i sees j where i - window < j <= i; None: no window.
    chunk
        A token at i sees j <= i of its own chunk, i // chunk == j // chunk; None: no chunks.
    turned
        Whether positions turn the queries and keys of the layer.
    """

    window: int | None = None
    chunk: int | None = None
    turned: bool = True


class SaysWindows(Protocol):
    """What a config says of windows and chunks."""

    sliding_window: int | None
    use_sliding_window: bool
    max_window_layers: int
    layer_types: list[str] | None
    attention_chunk_size: int | None
    no_rope_layers: list[int] | None
    no_rope_layer_interval: int


def masks_of(found: FoundConfig, family: Family, said: SaysWindows, layers: int) -> tuple[Mask, ...]:
    """What each of `layers` sees; ConfigError for lists that do not say it of each, and for other types."""
    if family.windows == "chunked":
        return _chunked(found, said, layers)
    if family.windows == "none":
        return (Mask(),) * layers
    switched = family.windows in ("every", "alternating") or said.use_sliding_window
    window = said.sliding_window if switched else None
    if family.windows in ("every", "switched"):
        return (Mask(window),) * layers
    types = said.layer_types
    if types is None:
        first, step = (0, 2) if family.windows == "alternating" else (said.max_window_layers, 1)
        slides = range(first, layers, step)
        return tuple(Mask(window if layer in slides else None) for layer in range(layers))
    _check_list(found, "layer_types", types, layers, (FULL, SLIDING))
    if SLIDING in types and window is None:
        raise ConfigError(found.file, found.key("sliding_window"), f"a number, for {SLIDING}", "none")
    return tuple(Mask(window if each == SLIDING else None) for each in types)


def seen(positions: Tensor, keys: int, window: int | None = None, chunk: int | None = None) -> Tensor:
    """Whether a token at each of `positions` (...) sees the key at 0, 1, ... `keys` - 1: bool (..., keys)."""
    at, own = torch.arange(keys, device=positions.device), positions.unsqueeze(-1)
    found = at <= own
    if window is not None:
        found &= at > own - window
    if chunk is not None:
        found &= at // chunk == own // chunk
    return found


def _chunked(found: FoundConfig, said: SaysWindows, layers: int) -> tuple[Mask, ...]:
    """Llama 4: rope where `no_rope_layers` has a 1, in spite of its name, and chunks on the same layers."""
    every = said.no_rope_layer_interval
    turned = said.no_rope_layers or [int((n + 1) % every != 0) for n in range(layers)]
    _check_list(found, "no_rope_layers", turned, layers, (0, 1))
    types = said.layer_types or [CHUNKED if each else FULL for each in turned]
    _check_list(found, "layer_types", types, layers, (FULL, CHUNKED))
    chunk = said.attention_chunk_size
    if CHUNKED in types and chunk is None:
        raise ConfigError(found.file, found.key("attention_chunk_size"), f"a number, for {CHUNKED}", "none")
    pairs = zip(types, turned, strict=True)
    return tuple(Mask(None, chunk if kind == CHUNKED else None, bool(rope)) for kind, rope in pairs)


def _check_list(
    found: FoundConfig, key: str, values: list[str] | list[int], layers: int, known: tuple[object, ...]
) -> None:
    if len(values) != layers:
        raise ConfigError(found.file, found.key(key), f"{layers} entries, one a layer", str(len(values)))
    for value in values:
        if value not in known:
            raise ConfigError(found.file, found.key(key), f"{' or '.join(map(str, known))}", shown(value))
