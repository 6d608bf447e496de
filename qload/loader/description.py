"""What a layer is, from headers and facts alone: its format, sizes and declaration, all checked."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from qload.errors import MismatchError, QloadError, ShapeError, TwoFormatsError, UnsupportedFormatError
from qload.loader.source import TensorSource
from qload.spec import (
    PARTS,
    ActivationScheme,
    Config,
    LayerClaims,
    LayerHeaders,
    Names,
    Shape,
    TensorSpec,
    Weight,
    named,
)
from qload.storage import TensorInfo

PLAIN_BESIDE = (
    "remedy   remove the tensors of the other format; or, if compressed-tensors saved the model frozen, not "
    "compressed, set quantization_status to frozen"
)


@dataclass(frozen=True)
class ConfiguredFormat:
    """A format with its config, and the declared quantization of its layers' inputs.

    Of a described layer, the names in `activations` are its fields. `claims`: claims of the checkpoint's
    config about layers of this format; None without claims.
    """

    weight_type: type[Weight]
    config: Config
    activations: ActivationScheme | None = field(default=None, compare=False)  # which changes no weight
    claims: LayerClaims | None = field(default=None, compare=False, repr=False)  # to check, not to trust

    def specs(self) -> tuple[TensorSpec, ...]:
        """The declaration before any layer was looked at."""
        return self._specs

    @cached_property
    def _specs(self) -> tuple[TensorSpec, ...]:
        return self.weight_type.tensors(self.config)


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
    """The format that a layer is stored in, the suffix of each of its fields, and what of it is there."""

    format: ConfiguredFormat
    suffixes: Mapping[str, str]
    specs: tuple[TensorSpec, ...]


@dataclass(frozen=True)
class LayerNames(Names):
    """A layer's names in messages: prefix and on-disk suffix, and the file."""

    weights: TensorSource
    prefix: str
    suffixes: Mapping[str, str]

    def full(self, field: str) -> str:
        """`qweight` -> `layers.0.q_proj.qweight`."""
        return named(self.prefix, self.suffixes[field])

    def file(self, field: str) -> str | None:
        """The file whose header lists it."""
        return self.weights.info(self.full(field)).file


@dataclass(frozen=True)
class LayerDescription:
    """A layer before any of its weights is read."""

    prefix: str
    format: ConfiguredFormat  # with the layer's own config, and the scales of inputs that it stores
    specs: tuple[TensorSpec, ...]  # of the tensors that are there
    sizes: Mapping[str, int]
    facts: Mapping[str, Tensor]
    dtypes: Mapping[str, torch.dtype]
    names: Names
    notes: Sequence[str] = ()  # where a claim disagreed without harm
    dialect: str | None = None  # a note on a format identified by tensors
    cuts: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)  # known of layers like it
    contradiction: QloadError | None = field(default=None, compare=False)  # raised by loads

    @property
    def N(self) -> int:
        """Outputs of the whole layer."""
        return self.sizes["N"]

    @property
    def K(self) -> int:
        """Inputs of the whole layer; 1 for a vector."""
        return self.sizes.get("K", 1)


def _stored_scheme(claimed: ActivationScheme | None, specs: Sequence[TensorSpec]) -> ActivationScheme | None:
    """A claim, whose suffixes are fields from here on; None where nothing is stored."""
    if claimed is None:
        return None
    suffixes = {suffix: spec.name for spec in specs for suffix in spec.suffixes}
    scale, zeros = suffixes.get(claimed.scale or ""), suffixes.get(claimed.zero_point or "")
    return replace(claimed, scale=scale, zero_point=zeros)


def choose(weights: TensorSource, prefix: str, formats: Sequence[ConfiguredFormat]) -> ChosenFormat:
    """Tell the format by the tensors; MissingTensorError or TwoFormatsError."""
    fmt = _choose(weights, prefix, formats)
    suffixes = {spec.name: _one_suffix(weights, prefix, spec) for spec in fmt.specs()}
    specs = tuple(
        spec
        for spec in fmt.specs()
        if not spec.optional or weights.has_tensor(named(prefix, suffixes[spec.name]))
    )
    return ChosenFormat(fmt, suffixes, specs)


