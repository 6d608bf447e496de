"""A checkpoint under examination: whatever of it can be understood, and every error on the way."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from os import PathLike
from typing import Any, Self, TypeVar

from qload.architecture import Architecture, Inventory, architecture_of
from qload.architecture.config import is_draft, is_usual_class
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
from qload.experts import ExpertStacks, with_experts
from qload.listing import Account, Groups, account
from qload.listing.report_base import UNSUPPORTED
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

# What a tensor is called that says nothing without a weight.
BESIDE = re.compile(r"(^|_|\.)(bias|scales?(_inv|_2)?|zeros?(_point)?|shape|g_idx|absmax|SCB)$")
MAX_LAYERS = 1 << 16  # a config that counts more is not believed


@dataclass
class Subject:
    """A checkpoint as rules see it. `errors`: reasons why it cannot be opened; then `weights` is None.

    `path`: its name in the report; `place`: its path; `shard`: True for one file of several. `settled`:
    describe layers as loads do, by their values too.
    """

    path: str
    place: str | PathLike[str]
    errors: list[Finding] = field(default_factory=list)
    configs: list[FoundConfig] = field(default_factory=list)
    claims: Claims | None = None
    weights: Weights | None = None
    notes: list[str] = field(default_factory=list)
    shard: bool = False
    settled: bool = True
    _storage: WeightStorage | None = field(default=None, init=False, repr=False)

    @classmethod
    def open(cls, path: str | PathLike[str], *, settled: bool = True) -> Self:
        """Headers and configs of a checkpoint, all errors collected; nothing is raised for what it holds."""
        subject = cls(str(path), path, settled=settled)
        place = subject._try(lambda: snapshot(path))
        if place is None:
            return subject
        subject.path, subject.place = str(place), place
        located = subject._try(lambda: locate(place))
        if located is not None:
            subject.shard = located.shard
            try:
                subject._config(place, located, subject._headers(located))
            except BaseException:
                subject.close()
                raise
        return subject

    def close(self) -> None:
        """Close the files."""
        if self._storage is not None:
            self._storage.close()

    @property
    def loader(self) -> FormatLoader:
        """The loader that the config asks for."""
        assert self.weights is not None  # rules run on readable subjects only
        assert isinstance(self.weights.loader, FormatLoader)
        return self.weights.loader

    @cached_property
    def model_config(self) -> Mapping[str, Any]:
        """The model's config.json, which is read once; empty if there is none."""
        return read_model_config(self.place)

    def counted(self, key: str) -> Iterator[int]:
        """The whole numbers that config.json has under a key, at its top and for its text model."""
        text = self.model_config.get("text_config")
        for place in (self.model_config, text if isinstance(text, dict) else {}):
            if type(place.get(key)) is int:
                yield place[key]

    @property
    def num_hidden_layers(self) -> int | None:
        """What config.json says, at its top or for its text model."""
        return next((count for count in self.counted("num_hidden_layers") if 0 <= count < MAX_LAYERS), None)

    @cached_property
    def groups(self) -> Groups:
        """The tensors by layers, each of which is described once."""
        assert self.weights is not None  # rules run on readable subjects only
        return Groups(self.weights, settled=self.settled)

    @cached_property
    def account(self) -> Account:
        """What explains each tensor, and which share of the bytes."""
        return account(self.groups)

    @cached_property
    def architecture(self) -> Architecture | None:
        """What config.json tells of the model's tensors; None for a type of model that is not known."""
        return architecture_of(self.model_config)

    @cached_property
    def inventory(self) -> Inventory | None:
        """What of its architecture is here; None where that is not known, or no name of a layer is of it."""
        if self.architecture is None:
            return None
        inventory = Inventory(self.architecture, self._held())
        listed = any(part.isdecimal() for name in self.names for part in name.split("."))
        return inventory if inventory.layers or not listed else None

    @cached_property
    def draft(self) -> bool:
        """True for a draft; it may share the embedding and head of its target."""
        return is_draft(self.model_config, self.names)

    @cached_property
    def ordinary(self) -> bool:
        """Whether all layers should have what their table says, or be alike.

        Not so in a draft, and where config.json names a type without a table, or a class that the type does
        not usually have; a config that names none has nothing to differ by.
        """
        config = self.model_config
        if self.draft:
            return False
        if self.architecture is None or self.inventory is None:
            return not any(isinstance(config.get(key), str) for key in ("model_type", "_class_name"))
        return is_usual_class(config)

    def _held(self) -> Iterator[str]:
        """The prefixes under which there is more than a bias or scales, and the names of all tensors."""
        for prefix, suffixes in self.suffixes.items():
            if not all(map(BESIDE.search, suffixes)):
                yield prefix
        yield from self.names
        storage = self.weights.storage if self.weights else None
        if isinstance(storage, ExpertStacks):
            yield from {stack.prefix for stack in storage.stacks if stack.joined}

    @cached_property
    def names(self) -> list[str]:
        """All tensor names, sorted."""
        return self.groups.names

    @property
    def is_unsupported(self) -> bool:
        """True if an unsupported format is the only reason why it cannot be opened."""
        return bool(self.errors) and all(finding.rule == UNSUPPORTED for finding in self.errors)

    @property
    def unread(self) -> Mapping[str, str]:
        """Unread tensors with the reason; rules judge nothing but their presence."""
        return self.account.report.unread

    @cached_property
    def judged(self) -> list[str]:
        """Names of tensors with shapes and values to judge: all but the unread ones."""
        unread = self.unread
        return [name for name in self.names if name not in unread]

    @cached_property
    def layers(self) -> Mapping[str, LayerDescription | QloadError]:
        """Every layer that some format could mean: what it is, or why it is none."""
        return self.groups.layers

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

    @property
    def suffixes(self) -> Mapping[str, list[str]]:
        """prefix -> what the names under it go on with."""
        return self.groups.suffixes

    @property
    def prefixes(self) -> Mapping[str, str]:
        """name -> the prefix that it is stored under."""
        return self.groups.prefixes

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """name -> its declaration, of every tensor of a layer that is what it should be."""
        return self.groups.specs

    @cached_property
    def values(self) -> Values:
        """What one pass over all bytes measures; `judge` shares it out."""
        return measure(self)

    def role(self, name: str) -> Role:
        """What a tensor is for: as its layer declares it, or else as its name tells."""
        return self.groups.role(name)

    def described(self) -> Iterator[LayerDescription]:
        """The layers that are what they should be."""
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
        found = configs[0] if configs else None
        if self.errors:  # the config can still be wrong, but there is nothing to open
            self._try(lambda: settle(found, None))
            return
        storage = self._open_storage(located, headers)
        if storage is None:
            return
        self.claims = self._try(lambda: settle(found, storage))
        loader = self._try(lambda: loader_from_claims(found, storage))
        if loader is None:
            return
        if self.claims is not None:
            self.notes += self.claims.notes
            self.errors += map(finding_of, check_configs(configs, self.claims, storage))
            self.notes += config_notes(configs, self.claims, storage)
        self.weights = Weights(
            storage, loader=loader.for_rules(), architecture=self.architecture, nonfinite="allow"
        )

    def _open_storage(self, located: CheckpointFiles, headers: Mapping[str, Header]) -> WeightStorage | None:
        """The tensors, those of each expert by themselves; None where two tensors hold the same."""
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

    def _add(self, found: Finding) -> None:
        if found not in self.errors:
            self.errors.append(found)
