"""Values of a layer beyond headers and facts: decisions by them, and the refusal of NaN and infinite scales.

A scale that is not finite spoils all weights of its group. Ranks with a share of a layer examine the scales
of the whole layer, on the CPU, so that all of them refuse with one sentence; no codes are read for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any
from weakref import ref

from qload import dtypes
from qload.dtypes import STORED
from qload.errors import ArgumentError, NonfiniteScaleError, QloadError
from qload.lazy_torch import Tensor, torch
from qload.loader.description import ConfiguredFormat, LayerDescription
from qload.loader.source import TensorSource
from qload.spec import Config, Grouped, LayerClaims, Names, TensorSpec, named

MAX_CHECKED_LAYERS = 2  # layers of a claim that are compared with it: it is wrong about all or none
MAX_SAMPLED_LAYERS = 256  # layers examined together if one alone is ambiguous
MAX_CACHED_LAYERS = 1 << 16  # layers
EXAMINED_SCALES = 1 << 18  # at once, in a cache
# Dtype -> (mask, least bits of a number that is not finite).
NONFINITE_BITS = {
    dtypes.float8_e8m0fnu: (0xFF, 0xFF),
    dtypes.float8_e4m3fn: (0x7F, 0x7F),
    dtypes.float16: (0x7FFF, 0x7C00),
    dtypes.bfloat16: (0x7FFF, 0x7F80),
    dtypes.float32: (0x7FFF_FFFF, 0x7F80_0000),
}
REMEDY = (
    "remedy   fetch or quantize the layer again (qload verify lists all such tensors), "
    'or load it as it is by nonfinite="allow" (--nonfinite allow)'
)

Describe = Callable[[TensorSource, str], LayerDescription]


class LayerDecisions:
    """Cache of decisions by values, for the layers of one source.

    `describe` reads the headers of a layer. `every`: compare every layer with the config, not the first ones
    of each claim alone.
    """

    def __init__(self, source: TensorSource, describe: Describe, *, every: bool) -> None:
        self._source, self._describe, self._every = ref(source), describe, every
        self._cache: dict[str, tuple[dict[str, Any], QloadError | None]] = {}
        self._formats: dict[Any, ConfiguredFormat] = {}
        self._checked: Counter[LayerClaims | None] = Counter()
        self._logged: set[str] = set()
        self.shared: dict[str, Any] = {}

    def belongs_to(self, source: TensorSource) -> bool:
        """Return whether the cache belongs to a source."""
        return self._source() is source

    def is_first(self, kind: str) -> bool:
        """Return True on the first call for a kind of message, which is logged once for all layers."""
        is_first = kind not in self._logged
        self._logged.add(kind)
        return is_first

    def settle(self, layer: LayerDescription) -> LayerDescription:
        """Update a layer's config by its values, and attach the error if they contradict claims."""
        decision = self._cache.get(layer.prefix)
        if decision is None:
            claims = layer.format.claims
            compare = self._every or self._checked[claims] < MAX_CHECKED_LAYERS
            values = StoredValues(self, layer, compare_codes=compare)
            with torch.device("cpu"):  # callers may have another default, such as "meta"
                decision = layer.format.config.settled(values)
            self._checked[claims] += values.codes_compared and decision[1] is None
            if len(self._cache) < MAX_CACHED_LAYERS:
                self._cache[layer.prefix] = decision
        changes, error = decision
        if not changes and error is None:
            return layer
        return replace(layer, format=self._format(layer.format, changes), contradiction=error)

    def layers_with(self, suffix: str) -> Iterator[tuple[Config, StoredValues]]:
        """Yield the layers with a tensor of this suffix, in the order of their names."""
        source = self._source()
        assert source is not None  # the calling layer keeps it alive
        names = sorted(name for name in source.names() if name.endswith(f".{suffix}"))
        for name in names[:MAX_SAMPLED_LAYERS]:
            try:
                layer = self._describe(source, name.removesuffix(f".{suffix}"))
            except QloadError:
                continue
            if layer.format.config.by_values and layer.format.claims is not None:
                yield layer.format.config, StoredValues(self, layer, compare_codes=False)

    def _format(self, fmt: ConfiguredFormat, changes: Mapping[str, Any]) -> ConfiguredFormat:
        """Share one format among layers with equal decisions."""
        key = id(fmt), tuple(changes.items())
        if key not in self._formats:
            self._formats[key] = replace(fmt, config=replace(fmt.config, **changes))
            self._formats[id(fmt), None] = fmt  # keeps `fmt` alive, and so its id unique
        return self._formats[key]