def describe(
    weights: TensorSource, prefix: str, chosen: ChosenFormat, facts: Mapping[str, Tensor]
) -> LayerDescription:
    """What a layer of a format is; checks shapes, dtypes and indices."""
    fmt, specs = chosen.format, chosen.specs
    names = LayerNames(weights, prefix, chosen.suffixes)
    infos = {spec.name: weights.info(names.full(spec.name)) for spec in specs}
    _check_axes(prefix, specs[0], infos, names)
    seen = LayerHeaders(
        shapes={spec.name: _shape(spec, infos[spec.name].shape) for spec in specs},
        dtypes={name: info.dtype for name, info in infos.items()},
        facts=facts,
        names=names,
    )
    for spec in specs:
        if 0 in seen.shapes[spec.name] and any(axis.dim == PARTS for axis in spec.axes):
            full, got = names.full(spec.name), seen.shapes[spec.name]
            raise ShapeError(full, "(), or one entry a fused part", got, names.file(spec.name))
    own = replace(fmt, config=fmt.config.for_layer(seen), activations=_stored_scheme(fmt.activations, specs))
    specs = tuple(spec for spec in own.specs() if spec.name in infos)
    sizes = seen.sizes(specs, own.config.known())
    return LayerDescription(prefix, own, specs, sizes, facts, seen.dtypes, names, own.config.notes(seen))


def _is_dense(weights: TensorSource, prefix: str) -> bool:
    """Return whether the model's architecture has a single layer of this name, outside of experts."""
    architecture: Any = getattr(weights, "architecture", None)
    place = None if architecture is None else architecture.find(prefix)
    return place is not None and place.expert is None


def _check_axes(prefix: str, spec: TensorSpec, infos: Mapping[str, TensorInfo], names: LayerNames) -> None:
    """Raise UnsupportedFormatError for a weight with more axes than its format has: a stack."""
    shape = infos[spec.name].shape
    if len(shape) > max(len(spec.axes), 2) and not _is_dense(names.weights, prefix):
        raise UnsupportedFormatError(
            f"{prefix}: {len(shape)} axes",
            f"{names.full(spec.name)} has the shape {list(shape)}: several layers in an unknown layout",
            remedy=f"read it as stored: get_tensor({names.full(spec.name)!r})",
        )


def _suffixes(weights: TensorSource, prefix: str, spec: TensorSpec) -> list[str]:
    """Which of its names a tensor is stored under."""
    return [suffix for suffix in spec.suffixes if weights.has_tensor(named(prefix, suffix))]


def _one_suffix(weights: TensorSource, prefix: str, spec: TensorSpec) -> str:
    """The name that a tensor is stored under; the first where it is not stored at all; TwoFormatsError."""
    found = _suffixes(weights, prefix, spec)
    if len(found) > 1:
        raise TwoFormatsError(
            named(prefix, found[0]),
            "stored under two names, which has two readings",
            f"either {' or '.join(found)}",
            " and ".join(found),
        )
    return found[0] if found else spec.suffix


def _shape(spec: TensorSpec, stored: Shape) -> Shape:
    """() is (1,) where one entry a part is declared."""
    return (1,) if stored == () and [axis.dim for axis in spec.axes] == [PARTS] else stored


def check_alike(layers: Sequence[LayerDescription]) -> None:
    """Layers that are to be fused agree in all that their join cannot carry, or MismatchError."""
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
        for name, fact in first.facts.items():
            if name in kept and not torch.equal(fact, other.facts[name]):
                raise _differ(first, other, *_facts_apart(name, fact, other.facts[name]))


