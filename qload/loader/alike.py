"""Layers that are alike are described once: a model has thousands of layers, of a few shapes."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b

import torch
from torch import Tensor

from qload.errors import (
    DtypeError,
    MissingTensorError,
    QloadError,
    ShapeError,
    TwoFormatsError,
    UnsupportedFormatError,
)
from qload.loader.description import (
    ChosenFormat,
    ConfiguredFormat,
    DialectRecogniser,
    LayerDescription,
    LayerNames,
    RecognisedFormat,
    choose,
    describe,
)
from qload.loader.source import TensorSource, fact_of
from qload.spec import Names, Shape, named

MOST = 1 << 12  # descriptions that are remembered; a hostile checkpoint may have no two layers alike
KINDS, SMALL = 16, 1 << 20  # kinds of layers, and bytes of facts of each, that are kept as they are

Headers = tuple[tuple[str, torch.dtype, Shape], ...]


class Describer:
    """Describes layers in one of several formats; equal headers and facts are examined once.

    Two layers are alike if their tensors have the same suffixes, dtypes and shapes, and their facts the same
    bytes: a description depends on nothing else, except for names. Errors are not cached.

    Parameters
    ----------
    formats
        Formats of the config.
    dialects
        Identifies layers that do not fit these formats; None: such a layer is an error.
    """

    def __init__(
        self, formats: Sequence[ConfiguredFormat], dialects: DialectRecogniser | None = None
    ) -> None:
        self.formats = formats
        self.dialects = dialects
        specs = [spec for fmt in formats for spec in fmt.specs()]
        self._suffixes = tuple(dict.fromkeys(suffix for spec in specs for suffix in spec.suffixes))
        self._chosen: dict[Headers, ChosenFormat] = {}
        self._described: dict[tuple[Headers, bytes], LayerDescription] = {}
        self._last: dict[Headers, tuple[bytes, Mapping[str, Tensor], LayerDescription]] = {}
        self._unfit: set[Headers] = set()  # names and dtypes of layers that fit no format
        self._of_dialects: dict[ConfiguredFormat, Describer] = {}

    def describe(self, weights: TensorSource, prefix: str) -> LayerDescription:
        """Tell the format by the tensors, read the facts, check shapes, dtypes and indices.

        A layer that does not fit the config is described in its dialect. UnsupportedFormatError for a dialect
        that is not read; the error that the config's formats raise where the dialect is not known.
        """
        headers = self._headers(weights, prefix)
        if headers in self._unfit:
            layer = self._in_dialect(weights, prefix)
            if layer is not None:
                return layer
        try:
            return self._in_formats(weights, prefix, headers)
        except (DtypeError, MissingTensorError, ShapeError, TwoFormatsError) as error:
            if headers not in self._chosen and len(self._unfit) < MOST:
                self._unfit.add(headers)
            layer = self._in_dialect(weights, prefix)
            if layer is None:
                raise error from None
            return layer

    def _in_dialect(self, weights: TensorSource, prefix: str) -> LayerDescription | None:
        """Describe a layer in a dialect missing from the config; None for an unknown dialect."""
        found = self.dialects.recognise(weights, prefix) if self.dialects else None
        if isinstance(found, UnsupportedFormatError):
            raise found
        return None if found is None else self._read_as(found, weights, prefix)

    def _read_as(
        self, dialect: RecognisedFormat, weights: TensorSource, prefix: str
    ) -> LayerDescription | None:
        describer = self._of_dialects.setdefault(dialect.format, Describer((dialect.format,)))
        try:
            return replace(describer.describe(weights, prefix), dialect=dialect.note)
        except QloadError:  # the error of the config's own formats is more precise
            return None

    def _in_formats(self, weights: TensorSource, prefix: str, headers: Headers) -> LayerDescription:
        """Describe a layer in one of the config's formats."""
        chosen = self._chosen.get(headers)
        if chosen is None:
            chosen = choose(weights, prefix, self.formats)
            if len(self._chosen) < MOST:
                self._chosen[headers] = chosen
        names = LayerNames(weights, prefix, chosen.suffixes)
        facts: Mapping[str, Tensor] = {
            spec.name: fact_of(weights, names.full(spec.name), spec.role)
            for spec in chosen.specs
            if spec.fact
        }
        found = _bytes(facts)
        if found is None:
            return describe(weights, prefix, chosen, facts)
        last = self._last.get(headers)
        if last is not None and found == last[0]:
            _, facts, known = last  # the same memory, which tells who compares them at once
        else:
            told = headers, blake2b(found, digest_size=16).digest()
            described = self._described.get(told)
            if described is None:
                layer = describe(weights, prefix, chosen, facts)
                described = replace(layer, facts={}, names=Names())
                if len(self._described) < MOST:
                    self._described[told] = described
            known = described
            self._keep(headers, found, facts, known)
        same = known.format, known.specs, known.sizes
        return LayerDescription(
            prefix, *same, facts, known.dtypes, names, known.notes, known.dialect, known.cuts
        )

    def _keep(
        self, headers: Headers, found: bytes, facts: Mapping[str, Tensor], known: LayerDescription
    ) -> None:
        """The facts of the last layer, as the next one mostly has the same, and comparing is fast."""
        if len(self._last) >= KINDS:
            self._last.clear()
        if len(found) <= SMALL:
            self._last[headers] = found, facts, known

    def _headers(self, weights: TensorSource, prefix: str) -> Headers:
        found = []
        for suffix in self._suffixes:
            name = named(prefix, suffix)
            if weights.has_tensor(name):
                info = weights.info(name)
                found.append((suffix, info.dtype, info.shape))
        return tuple(found)


def _bytes(facts: Mapping[str, Tensor]) -> bytes | None:
    """What tells facts apart, whose lengths headers tell; None where it would have to wait for a device."""
    if any(fact.device.type != "cpu" for fact in facts.values()):
        return None
    flat = (fact.reshape(-1).contiguous().view(torch.uint8) for fact in facts.values())
    return b"".join(fact.numpy().data for fact in flat)
