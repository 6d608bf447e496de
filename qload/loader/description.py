"""Descriptions of layers before any weight is read: format, sizes and declaration, from headers and facts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from hashlib import blake2b
from typing import Any, Protocol

import numpy as np

from qload.dtypes import Dtype
from qload.errors import (
    DtypeError,
    MismatchError,
    MissingTensorError,
    QloadError,
    ShapeError,
    TwoFormatsError,
    UnsupportedFormatError,
)
from qload.lazy_torch import Tensor, torch
from qload.loader.source import TensorSource
from qload.spec import (
    PARTS,
    ActivationScheme,
    Config,
    Fact,
    LayerClaims,
    LayerHeaders,
    Names,
    Shape,
    TensorSpec,
    Weight,
    named,
)
from qload.spec.transforms import Transforms
from qload.storage import TensorInfo

MAX_DESCRIPTIONS = 1 << 12  # cached; a hostile checkpoint may have no two equal layers
MAX_FACT_KINDS, MAX_FACT_BYTES = 16, 1 << 20  # facts of the last layer of a kind, kept in memory

Headers = Mapping[str, TensorInfo]  # by suffix
HeaderKey = tuple[tuple[str, Dtype, Shape], ...]

ROTATED = "run it with amd-quark, or export it without online rotations"
# Tensors that change the result of a layer, with a remedy for formats that do not declare them.
CHANGING: Mapping[str, str] = {
    "pre_quant_scale": "state a quant_algo that scales inputs, such as NVFP4_AWQ, or fold it into weights",
    "weight_quantizer._svdquant_lora_a": "state quant_algo NVFP4_SVD, which reads both factors",
    "weight_quantizer._svdquant_lora_b": "state quant_algo NVFP4_SVD, which reads both factors",
    "input_rotation": ROTATED,
    "input_prescale": ROTATED,
    "rms_norm.weight": "apply the norm outside, and leave its tensor out; transformers loads it (bitnet)",
}

PLAIN_BESIDE = (
    "remedy   remove the tensors of the other format; or, if compressed-tensors saved the model frozen, not "
    "compressed, set quantization_status to frozen"
)


@dataclass(frozen=True)
class ConfiguredFormat:
    """A format with its config, and the declared quantization of its layers' inputs.

    `activations` has suffixes on disk; in a layer description, fields. `claims`: claims of the checkpoint's
    config about layers of this format; None without claims. `stored`: (field, suffix) of each stored
    tensor, for checkpoints with names of their own; empty: the names of the format.
    """

    weight_type: type[Weight]
    config: Config
    activations: ActivationScheme | None = field(default=None, compare=False)
    claims: LayerClaims | None = field(default=None, compare=False, repr=False)  # to check, not to trust
    stored: tuple[tuple[str, str], ...] = field(default=(), repr=False)

    @cached_property
    def specs(self) -> tuple[TensorSpec, ...]:
        """Declaration of the tensors, before the headers of any layer are known."""
        return self.specs_of(self.config)

    def specs_of(self, config: Config) -> tuple[TensorSpec, ...]:
        """Declare the tensors for a `config`, under their names on disk."""
        specs, suffixes = self.weight_type.tensors(config), dict(self.stored)
        if not suffixes:
            return specs
        return tuple(replace(spec, stored=suffixes[spec.name]) for spec in specs if spec.name in suffixes)

    @cached_property
    def suffixes(self) -> tuple[str, ...]:
        """Suffixes of all tensors, in all spellings."""
        return tuple(suffix for spec in self.specs for suffix in spec.suffixes)


@dataclass(frozen=True)
class RecognisedFormat:
    """A format missing from the config, identified by a layer's own tensors.

    Attributes
    ----------
    format
        Format to read it in.
    note
        Note on the difference between config and tensors.
    """

    format: ConfiguredFormat
    note: str


class DialectRecogniser(Protocol):
    """Identifies layers that fit no format of the config."""

    def recognise(
        self, weights: TensorSource, prefix: str
    ) -> RecognisedFormat | UnsupportedFormatError | None:
        """Identify the dialect of the layer `prefix`: a supported format, the error to raise, or None."""


@dataclass(frozen=True)
class ChosenFormat:
    """Stored format of a layer, with the suffix of each field and the declaration of the stored tensors."""

    format: ConfiguredFormat
    suffixes: Mapping[str, str]
    specs: tuple[TensorSpec, ...]

    @cached_property
    def facts(self) -> tuple[TensorSpec, ...]:
        """Declaration of the stored facts."""
        return tuple(spec for spec in self.specs if spec.fact)


@dataclass(frozen=True)
class LayerNames(Names):
    """Names of a layer's tensors on disk, by field, and their files."""

    weights: TensorSource
    prefix: str
    suffixes: Mapping[str, str]

    def full(self, field: str) -> str:
        """Name on disk: `qweight` -> `layers.0.q_proj.qweight`."""
        suffix, prefix = self.suffixes[field], self.prefix
        return f"{prefix}.{suffix}" if prefix and suffix[0] != "_" else named(prefix, suffix)

    def file(self, field: str) -> str | None:
        """File of the tensor."""
        return self.weights.info(self.full(field)).file


