"""The pass itself: every tensor's bytes once, and some codes of every quantized layer."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from qload.errors import QloadError
from qload.formats.unquantized import FLOATS
from qload.loader import FormatLoader, LayerDescription
from qload.spec import Role, TensorSpec
from qload.storage import TensorInfo, WeightStorage
from qload.verify.values.contents import Contents, ContentsOf
from qload.verify.values.held import holding
from qload.verify.values.numbers import Numbers, NumbersOf
from qload.verify.values.pieces import pieces
from qload.verify.values.small import SMALL, small_contents, small_numbers
from qload.verify.values.statistics import Statistics, statistics
from qload.weights import Weights

HELD = 64  # small tensors that are in memory at once


class Measurable(Protocol):
    """What of a subject is needed, which itself holds what is measured."""

    @property
    def weights(self) -> Weights | None:
        """The files."""

    @property
    def loader(self) -> FormatLoader:
        """Of its layers."""

    @property
    def judged(self) -> Sequence[str]:
        """Names of the tensors to measure."""

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """The declarations of tensors, by name."""

    def role(self, name: str) -> Role:
        """What a tensor is for."""

    def described(self) -> Iterable[LayerDescription]:
        """The layers that are to be measured."""


@dataclass(frozen=True)
class Values:
    """What was measured: by name of a tensor its bytes, and its floats if it has any; by prefix codes."""

    contents: Mapping[str, Contents] = field(default_factory=dict)
    numbers: Mapping[str, Numbers] = field(default_factory=dict)
    statistics: Mapping[str, Statistics] = field(default_factory=dict)

    @classmethod
    def joined(cls, parts: Iterable["Values"]) -> "Values":
        """Those of several runs together."""
        contents: dict[str, Contents] = {}
        numbers: dict[str, Numbers] = {}
        codes: dict[str, Statistics] = {}
        for part in parts:
            contents.update(part.contents)
            numbers.update(part.numbers)
            codes.update(part.statistics)
        return cls(contents, numbers, codes)


def measure(subject: Measurable) -> Values:
    """All names and layers of a subject, or of a run of one."""
    assert subject.weights is not None
    storage = subject.weights.storage
    contents, numbers, codes = {}, {}, {}
    held: dict[str, Tensor] = {}
    for name in subject.judged:
        spec, role = subject.specs.get(name), subject.role(name)
        if len(held) < HELD and 0 < storage.info(name).nbytes <= SMALL:
            held[name] = storage.read(name)
        contents[name], floats = _tensor(storage, name, spec, role, held.get(name))
        if floats is not None:
            numbers[name] = floats
    weights = holding(subject.weights, held)
    for layer in subject.described():
        try:
            found = statistics(weights, subject.loader, layer)
        except QloadError:
            continue  # the rules about layers say why it cannot be read
        if found is not None:
            codes[layer.prefix] = found
    return Values(contents, numbers, codes)


def _tensor(
    storage: WeightStorage, name: str, spec: TensorSpec | None, role: Role, held: Tensor | None
) -> tuple[Contents, Numbers | None]:
    info, exponents = storage.info(name), spec is not None and spec.is_exponents
    scale = role is Role.SCALE
    floats = holds_floats(info, spec, role) or (scale and (exponents or info.dtype.is_floating_point))
    if held is None and 0 < info.nbytes <= SMALL:
        held = storage.read(name)
    if held is not None:
        whole = held.reshape(-1)
        found = small_numbers(whole, exponents=scale and exponents, fully=scale) if floats else None
        return small_contents(whole), found
    contents = ContentsOf()
    numbers = NumbersOf(exponents=scale and exponents, fully=scale) if floats else None
    for piece in pieces(storage, name):
        contents.add(piece)
        if numbers is not None:
            numbers.add(piece)
    return contents.finish(), None if numbers is None else numbers.finish()


def holds_floats(info: TensorInfo, spec: TensorSpec | None, role: Role) -> bool:
    """Whether a tensor that is no scale holds values: codes that may be stored as whole numbers are bits."""
    if role is Role.WORD:
        return spec is not None and all(dtype.is_floating_point for dtype in spec.dtypes)
    return role is Role.FLOAT and info.dtype in FLOATS
