"""A checkpoint opened for checks: headers, configs, layers and measured values, with all errors collected."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from os import PathLike
from typing import Any, Self, TypeVar

from qload.architecture import Architecture, Inventory, architecture_of
from qload.architecture.config import is_draft, is_usual_class
from qload.configs import Claims, FoundConfig
from qload.detect import (
    check_configs,
    config_notes,
    effective_claims,
    find_configs,
    loader_from_claims,
    read_model_config,
)
from qload.errors import QloadError
from qload.experts import ExpertStacks, with_experts
from qload.listing import Account, Groups, account
from qload.loader import FormatLoader, LayerDescription
from qload.spec import Role, TensorSpec
from qload.storage import (
    CheckpointFiles,
    Header,
    SafetensorsStorage,
    WeightStorage,
    check_index,
    folder_notes,
    locate,
    read_headers,
    snapshot,
)
from qload.verify.report import Finding, finding_of
from qload.verify.values import Values, measure
from qload.weights import Weights

T = TypeVar("T")

# Names of tensors that mean nothing without a weight.
PARAMETER_SUFFIX = re.compile(r"(^|_|\.)(bias|scales?(_inv|_2)?|zeros?(_point)?|shape|g_idx|absmax|SCB)$")
MAX_LAYERS = 1 << 16  # higher counts of a config are ignored


@dataclass
class Checkpoint:
    """A checkpoint as rules see it.

    Attributes
    ----------
    path, location
        Its name in the report, and its path.
    errors
        Reasons why it cannot be read.
    configs, claims, notes
        Config files, claims of the first, and notes for the report.
    is_shard
        True for one file of several.
    settled
        True if layers are described as loads do it, by their values too.
    """

    path: str
    location: str | PathLike[str]
    errors: list[Finding] = field(default_factory=list)
    configs: list[FoundConfig] = field(default_factory=list)
    claims: Claims | None = None
    notes: list[str] = field(default_factory=list)
    is_shard: bool = False
    settled: bool = True
    _storage: WeightStorage | None = field(default=None, init=False, repr=False)
    _weights: Weights | None = field(default=None, init=False, repr=False)

    @classmethod
    def open(cls, path: str | PathLike[str], *, settled: bool = True) -> Self:
        """Read headers and configs of a checkpoint and collect all errors; no contents raise an exception."""
        checkpoint = cls(str(path), path, settled=settled)
        location = checkpoint._try(lambda: snapshot(path))
        if location is None:
            return checkpoint
        checkpoint.path, checkpoint.location = str(location), location
        located = checkpoint._try(lambda: locate(location))
        if located is not None:
            checkpoint.is_shard = located.shard
            try:
                checkpoint._config(location, located, checkpoint._headers(located))
            except BaseException:
                checkpoint.close()
                raise
        return checkpoint

    def close(self) -> None:
        """Close the files."""
        if self._storage is not None:
            self._storage.close()

    @property
    def is_readable(self) -> bool:
        """True if it has weights and no errors; rules run on readable checkpoints only."""
        return self._weights is not None and not self.errors

    @property
    def weights(self) -> Weights:
        """Tensors of a readable checkpoint with their loader."""
        assert self._weights is not None
        return self._weights

    @property
    def loader(self) -> FormatLoader:
        """Loader of the config's method."""
        assert isinstance(self.weights.loader, FormatLoader)
        return self.weights.loader

    @cached_property
    def model_config(self) -> Mapping[str, Any]:
        """The model's config.json; empty without one."""
        return read_model_config(self.location)

    def config_integers(self, key: str) -> Iterator[int]:
        """Yield the integers under a key of config.json, at its top and in its text_config."""
        text = self.model_config.get("text_config")
        for config in (self.model_config, text if isinstance(text, dict) else {}):
            if type(config.get(key)) is int:
                yield config[key]

    @property
    def num_hidden_layers(self) -> int | None:
        """Number of layers by config.json, at its top or in its text_config; None without a valid one."""
        return next(
            (count for count in self.config_integers("num_hidden_layers") if 0 <= count < MAX_LAYERS), None
        )

    @cached_property
    def groups(self) -> Groups:
        """Tensors by layer; each layer is described once."""
        return Groups(self.weights, settled=self.settled)

    @cached_property
    def account(self) -> Account:
        """Explanation of each tensor, and the explained share of the bytes."""
        return account(self.groups)

    @cached_property
    def architecture(self) -> Architecture | None:
        """Tensors of the model by config.json; None for an unknown type of model."""
        return architecture_of(self.model_config)

    @cached_property
    def inventory(self) -> Inventory | None:
        """Stored tensors of its architecture; None for an unknown one, or without a matching layer name."""
        if self.architecture is None:
            return None
        inventory = Inventory(self.architecture, self._present_names())
        listed = any(part.isdecimal() for name in self.names for part in name.split("."))
        return inventory if inventory.layers or not listed else None

    @cached_property
    def is_draft(self) -> bool:
        """True for a draft model, which may share the embedding and head of its target."""
        return is_draft(self.model_config, self.names)

    @cached_property
    def requires_all_tensors(self) -> bool:
        """True if every layer must have all tensors of its table, or of its siblings.

        False for a draft, for a type without a table, and for an unusual class of a type; True for a config
        without a type.
        """
        config = self.model_config
        if self.is_draft:
            return False
        if self.architecture is None or self.inventory is None:
            return not any(isinstance(config.get(key), str) for key in ("model_type", "_class_name"))
        return is_usual_class(config)

    def _present_names(self) -> Iterator[str]:
        """Yield prefixes with more than a bias or scales, and the names of all tensors."""
        for prefix, suffixes in self.suffixes.items():
            if not all(map(PARAMETER_SUFFIX.search, suffixes)):
                yield prefix
        yield from self.names
        storage = self.weights.storage
        if isinstance(storage, ExpertStacks):
            yield from {stack.prefix for stack in storage.stacks if stack.joined}

    @cached_property
    def names(self) -> list[str]:
        """All tensor names, sorted."""
        return self.groups.names

    @property
    def unread(self) -> Mapping[str, str]:
        """Unread tensors with the reason; rules check their presence alone."""
        return self.account.report.unread

    @cached_property
    def readable_names(self) -> list[str]:
        """Names of tensors with shapes and values to check: all except unread ones."""
        unread = self.unread
        return [name for name in self.names if name not in unread]

    @cached_property
    def layers(self) -> Mapping[str, LayerDescription | QloadError]:
        """Prefix -> description of a layer, or the error of the loader."""
        return self.groups.layers

    @cached_property
    def all_layers(self) -> Mapping[str, LayerDescription | QloadError]:
        """Layers of the whole checkpoint; `layers` of a part are some of them."""
        return self.layers

    def layer_of(self, name: str) -> LayerDescription | None:
        """Return the layer of a tensor; None if the layer cannot be described."""
        layer = self.all_layers.get(self.prefixes[name])
        return layer if isinstance(layer, LayerDescription) else None

    def is_codes(self, name: str) -> bool:
        """Return whether a tensor is the codes of a quantized layer, not its scales or zero points."""
        layer = self.layer_of(name)
        if layer is None or layer.format.weight_type.plain:
            return False
        return name == layer.names.full(layer.specs[0].name)

    @property
    def suffixes(self) -> Mapping[str, list[str]]:
        """Prefix -> the suffixes of the names under it."""
        return self.groups.suffixes

    @property
    def prefixes(self) -> Mapping[str, str]:
        """Tensor name -> its prefix."""
        return self.groups.prefixes

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Tensor name -> its declaration, for tensors of described layers."""
        return self.groups.specs

    @cached_property
    def values(self) -> Values:
        """Measurements of one pass over all bytes; `run_rules` distributes the work."""
        return measure(self)

    def role(self, name: str) -> Role:
        """Return the role of a tensor by the declaration of its layer, or by its name."""
        return self.groups.role(name)

    def described(self) -> Iterator[LayerDescription]:
        """Yield the layers that could be described."""
        return (layer for layer in self.layers.values() if not isinstance(layer, QloadError))

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
        first = configs[0] if configs else None
        if self.errors:  # the config can still be wrong, but there is nothing to open
            self._try(lambda: effective_claims(first, None))
            return
        storage = self._open_storage(located, headers)
        if storage is None:
            return
        self.claims = self._try(lambda: effective_claims(first, storage))
        loader = self._try(lambda: loader_from_claims(first, storage))
        if loader is None:
            return
        if self.claims is not None:
            self.notes += self.claims.notes
            self.errors += map(finding_of, check_configs(configs, self.claims, storage))
            self.notes += config_notes(configs, self.claims, storage)
        self._weights = Weights(
            storage, loader=loader.for_rules(), architecture=self.architecture, nonfinite="allow"
        )

    def _open_storage(self, located: CheckpointFiles, headers: Mapping[str, Header]) -> WeightStorage | None:
        """Open the tensors, with stacked experts as one tensor each; None on an error."""
        stored = self._storage = self._try(lambda: SafetensorsStorage(located, headers=headers))
        if stored is None:
            return None
        storage = self._try(lambda: with_experts(stored, self.model_config))
        if isinstance(storage, ExpertStacks) and storage.stacks:
            self.notes.append(storage.note())
        return storage

    def _try(self, step: Callable[[], T]) -> T | None:
        try:
            return step()
        except QloadError as error:
            self._add(finding_of(error))
            return None

    def _add(self, finding: Finding) -> None:
        if finding not in self.errors:
            self.errors.append(finding)