@dataclass(frozen=True)
class LayerDescription:
    """A layer before any of its weights is read.

    Attributes
    ----------
    prefix
        Prefix of the layer's tensors.
    format
        Its format, with the layer's own config and the stored scales of its inputs.
    specs
        Declaration of its stored tensors.
    sizes, facts, dtypes, names
        Size of each dimension; values of facts, dtypes and names by field.
    notes
        Harmless contradictions of claims.
    dialect
        Note on a format identified by tensors, against the config; None for the config's format.
    cuts
        Shares of the layer by request, common to equal layers.
    contradiction
        Error that loads raise; None without one.
    transforms
        Transforms of inputs and outputs when the layer runs; None without any.
    """

    prefix: str
    format: ConfiguredFormat
    specs: tuple[TensorSpec, ...]
    sizes: Mapping[str, int]
    facts: Mapping[str, Any]
    dtypes: Mapping[str, Dtype]
    names: Names
    notes: Sequence[str] = ()
    dialect: str | None = None
    cuts: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)
    contradiction: QloadError | None = field(default=None, compare=False)
    transforms: Transforms | None = field(default=None, repr=False)

    @property
    def N(self) -> int:
        """Outputs of the whole layer."""
        return self.sizes["N"]

    @property
    def K(self) -> int:
        """Inputs of the whole layer; 1 for a vector."""
        return self.sizes.get("K", 1)


