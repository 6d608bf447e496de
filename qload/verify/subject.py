"""A checkpoint under examination: whatever of it can be understood, and every error on the way."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from os import PathLike
from typing import Self, TypeVar

from qload.detect import (
    Claims,
    FoundConfig,
    check_configs,
    config_notes,
    find_configs,
    loader_from_claims,
    read_model_config,
    settle,
)
from qload.errors import QloadError
from qload.formats import ROLES
from qload.formats.unquantized import FLOATS
from qload.loader import FormatLoader, LayerDescription
from qload.spec import Role, TensorSpec, named
from qload.storage import (
    CheckpointFiles,
    Header,
    SafetensorsStorage,
    check_index,
    folder_notes,
    locate,
    read_headers,
)
from qload.verify.names import split_name
from qload.verify.report import Finding, finding_of
from qload.verify.values import Values, measure
from qload.weights import Weights

T = TypeVar("T")

MAX_LAYERS = 1 << 16  # a config that counts more is not believed


@dataclass
class Subject:
    """What the rules look at. `errors`: why it cannot be read further; then there are no `weights`."""

    path: str
    errors: list[Finding] = field(default_factory=list)
    configs: list[FoundConfig] = field(default_factory=list)
    claims: Claims | None = None
    weights: Weights | None = None
    notes: list[str] = field(default_factory=list)

    @classmethod
    def open(cls, path: str | PathLike[str]) -> Self:
        """Headers and configs of a checkpoint, all errors collected; nothing is raised for what it holds."""
        subject = cls(str(path))
        located = subject._try(lambda: locate(path))
        if located is not None:
            subject._config(path, located, subject._headers(located))
        return subject

    def close(self) -> None:
        """Close the files."""
        if self.weights is not None:
            self.weights.storage.close()

    @property
    def loader(self) -> FormatLoader:
        """The loader that the config asks for."""
        assert self.weights is not None  # rules run on readable subjects only
        assert isinstance(self.weights.loader, FormatLoader)
        return self.weights.loader

    @property
    def num_hidden_layers(self) -> int | None:
        """What config.json says, at its top or for its text model."""
        config = read_model_config(self.path)
        text = config.get("text_config")
        places = [config, text if isinstance(text, dict) else {}]
        claimed = [place.get("num_hidden_layers") for place in places]
        return next((count for count in claimed if type(count) is int and 0 <= count < MAX_LAYERS), None)

    @cached_property
    def names(self) -> list[str]:
        """All tensor names, sorted."""
        assert self.weights is not None
        return sorted(self.weights.storage.keys())

    @cached_property
    def suffixes(self) -> Mapping[str, list[str]]:
        """prefix -> what the names under it go on with."""
        assert self.weights is not None
        keys = self.weights.storage.keys()
        found: dict[str, list[str]] = {}
        for name in self.names:
            prefix, suffix = split_name(name, keys)
            found.setdefault(prefix, []).append(suffix)
        return found

    @cached_property
    def prefixes(self) -> Mapping[str, str]:
        """name -> the prefix that it is stored under."""
        return {
            named(prefix, suffix) if suffix else prefix: prefix
            for prefix, suffixes in self.suffixes.items()
            for suffix in suffixes
        }

    @cached_property
    def layers(self) -> Mapping[str, LayerDescription | QloadError]:
        """Every layer that some format could mean: what it is, or why it is none."""
        return {prefix: self._describe(prefix) for prefix in self.suffixes if self._is_layer(prefix)}

    @cached_property
    def all_layers(self) -> Mapping[str, LayerDescription | QloadError]:
        """The layers of the whole checkpoint, of which `layers` of a run are some."""
        return self.layers

    def layer_of(self, name: str) -> LayerDescription | None:
        """The layer that a tensor belongs to, if it is what it should be."""
        layer = self.all_layers.get(self.prefixes[name])
        return layer if isinstance(layer, LayerDescription) else None

    def holds_codes(self, name: str) -> bool:
        """Whether a tensor is what its quantized layer is about, and no scale or zero point beside it."""
        layer = self.layer_of(name)
        if layer is None or layer.format.weight_type.plain:
            return False
        return name == layer.names.full(layer.specs[0].name)

    @cached_property
    def specs(self) -> Mapping[str, TensorSpec]:
        """name -> its declaration, of every tensor of a layer that is what it should be."""
        return {layer.names.full(spec.name): spec for layer in self.described() for spec in layer.specs}

    @cached_property
    def values(self) -> Values:
        """What one pass over all bytes measures; `judge` shares it out."""
        return measure(self)

    def role(self, name: str) -> Role:
        """What a tensor is for: as its layer declares it, or else as its name tells."""
        if name in self.specs:
            return self.specs[name].role
        quantized = self.is_quantized(self.prefixes[name])
        return self._guess(name) if quantized else Role.FLOAT

    def described(self) -> Iterator[LayerDescription]:
        """The layers that are what they should be."""
        return (layer for layer in self.layers.values() if not isinstance(layer, QloadError))

    def is_quantized(self, prefix: str) -> bool:
        """A quantized layer has codes, or at least two of its tensors, or one that the config asks for.

        Where no config does, a lone `scales` is any parameter.
        """
        assert self.weights is not None
        suffixes = self.suffixes[prefix]
        if not self.claimed.isdisjoint(suffixes):
            return True
        parts = [suffix for suffix in suffixes if self._guess(suffix) is not Role.FLOAT]
        codes = [named(prefix, suffix) for suffix in parts if self._guess(suffix) is Role.WORD]
        return len(parts) > 1 or any(self.weights.info(name).dtype not in FLOATS for name in codes)

    @cached_property
    def claimed(self) -> frozenset[str]:
        """The suffixes of the formats that the config claims, but for those that plain layers have too."""
        specs = [spec for fmt in (self.claims.formats if self.claims else ()) for spec in fmt.specs()]
        return frozenset(
            suffix for spec in specs for suffix in spec.suffixes if self._guess(suffix) is not Role.FLOAT
        )

    @staticmethod
    def _guess(suffix: str) -> Role:
        return ROLES.get(suffix.rpartition(".")[2], Role.FLOAT)

    def _is_layer(self, prefix: str) -> bool:
        if self.is_quantized(prefix):
            return True
        assert self.weights is not None
        held = "weight" in self.suffixes[prefix]
        return held and len(self.weights.info(named(prefix, "weight")).shape) in (1, 2)

    def _describe(self, prefix: str) -> LayerDescription | QloadError:
        assert self.weights is not None
        try:
            return self.loader.describe(self.weights, prefix)
        except QloadError as error:
            return error

    def _headers(self, located: CheckpointFiles) -> Mapping[str, Header]:
        headers: dict[str, Header] = {}
        for file, header in read_headers(located.files).items():
            if isinstance(header, QloadError):
                self._add(finding_of(header))
            else:
                headers[file] = header
        if not self.errors:
            self.errors += [finding_of(error) for error in check_index(located, headers)]
        if not self.errors:
            self.notes += folder_notes(located, headers)
        return headers

    def _config(
        self, path: str | PathLike[str], located: CheckpointFiles, headers: Mapping[str, Header]
    ) -> None:
        configs = self._try(lambda: find_configs(path))
        if configs is None:
            return
        self.configs = configs
        found = configs[0] if configs else None
        if self.errors:  # the config can still be wrong, but there is nothing to open
            self._try(lambda: settle(found, None))
            return
        storage = self._try(lambda: SafetensorsStorage(located, headers=headers))
        if storage is None:
            return
        self.claims = self._try(lambda: settle(found, storage))
        loader = self._try(lambda: loader_from_claims(found, storage))
        if loader is None:
            storage.close()
            return
        if self.claims is not None:
            self.errors += map(finding_of, check_configs(configs, self.claims, storage))
            self.notes += config_notes(configs, self.claims, storage)
        self.weights = Weights(storage, loader=loader)

    def _try(self, step: Callable[[], T]) -> T | None:
        try:
            return step()
        except QloadError as error:
            self._add(finding_of(error))
            return None

    def _add(self, found: Finding) -> None:
        if found not in self.errors:
            self.errors.append(found)
