"""How the tensors of a checkpoint group into layers, and what each of these groups is."""

from collections.abc import Collection, Iterator, Mapping
from functools import cached_property

from qload.detect.signatures import FOREIGN_SUFFIXES
from qload.errors import QloadError
from qload.formats import ROLES
from qload.formats.unquantized import FLOATS
from qload.listing.names import split_name
from qload.loader import LayerDescription
from qload.spec import Role, TensorSpec, named
from qload.weights import Weights


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
        return _guess(name) if quantized else Role.FLOAT

    def is_quantized(self, prefix: str) -> bool:
        """A quantized layer has codes, or at least two of its tensors, or one that the config asks for.

        Where no config does, a lone `scales` is any parameter.
        """
        suffixes = self.suffixes[prefix]
        if not self.claimed.isdisjoint(suffixes):
            return True
        parts = [suffix for suffix in suffixes if _guess(suffix) is not Role.FLOAT]
        codes = [named(prefix, suffix) for suffix in parts if _guess(suffix) is Role.WORD]
        return len(parts) > 1 or any(self.weights.storage.info(name).dtype not in FLOATS for name in codes)

    @cached_property
    def claimed(self) -> frozenset[str]:
        """The suffixes of the formats that the loader reads, but for those that plain layers have too."""
        specs = [spec for fmt in self.weights.loader.formats for spec in fmt.specs()]
        return frozenset(
            suffix for spec in specs for suffix in spec.suffixes if _guess(suffix) is not Role.FLOAT
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


def _guess(suffix: str) -> Role:
    return ROLES.get(suffix.rpartition(".")[2], Role.FLOAT)