class LayerDescriber:
    """Describes layers in one of several formats; equal headers and facts are examined once.

    Two layers are equal if their tensors have the same suffixes, dtypes and shapes, and their facts the same
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
        declared = (suffix for fmt in formats for suffix in fmt.suffixes)
        self._suffixes = tuple(dict.fromkeys((*declared, *CHANGING)))
        self._chosen: dict[HeaderKey, ChosenFormat] = {}
        self._described: dict[tuple[HeaderKey, bytes], LayerDescription] = {}
        self._last: dict[HeaderKey, tuple[bytes, dict[str, Tensor], LayerDescription]] = {}
        self._unfit: set[HeaderKey] = set()  # layers that fit no format
        self._of_dialects: dict[ConfiguredFormat, LayerDescriber] = {}

    def describe(self, weights: TensorSource, prefix: str) -> LayerDescription:
        """Identify the format by tensors, read the facts, check shapes, dtypes and indices.

        A layer that does not fit the config is described in its dialect. UnsupportedFormatError for a dialect
        that is not read; for an unknown dialect the error of the config's formats.
        """
        headers = weights.headers(prefix, self._suffixes)
        key = tuple((suffix, info.stored_dtype, info.shape) for suffix, info in headers.items())
        if key in self._unfit:
            layer = self._in_dialect(weights, prefix)
            if layer is not None:
                return layer
        try:
            return self._in_formats(weights, prefix, headers, key)
        except (DtypeError, MissingTensorError, ShapeError, TwoFormatsError) as error:
            if key not in self._chosen and len(self._unfit) < MAX_DESCRIPTIONS:
                self._unfit.add(key)
            layer = self._in_dialect(weights, prefix)
            if layer is None:
                raise error from None
            return layer

    def _in_dialect(self, weights: TensorSource, prefix: str) -> LayerDescription | None:
        """Describe a layer in a dialect missing from the config; None for an unknown dialect."""
        dialect = self.dialects.recognise(weights, prefix) if self.dialects else None
        if isinstance(dialect, UnsupportedFormatError):
            raise dialect
        if dialect is None:
            return None
        describer = self._of_dialects.setdefault(dialect.format, LayerDescriber((dialect.format,)))
        try:
            return replace(describer.describe(weights, prefix), dialect=dialect.note)
        except QloadError:  # the error of the config's own formats is more precise
            return None

    def _in_formats(
        self, weights: TensorSource, prefix: str, headers: Headers, key: HeaderKey
    ) -> LayerDescription:
        """Describe a layer in one of the config's formats."""
        chosen = self._chosen.get(key)
        if chosen is None:
            chosen = choose(weights, prefix, self.formats, headers)
            if len(self._chosen) < MAX_DESCRIPTIONS:
                self._chosen[key] = chosen
        names = LayerNames(weights, prefix, chosen.suffixes)
        facts: dict[str, Tensor] = {}
        for spec in chosen.facts:
            facts[spec.name] = weights.read_fact(names.full(spec.name), spec.role)
        content = _fact_bytes(facts)
        if content is None:
            return describe(names, chosen, headers, facts)
        last = self._last.get(key)
        if last is not None and content == last[0]:
            _, facts, known = last  # the same memory, so that a comparison is immediate
        else:
            kind = key, blake2b(content, digest_size=16).digest()
            equal = self._described.get(kind)
            known = equal or replace(describe(names, chosen, headers, facts), facts={}, names=Names())
            if equal is None and len(self._described) < MAX_DESCRIPTIONS:
                self._described[kind] = known
            if len(self._last) >= MAX_FACT_KINDS:
                self._last.clear()
            if len(content) <= MAX_FACT_BYTES:
                self._last[key] = content, facts, known
        same = known.format, known.specs, known.sizes
        return LayerDescription(
            prefix, *same, facts, known.dtypes, names, known.notes, known.dialect, known.cuts
        )


def _fact_bytes(facts: Mapping[str, Fact]) -> bytes | None:
    """Bytes of all facts; None for a fact on another device than the CPU."""
    pieces: list[bytes | memoryview] = []
    for fact in facts.values():
        if isinstance(fact, np.ndarray):
            pieces.append(fact.tobytes())
        elif fact.device.type != "cpu":
            return None
        else:
            pieces.append(fact.reshape(-1).contiguous().view(torch.uint8).numpy().data)
    return b"".join(pieces)


def _stored_scheme(claimed: ActivationScheme, specs: Sequence[TensorSpec]) -> ActivationScheme:
    """Claimed scheme of inputs, with fields of stored tensors in place of suffixes."""
    suffixes = {suffix: spec.name for spec in specs for suffix in spec.suffixes}
    scale, zeros = suffixes.get(claimed.scale or ""), suffixes.get(claimed.zero_point or "")
    return replace(claimed, scale=scale, zero_point=zeros)


def choose(
    weights: TensorSource, prefix: str, formats: Sequence[ConfiguredFormat], headers: Headers
) -> ChosenFormat:
    """Choose the format with the stored tensors; MissingTensorError or TwoFormatsError."""
    fmt = _choose(weights, prefix, formats, headers)
    suffixes: dict[str, str] = {}
    for spec in fmt.specs:
        stored = list(filter(headers.__contains__, spec.suffixes))
        if len(stored) > 1:
            raise TwoFormatsError(
                named(prefix, stored[0]),
                "stored under two names, which has two readings",
                f"either {' or '.join(stored)}",
                " and ".join(stored),
            )
        suffixes[spec.name] = stored[0] if stored else spec.suffix
    specs = tuple(spec for spec in fmt.specs if not spec.optional or suffixes[spec.name] in headers)
    return ChosenFormat(fmt, suffixes, specs)