class StoredValues:
    """The values of a layer, as `qload.spec.LayerValues` describes them."""

    def __init__(self, decisions: LayerDecisions, layer: LayerDescription, *, compare_codes: bool) -> None:
        source = decisions._source()
        assert source is not None  # the layer keeps it alive
        self._decisions, self._layer, self._source = decisions, layer, source
        self._roles = {spec.name: spec.role for spec in layer.specs}
        self.compare_codes, self.codes_compared = compare_codes, False
        self.names: Names = layer.names
        self.shared = decisions.shared

    @property
    def claims(self) -> LayerClaims:
        """Claims of the config about the layer."""
        return self._layer.format.claims or LayerClaims()

    @property
    def rows_of_a_group(self) -> int:
        """Inputs of a group."""
        config = self._layer.format.config
        return config.rows_of_a_group(self._layer.K) if isinstance(config, Grouped) else self._layer.K

    def readable(self, field: str) -> tuple[tuple[int, int], ...] | None:
        """(start, stop) of the readable part along each axis; of files, the whole tensor."""
        return self._source.readable(self.names.full(field))

    def read(self, field: str, index: tuple[slice, ...] = ()) -> Tensor:
        """Elements of a tensor, on the CPU."""
        name, role = self.names.full(field), self._roles[field]
        shape = self._source.info(name).shape
        self.codes_compared |= self.compare_codes
        if all(part.indices(size)[:2] == (0, size) for part, size in zip(index, shape, strict=False)):
            return self._source.read_fact(name, role).cpu()
        return self._source.read(name, index, role=role).cpu()

    def group_of_rows(self, start: int, stop: int) -> Tensor:
        """The group of each input of a run."""
        config, facts = self._layer.format.config, self._layer.facts
        index = next((facts[name] for name in ("g_idx", "weight_g_idx") if name in facts), None)
        if index is None or getattr(config, "indexed", True) is False:
            assert isinstance(config, Grouped)
            index = config.in_order(self._layer.K)
        return index[start:stop].cpu().long()

    def layers(self, field: str) -> Iterator[tuple[Config, StoredValues]]:
        """Yield the layers of the checkpoint with this field."""
        full = self.names.full(field)
        lead = named(self._layer.prefix, "")
        return self._decisions.layers_with(full.removeprefix(lead).lstrip("."))


def check_nonfinite(nonfinite: object) -> None:
    """ArgumentError for a setting other than "error" and "allow"."""
    if nonfinite not in ("error", "allow"):
        raise ArgumentError("nonfinite", "'error' or 'allow'", repr(nonfinite))


def check_scales(
    source: TensorSource, layers: Iterable[LayerDescription], tensors: Mapping[str, Tensor], *, whole: bool
) -> None:
    """Raise NonfiniteScaleError for the first tensor with a scale that is NaN or infinite.

    Parameters
    ----------
    source, layers
        Source of the load, and its parts in order.
    tensors
        Tensors of the load by field, the parts joined.
    whole
        True if `tensors` has whole tensors, as for a world of one rank.
    """
    layers = list(layers)
    for spec in layers[0].specs:
        if not spec.has_scales:
            continue
        loaded = tensors.get(spec.name)
        # Another device than the CPU would have to be waited for.
        on_cpu = loaded is not None and loaded.device.type == "cpu"
        if loaded is not None and (loaded.is_meta or (whole and on_cpu and is_finite(loaded, spec))):
            continue
        for layer in layers:
            name = layer.names.full(spec.name)
            has_floats = source.info(name).stored_dtype.is_floating_point or spec.is_exponents
            if not (has_floats or spec.scale_bytes):
                continue  # whole numbers with scales of their own
            known = spec.name in layer.facts
            stored = layer.facts[spec.name] if known else _read_stored(source, name, spec)
            examined = loaded if stored is None else stored
            if examined is not None and not is_finite(examined, spec):
                raise _error(name, examined, spec)


def is_finite(scales: Tensor, spec: TensorSpec) -> bool:
    """Return True if no scale is NaN or infinite; True for whole numbers."""
    floats = _floats(scales, spec)
    if floats is None or not floats.numel():
        return True
    kind = STORED[floats.dtype]
    if kind not in NONFINITE_BITS or floats.device.type != "cpu":
        return bool(_finite(floats).all())
    mask, least = NONFINITE_BITS[kind]
    # On this thread: torch's other threads would take the cores of those that read.
    bits = floats.detach().contiguous().reshape(-1).view(torch.uint8).numpy().view(f"u{floats.itemsize}")
    starts = range(0, bits.size, EXAMINED_SCALES)
    return all(int((bits[at : at + EXAMINED_SCALES] & mask).max()) < least for at in starts)


def _finite(floats: Tensor) -> Tensor:
    return torch.isfinite(floats.float() if floats.dtype.itemsize == 1 else floats)


def _floats(scales: Tensor, spec: TensorSpec) -> Tensor | None:
    """Scales as floats, also those stored as bytes; None for whole numbers and meta tensors."""
    if scales.is_meta:
        return None
    if spec.scale_bytes is not None:
        return spec.scale_bytes.of(scales)
    if spec.is_exponents and scales.dtype == torch.uint8:
        return scales.view(torch.float8_e8m0fnu)
    return scales if scales.dtype.is_floating_point else None


def _read_stored(source: TensorSource, name: str, spec: TensorSpec) -> Tensor | None:
    """Read a whole tensor, on the CPU if the source can; None if an engine has only a part of it."""
    whole = source.whole()
    if whole.readable(name) != tuple((0, size) for size in whole.info(name).shape):
        return None
    if spec.scale_bytes is not None:
        axes = len(whole.info(name).shape)
        return whole.read(name, (slice(None),) * (axes - 1) + (spec.scale_bytes.slice,), role=spec.role).cpu()
    return whole.read_fact(name, spec.role)


def _error(name: str, scales: Tensor, spec: TensorSpec) -> NonfiniteScaleError:
    floats = _floats(scales, spec)
    assert floats is not None  # or it is finite
    wrong = (~_finite(floats)).nonzero().cpu()
    first = tuple(wrong[0].tolist())
    got = f"{float(floats[first]):g} at {first}; {wrong.shape[0]} of {scales.numel()} are not finite"
    return NonfiniteScaleError(name, "has scales that are not finite", "finite numbers", got, REMEDY)
