"""The tensors of a checkpoint by layer: name prefixes, suffixes and layer descriptions."""

from collections.abc import Collection, Iterator, Mapping
from functools import cached_property

from qload.detect.signatures import FOREIGN_SUFFIXES
from qload.errors import QloadError
from qload.formats import FORMATS, ROLES
from qload.formats.unquantized import FLOATS
from qload.loader import LayerDescription
from qload.spec import Role, TensorSpec, named
from qload.weights import Weights

SUFFIXES = {
    suffix for weight in FORMATS for spec in weight.tensors(weight.example) for suffix in spec.suffixes
}
DOTTED_SUFFIXES = sorted(
    (suffix for suffix in SUFFIXES | FOREIGN_SUFFIXES if "." in suffix), key=len, reverse=True
)
DOTTED_ENDINGS = tuple(f".{suffix}" for suffix in DOTTED_SUFFIXES)
UNDERSCORE_SUFFIXES = [suffix for suffix in SUFFIXES if suffix.startswith("_")]  # which go on from the prefix


def split_name(name: str, names: Collection[str]) -> tuple[str, str]:
    """`a.b.weight.absmax` -> `a.b`, `weight.absmax`; what no format knows parts at its last dot.

    `names`: all of the checkpoint. What stands under another tensor, as `a.weight.x` beside `a.weight`,
    belongs to that tensor's layer. A name that is not what `named` makes of its parts has no parts: a layer
    is looked up under the names that `named` makes. It is its own prefix.
    """
    prefix, suffix = _split(name, names)
    return (prefix, suffix) if suffix and named(prefix, suffix) == name else (name, "")


def _split(name: str, names: Collection[str]) -> tuple[str, str]:
    beyond = ""  # a loop, as names may be nested deeper than calls may
    while True:
        if name.endswith(DOTTED_ENDINGS):
            suffix = next(
                suffix
                for suffix, end in zip(DOTTED_SUFFIXES, DOTTED_ENDINGS, strict=True)
                if name.endswith(end)
            )
            return name[: -len(suffix) - 1], suffix + beyond
        parent, dot, last = name.rpartition(".")
        if last in SUFFIXES:
            return parent, last + beyond
        joined = next((suffix for suffix in UNDERSCORE_SUFFIXES if last.endswith(suffix)), None)
        if joined:
            return name[: -len(joined)], joined + beyond
        if not dot or parent not in names:
            return parent, last + beyond
        name, beyond = parent, f".{last}{beyond}"


class Groups:
    """Tensors of a `Weights` by the prefixes of layers; headers and facts are read once, and no weight.

    `settled`: describe layers as loads do, by their zero points too.
    """

    def __init__(self, weights: Weights, *, settled: bool = False) -> None:
        self.weights: Weights = weights
        self.is_settled = settled

    @cached_property
    def names(self) -> list[str]:
        """All tensor names, sorted."""
        return sorted(self._keys)

    @cached_property
    def suffixes(self) -> Mapping[str, list[str]]:
        """prefix -> what the names under it go on with."""
        found: dict[str, list[str]] = {}
        for name in self.names:
            prefix, suffix = split_name(name, self._keys)
            found.setdefault(prefix, []).append(suffix)
        return found

    @cached_property
    def prefixes(self) -> Mapping[str, str]:
        """name -> the prefix that it is stored under."""
        return {name: prefix for prefix in self.suffixes for name in self.under(prefix)}

    @cached_property
    def layers(self) -> Mapping[str, LayerDescription | QloadError]:
        """Every layer that some format could mean: what it is, or why it is none."""
        return {prefix: self._describe(prefix) for prefix in self.found}

    @cached_property
    def found(self) -> list[str]:
        """The prefix of every layer that some format could mean, told by names and dtypes."""
        return [prefix for prefix in self.suffixes if self._is_layer(prefix)]

    @cached_property
    def specs(self) -> Mapping[str, TensorSpec]:
        """name -> its declaration, of every tensor of a layer that is what it should be."""
        return {
            layer.names.full(spec.name): spec
            for layer in self.layers.values()
            if not isinstance(layer, QloadError)
            for spec in layer.specs
        }

    def under(self, prefix: str) -> Iterator[str]:
        """The names of the tensors that are stored under a prefix."""
        return (named(prefix, suffix) if suffix else prefix for suffix in self.suffixes[prefix])

    def role(self, name: str) -> Role:
        """What a tensor is for: as its layer declares it, or else as its name tells."""
        if name in self.specs:
            return self.specs[name].role
        quantized = self.is_quantized(self.prefixes[name])
        return _role_by_name(name) if quantized else Role.FLOAT

    def is_quantized(self, prefix: str) -> bool:
        """A quantized layer has codes, or at least two of its tensors, or one that the config asks for.

        Where no config does, a lone `scales` is any parameter.
        """
        suffixes = self.suffixes[prefix]
        if not self.claimed.isdisjoint(suffixes):
            return True
        parts = [suffix for suffix in suffixes if _role_by_name(suffix) is not Role.FLOAT]
        codes = [named(prefix, suffix) for suffix in parts if _role_by_name(suffix) is Role.WORD]
        return len(parts) > 1 or any(self.weights.storage.info(name).dtype not in FLOATS for name in codes)

    @cached_property
    def claimed(self) -> frozenset[str]:
        """The suffixes of the formats that the loader reads, but for those that plain layers have too."""
        specs = [spec for fmt in self.weights.loader.formats for spec in fmt.specs()]
        return frozenset(
            suffix for spec in specs for suffix in spec.suffixes if _role_by_name(suffix) is not Role.FLOAT
        )

    @cached_property
    def _keys(self) -> Collection[str]:
        return self.weights.storage.keys()

    def _is_layer(self, prefix: str) -> bool:
        if self.is_quantized(prefix) or not FOREIGN_SUFFIXES.isdisjoint(self.suffixes[prefix]):
            return True
        held = "weight" in self.suffixes[prefix]
        return held and len(self.weights.storage.info(named(prefix, "weight")).shape) in (1, 2)

    def _describe(self, prefix: str) -> LayerDescription | QloadError:
        try:
            loader = self.weights.loader
            layer = loader.describe(self.weights, prefix)
            return loader.settle(self.weights, layer) if self.is_settled else layer
        except QloadError as error:
            return error


def _role_by_name(suffix: str) -> Role:
    return ROLES.get(suffix.rpartition(".")[2], Role.FLOAT)