def describe(
    names: LayerNames, chosen: ChosenFormat, headers: Headers, facts: Mapping[str, Tensor]
) -> LayerDescription:
    """Describe a layer in a chosen format.

    Raises for contradicting shapes, dtypes and indices, and for an undeclared tensor of `CHANGING`.
    """
    fmt, specs = chosen.format, chosen.specs
    shapes: dict[str, Shape] = {}
    dtypes: dict[str, Dtype] = {}
    for spec in specs:
        info = headers[chosen.suffixes[spec.name]]
        shape, dtypes[spec.name] = info.shape, info.stored_dtype
        if shape == () and spec.is_per_part:
            shape = (1,)
        if 0 in shape and any(axis.dim == PARTS for axis in spec.axes):
            full = names.full(spec.name)
            raise ShapeError(full, "(), or one entry a fused part", shape, names.file(spec.name))
        if len(shape) > 2 and not shapes:
            _check_axes(spec, shape, names)
        shapes[spec.name] = shape
    seen = LayerHeaders(shapes, dtypes, facts, names)
    own = replace(
        fmt,
        config=fmt.config.for_layer(seen),
        activations=fmt.activations and _stored_scheme(fmt.activations, specs),
    )
    specs = tuple(spec for spec in own.specs if spec.name in shapes)
    sizes = seen.sizes(specs, own.config.known())
    _refuse_ignored(fmt, names.prefix, headers)
    return LayerDescription(names.prefix, own, specs, sizes, facts, dtypes, names, own.config.notes(seen))


def _refuse_ignored(fmt: ConfiguredFormat, prefix: str, headers: Headers) -> None:
    """Raise UnsupportedFormatError for a stored tensor of `CHANGING` that the format does not declare."""
    for suffix, remedy in CHANGING.items():
        if suffix in headers and suffix not in fmt.suffixes:
            name, reason = fmt.weight_type.format, f"{named(prefix, suffix)} changes the result of the layer"
            raise UnsupportedFormatError(f"{name} with {suffix}", reason, remedy=remedy)


def _check_axes(spec: TensorSpec, shape: Shape, names: LayerNames) -> None:
    """Raise UnsupportedFormatError for a weight with more axes than its format has: a stack."""
    if len(shape) > max(len(spec.axes), 2) and not names.weights.is_single_layer(names.prefix):
        raise UnsupportedFormatError(
            f"{names.prefix}: {len(shape)} axes",
            f"{names.full(spec.name)} has the shape {list(shape)}: several layers in an unknown layout",
            remedy=f"read it as stored: get_tensor({names.full(spec.name)!r})",
        )


def check_alike(layers: Sequence[LayerDescription]) -> None:
    """MismatchError for layers that cannot be fused: other format, K, tensors, config, inputs or facts."""
    first = layers[0]
    for other in layers[1:]:
        for what, a, b in (
            (
                "parts of a fused layer differ in format",
                first.format.weight_type.format,
                other.format.weight_type.format,
            ),
            ("parts of a fused layer differ in K", first.K, other.K),
            ("parts of a fused layer differ in tensors", list(first.dtypes), list(other.dtypes)),
            (
                "parts of a fused layer differ in config",
                *configs_apart(first.format.config, other.format.config),
            ),
            ("parts of a fused layer quantize inputs apart", *_schemes(first, other)),
            ("parts of a fused layer differ in transforms", first.transforms, other.transforms),
        ):
            if a != b:
                raise _differ(first, other, what, a, b)
        kept = {spec.name for spec in first.specs if not spec.spent}
        for name, dtype in first.dtypes.items():
            if name in kept and dtype != other.dtypes[name]:
                raise _differ(
                    first,
                    other,
                    f"parts of a fused layer differ in the dtype of {name}",
                    dtype,
                    other.dtypes[name],
                )
        shared = {spec.name for spec in first.specs if spec.fact and not spec.spent}
        for name, fact in first.facts.items():
            if name in shared and not torch.equal(fact, other.facts[name]):
                raise _differ(first, other, *_facts_apart(name, fact, other.facts[name]))


