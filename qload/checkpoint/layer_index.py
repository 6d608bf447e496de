"""The tensors of a checkpoint by layer: name prefixes, suffixes and layer descriptions."""

from collections.abc import Collection, Iterator, Mapping
from functools import cached_property

from qload.detect.signatures import FOREIGN_SUFFIXES
from qload.errors import QloadError
from qload.formats import FORMATS, ROLES, torchao
from qload.formats.unquantized import FLOATS
from qload.loader import LayerDescription
from qload.spec import Role, TensorSpec, is_appended, named
from qload.weights import Weights

SUFFIXES = {
    suffix
    for weight in FORMATS
    for config in (weight.example, *weight.further)
    for spec in weight.tensors(config)
    for suffix in spec.suffixes
} | torchao.ROLES.keys()
DOTTED_SUFFIXES = sorted(
    (suffix for suffix in SUFFIXES | FOREIGN_SUFFIXES if "." in suffix), key=lambda each: (-len(each), each)
)
DOTTED_ENDINGS = tuple(f".{suffix}" for suffix in DOTTED_SUFFIXES)
# Appended to the prefix without a dot.
UNDERSCORE_SUFFIXES = sorted(suffix for suffix in SUFFIXES if is_appended(suffix))


def split_name(name: str, names: Collection[str]) -> tuple[str, str]:
    """Split a name into prefix and suffix: `a.b.weight.absmax` -> `a.b`, `weight.absmax`.

    A suffix of no format splits at the last dot. `names`: all names of the checkpoint. A tensor below another
    one, as `a.weight.x` below `a.weight`, belongs to the layer of that tensor. A name that `named` does not
    restore from its parts is a prefix without a suffix, as layers are looked up by names of `named`.
    """
    prefix, suffix = _split(name, names)
    return (prefix, suffix) if suffix and named(prefix, suffix) == name else (name, "")


def _split(name: str, names: Collection[str]) -> tuple[str, str]:
    rest = ""  # a loop, as names may be nested deeper than the recursion limit
    while True:
        if name.endswith(DOTTED_ENDINGS):
            suffix = next(
                suffix
                for suffix, end in zip(DOTTED_SUFFIXES, DOTTED_ENDINGS, strict=True)
                if name.endswith(end)
            )
            return name[: -len(suffix) - 1], suffix + rest
        parent, dot, last = name.rpartition(".")
        if last in SUFFIXES:
            return parent, last + rest
        joined = next((suffix for suffix in UNDERSCORE_SUFFIXES if last.endswith(suffix)), None)
        if joined:
            return name[: -len(joined)], joined + rest
        if not dot or parent not in names:
            return parent, last + rest
        name, rest = parent, f".{last}{rest}"


class LayerIndex:
    """Index of a `Weights`: tensors by layer prefix. Headers and facts are read once, and no weight.

    `settled`: describe layers by their zero points as well, like loads.
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
        """Prefix -> suffixes of the tensors with this prefix."""
        suffixes: dict[str, list[str]] = {}
        for name in self.names:
            prefix, suffix = split_name(name, self._keys)
            suffixes.setdefault(prefix, []).append(suffix)
        return suffixes

    @cached_property
    def prefixes(self) -> Mapping[str, str]:
        """Tensor name -> its prefix."""
        return {name: prefix for prefix in self.suffixes for name in self.under(prefix)}

    @cached_property
    def layers(self) -> Mapping[str, LayerDescription | QloadError]:
        """Possible layers by prefix: description, or error."""
        return {prefix: self._describe(prefix) for prefix in self.found}

    @cached_property
    def found(self) -> list[str]:
        """Prefixes of all possible layers, by names and dtypes of tensors."""
        settings = frozenset(self.weights.loader.config_tensors)
        possible = (prefix for prefix in self.suffixes if self._is_layer(prefix))
        return [prefix for prefix in possible if not settings or not settings.issuperset(self.under(prefix))]

    @cached_property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Tensor name -> its declaration, for all tensors of readable layers."""
        return {
            layer.names.full(spec.name): spec
            for layer in self.layers.values()
            if not isinstance(layer, QloadError)
            for spec in layer.specs
        }

    def under(self, prefix: str) -> Iterator[str]:
        """Yield the names of the tensors with a prefix."""
        return (named(prefix, suffix) if suffix else prefix for suffix in self.suffixes[prefix])

    def role(self, name: str) -> Role:
        """Role of a tensor: declared by its layer, else inferred from its name."""
        if name in self.specs:
            return self.specs[name].role
        quantized = self.is_quantized(self.prefixes[name])
        return _role_by_name(name) if quantized else Role.FLOAT

    def is_quantized(self, prefix: str) -> bool:
        """Return whether a layer is quantized: it has codes, two tensors of a format, or one of the config's.

        Without a config, a lone `scales` may be any parameter.
        """
        suffixes = self.suffixes[prefix]
        if not self.claimed.isdisjoint(suffixes):
            return True
        parts = [suffix for suffix in suffixes if _role_by_name(suffix) is not Role.FLOAT]
        codes = [named(prefix, suffix) for suffix in parts if _role_by_name(suffix) is Role.WORD]
        return len(parts) > 1 or any(
            self.weights.storage.info(name).stored_dtype not in FLOATS for name in codes
        )

    @cached_property
    def claimed(self) -> frozenset[str]:
        """Suffixes of the loader's formats, without those of plain layers."""
        specs = [spec for fmt in self.weights.loader.formats for spec in fmt.specs]
        return frozenset(
            suffix for spec in specs for suffix in spec.suffixes if _role_by_name(suffix) is not Role.FLOAT
        )

    @cached_property
    def _keys(self) -> Collection[str]:
        return self.weights.storage.keys()

    def _is_layer(self, prefix: str) -> bool:
        if self.is_quantized(prefix) or not FOREIGN_SUFFIXES.isdisjoint(self.suffixes[prefix]):
            return True
        has_weight = "weight" in self.suffixes[prefix]
        return has_weight and len(self.weights.storage.info(named(prefix, "weight")).shape) in (1, 2)

    def _describe(self, prefix: str) -> LayerDescription | QloadError:
        try:
            loader = self.weights.loader
            layer = loader.describe(self.weights, prefix)
            return loader.settle(self.weights, layer) if self.is_settled else layer
        except QloadError as error:
            return error


def _role_by_name(suffix: str) -> Role:
    return ROLES.get(suffix.rpartition(".")[2], Role.FLOAT)
