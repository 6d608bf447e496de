"""One pass over a checkpoint: all bytes of every tensor, and some codes of every quantized layer."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from qload.errors import QloadError
from qload.formats.unquantized import FLOATS
from qload.loader import FormatLoader, LayerDescription
from qload.spec import Role, TensorSpec
from qload.storage import TensorInfo, WeightStorage
from qload.verify.blocks import pieces
from qload.verify.values.contents import (
    MAX_SMALL_BYTES,
    Contents,
    ContentsAccumulator,
    Numbers,
    NumbersAccumulator,
    small_contents,
    small_numbers,
)
from qload.verify.values.statistics import Statistics, measure_codes
from qload.weights import Weights

MAX_CACHED = 64  # small tensors in memory at once


class Measurable(Protocol):
    """Part of a checkpoint that the measurement reads; a protocol, because checkpoints import this module."""

    @property
    def weights(self) -> Weights:
        """Tensors of the files."""

    @property
    def loader(self) -> FormatLoader:
        """Loader of the layers."""

    @property
    def readable_names(self) -> Sequence[str]:
        """Names of tensors to measure."""

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Tensor name -> declaration."""

    def role(self, name: str) -> Role:
        """Return the role of a tensor."""

    def described(self) -> Iterable[LayerDescription]:
        """Yield the layers to measure."""


@dataclass(frozen=True)
class Values:
    """Measurements: contents and numbers by tensor name, statistics of codes by prefix."""

    contents: Mapping[str, Contents] = field(default_factory=dict)
    numbers: Mapping[str, Numbers] = field(default_factory=dict)
    statistics: Mapping[str, Statistics] = field(default_factory=dict)

    @classmethod
    def joined(cls, parts: Iterable["Values"]) -> "Values":
        """Join the measurements of several parts."""
        contents: dict[str, Contents] = {}
        numbers: dict[str, Numbers] = {}
        codes: dict[str, Statistics] = {}
        for part in parts:
            contents.update(part.contents)
            numbers.update(part.numbers)
            codes.update(part.statistics)
        return cls(contents, numbers, codes)


def measure(checkpoint: Measurable) -> Values:
    """Measure all tensors and layers of a checkpoint, or of a part."""
    storage = checkpoint.weights.storage
    contents, numbers, codes = {}, {}, {}
    cached: dict[str, Tensor] = {}
    for name in checkpoint.readable_names:
        spec, role = checkpoint.specs.get(name), checkpoint.role(name)
        if len(cached) < MAX_CACHED and 0 < storage.info(name).nbytes <= MAX_SMALL_BYTES:
            cached[name] = storage.read(name)
        contents[name], floats = _measure_tensor(storage, name, spec, role, cached.get(name))
        if floats is not None:
            numbers[name] = floats
    weights = with_cached(checkpoint.weights, cached)
    for layer in checkpoint.described():
        try:
            statistics = measure_codes(weights, checkpoint.loader, layer)
        except QloadError:
            continue  # the rules of layers report it
        if statistics is not None:
            codes[layer.prefix] = statistics
    return Values(contents, numbers, codes)


def _measure_tensor(
    storage: WeightStorage, name: str, spec: TensorSpec | None, role: Role, cached: Tensor | None
) -> tuple[Contents, Numbers | None]:
    info, exponents = storage.info(name), spec is not None and spec.is_exponents
    scale = role is Role.SCALE
    floats = holds_floats(info, spec, role) or (scale and (exponents or info.dtype.is_floating_point))
    if cached is None and 0 < info.nbytes <= MAX_SMALL_BYTES:
        cached = storage.read(name)
    if cached is not None:
        flat = cached.reshape(-1)
        options = {"exponents": scale and exponents, "fully": scale}
        return small_contents(flat), small_numbers(flat, **options) if floats else None
    contents = ContentsAccumulator()
    numbers = NumbersAccumulator(exponents=scale and exponents, fully=scale) if floats else None
    for piece in pieces(storage, name):
        contents.add(piece)
        if numbers is not None:
            numbers.add(piece)
    return contents.finish(), None if numbers is None else numbers.finish()


def holds_floats(info: TensorInfo, spec: TensorSpec | None, role: Role) -> bool:
    """Return whether a tensor other than a scale has floats; codes with an integer dtype are bits."""
    if role is Role.WORD:
        return spec is not None and all(dtype.is_floating_point for dtype in spec.dtypes)
    return role is Role.FLOAT and info.dtype in FLOATS


class CachedStorage:
    """Storage with some tensors in memory; callers must not write to these."""

    def __init__(self, storage: WeightStorage, cached: Mapping[str, Tensor]) -> None:
        self._storage, self._cached = storage, cached

    def keys(self) -> Collection[str]:
        """Return the names of all tensors."""
        return self._storage.keys()

    def info(self, name: str) -> TensorInfo:
        """Return dtype, shape and file of the tensor `name`."""
        return self._storage.info(name)

    def read(self, name: str, index: tuple[slice, ...] = ()) -> Tensor:
        """Read the elements `index` of the tensor `name`."""
        cached = self._cached.get(name)
        if cached is None:
            return self._storage.read(name, index)
        return cached[index].contiguous() if index else cached

    def close(self) -> None:
        """Do nothing: the owner closes the storage."""


def with_cached(weights: Weights, cached: Mapping[str, Tensor]) -> Weights:
    """Return the same weights with these tensors in memory, in their shapes."""
    twin = copy(weights)
    twin.storage = CachedStorage(weights.storage, cached)
    return twin