def in_one_convention(layers: dict[str, LayerDescription]) -> dict[str, LayerDescription]:
    """Give layers to be fused one zero-point convention, if that changes no value."""
    configs = [layer.format.config for layer in layers.values()]
    if len(configs) < 2 or not any(config.by_values for config in configs):
        return layers
    result = {}
    for prefix, layer in layers.items():
        config = layer.format.config
        for other in configs:
            config = config.like(other)
        changed = config is not layer.format.config
        result[prefix] = replace(layer, format=replace(layer.format, config=config)) if changed else layer
    return result


def _facts_apart(name: str, a: Tensor, b: Tensor) -> tuple[str, Any, Any]:
    """Difference of two facts, with both values: their shapes, or the first row that differs."""
    if a.shape != b.shape:
        return f"parts of a fused layer differ in the shape of {name}", tuple(a.shape), tuple(b.shape)
    row = int((a != b).nonzero()[0, 0])
    return f"parts of a fused layer differ in {name}, from row {row} on", a[row].tolist(), b[row].tolist()


def _choose(
    weights: TensorSource, prefix: str, formats: Sequence[ConfiguredFormat], headers: Headers
) -> ConfiguredFormat:
    """The format with the stored tensors; MissingTensorError or TwoFormatsError.

    Among formats with common suffixes the one with more stored tensors; among equals the one without missing
    tensors, or with the stored dtypes.
    """
    present = {fmt: frozenset(headers).intersection(fmt.suffixes) for fmt in formats}
    stored = [fmt for fmt, suffixes in present.items() if suffixes]
    most = [fmt for fmt in stored if not any(present[fmt] < present[other] for other in stored)]
    if len({present[fmt] for fmt in most}) > 1:
        a, b = most[:2]
        raise TwoFormatsError(
            prefix,
            "stored in two formats at once",
            f"either {a.weight_type.format} or {b.weight_type.format}",
            f"{', '.join(sorted(present[a]))} and {', '.join(sorted(present[b]))}",
            PLAIN_BESIDE if "weight_scale" in present[a] ^ present[b] and "weight" in present[b] else "",
        )
    fitting = [fmt for fmt in most if _has_dtypes(fmt, headers)]
    for fmt in fitting:
        if not _missing(fmt, present[fmt]):
            return fmt
    fmt = (fitting or most or list(formats))[0]
    missing = _missing(fmt, present[fmt])
    if missing:
        names = f"formats  looked for {' and '.join(fmt.weight_type.format for fmt in formats)}"
        raise weights.missing(named(prefix, missing[0].suffix), missing[0].reason if stored else names)
    return fmt


def _missing(fmt: ConfiguredFormat, present: Collection[str]) -> list[TensorSpec]:
    """Declarations of required tensors that are not stored."""
    return [
        spec
        for spec in fmt.specs
        if not spec.optional and not any(suffix in present for suffix in spec.suffixes)
    ]


def _has_dtypes(fmt: ConfiguredFormat, headers: Headers) -> bool:
    """Return whether the stored tensors have dtypes of a format."""
    return all(
        headers[suffix].stored_dtype in spec.dtypes
        for spec in fmt.specs
        for suffix in spec.suffixes
        if suffix in headers
    )


def _differ(first: LayerDescription, other: LayerDescription, what: str, a: Any, b: Any) -> MismatchError:
    return MismatchError(
        other.prefix,
        what,
        f"{_plain(a)} as in {first.prefix}",
        _plain(b),
        "remedy   load them as layers of their own",
    )


def configs_apart(a: Config, b: Config) -> tuple[str, str]:
    """Differing settings of two configs of one format, as text for each."""
    common = fields(a) if type(a) is type(b) else ()
    names = [f.name for f in common if f.compare and getattr(a, f.name) != getattr(b, f.name)]
    one, two = (", ".join(f"{n} = {getattr(config, n)}" for n in names) for config in (a, b))
    return one, two


def _schemes(first: LayerDescription, other: LayerDescription) -> tuple[str, str]:
    """Declared quantization of two layers' inputs, as text; equal apart from values of stored scales."""
    a, b = (layer.format.activations for layer in (first, other))
    if a == b or a is None or b is None or str(a) != str(b):
        return str(a), str(b)
    return repr(a), repr(b)


def _plain(value: Any) -> str:
    return str(value).removeprefix("torch.")