def in_one_convention(layers: Mapping[str, LayerDescription]) -> Mapping[str, LayerDescription]:
    """Give layers to be fused one zero-point convention, if that changes no value."""
    configs = [layer.format.config for layer in layers.values()]
    if len(configs) < 2 or not any(config.by_values for config in configs):
        return layers
    made = {}
    for prefix, layer in layers.items():
        config = layer.format.config
        for other in configs:
            config = config.like(other)
        changed = config is not layer.format.config
        made[prefix] = replace(layer, format=replace(layer.format, config=config)) if changed else layer
    return made


def _facts_apart(name: str, a: Tensor, b: Tensor) -> tuple[str, Any, Any]:
    """What two facts that are not equal do not agree in: their lengths, or the first entry that differs."""
    if a.shape != b.shape:
        return f"parts of a fused layer differ in the shape of {name}", tuple(a.shape), tuple(b.shape)
    row = int((a != b).nonzero()[0, 0])
    return f"parts of a fused layer differ in {name}, from row {row} on", a[row].tolist(), b[row].tolist()


def _choose(weights: TensorSource, prefix: str, formats: Sequence[ConfiguredFormat]) -> ConfiguredFormat:
    """The format whose tensors a layer has, or MissingTensorError, or TwoFormatsError.

    Of formats that share names the one that explains more of what is there; of those that explain the
    same, the one that lacks nothing, or whose dtypes these are.
    """
    present = {
        fmt: frozenset(
            suffix
            for spec in fmt.specs()
            for suffix in spec.suffixes
            if weights.has_tensor(named(prefix, suffix))
        )
        for fmt in formats
    }
    found = [fmt for fmt, suffixes in present.items() if suffixes]
    most = [fmt for fmt in found if not any(present[fmt] < present[other] for other in found)]
    if len({present[fmt] for fmt in most}) > 1:
        a, b = most[:2]
        raise TwoFormatsError(
            prefix,
            "stored in two formats at once",
            f"either {a.weight_type.format} or {b.weight_type.format}",
            f"{', '.join(sorted(present[a]))} and {', '.join(sorted(present[b]))}",
            PLAIN_BESIDE if "weight_scale" in present[a] ^ present[b] and "weight" in present[b] else "",
        )
    fitting = [fmt for fmt in most if _fits(weights, prefix, fmt)]
    fmt = next(
        (fmt for fmt in fitting if not _missing(fmt, present[fmt])),
        (fitting or most or list(formats))[0],
    )
    missing = _missing(fmt, present.get(fmt, frozenset()))
    if missing:
        looked = f"formats  looked for {' and '.join(fmt.weight_type.format for fmt in formats)}"
        raise weights.missing(named(prefix, missing[0].suffix), missing[0].reason if found else looked)
    return fmt


def _missing(fmt: ConfiguredFormat, present: Collection[str]) -> list[TensorSpec]:
    """What a layer of this format has to have, and these are not."""
    return [
        spec
        for spec in fmt.specs()
        if not spec.optional and not any(suffix in present for suffix in spec.suffixes)
    ]


def _fits(weights: TensorSource, prefix: str, fmt: ConfiguredFormat) -> bool:
    """Whether the tensors that are there have dtypes of this format."""
    return all(
        weights.info(named(prefix, suffix)).dtype in spec.dtypes
        for spec in fmt.specs()
        for suffix in _suffixes(weights, prefix, spec)
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
    """What two configs of one format do not agree in."""
    alike = fields(a) if type(a) is type(b) else ()
    names = [f.name for f in alike if f.compare and getattr(a, f.name) != getattr(b, f.name)]
    one, two = (", ".join(f"{n} = {getattr(config, n)}" for n in names) for config in (a, b))
    return one, two


def _schemes(first: LayerDescription, other: LayerDescription) -> tuple[str, str]:
    """What two layers declare of their inputs: alike but for the values of stored scales, which go along."""
    a, b = (layer.format.activations for layer in (first, other))
    if a == b or a is None or b is None or str(a) != str(b):
        return str(a), str(b)
    return repr(a), repr(b)


def _plain(value: Any) -> str:
    return str(value).removeprefix("torch.")
