"""A checkpoint as rules see it: its model's tensors, findings of its errors, and measured values."""

import re
from collections.abc import Iterator, Mapping
from functools import cached_property

from qload.architecture import Inventory
from qload.architecture.architecture import is_usual_class
from qload.architecture.drafts import Draft, draft_of
from qload.checkpoint import Checkpoint
from qload.errors import QloadError
from qload.experts import ExpertStacks
from qload.loader import LayerDescription
from qload.verify.report import Finding, finding_of
from qload.verify.values import Values, measure

# Names of tensors that mean nothing without a weight.
PARAMETER_SUFFIX = re.compile(r"(^|_|\.)(bias|scales?(_inv|_2)?|zeros?(_point)?|shape|g_idx|absmax|SCB)$")
MAX_LAYERS = 1 << 16  # higher counts of a config are ignored


class VerifiedCheckpoint(Checkpoint):
    """A checkpoint for rules, opened with `collect=True`; parts of it have some of its names and layers."""

    @cached_property
    def findings(self) -> tuple[Finding, ...]:
        """Findings of the errors of opening it."""
        return tuple(dict.fromkeys(map(finding_of, self.errors)))

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
    def inventory(self) -> Inventory | None:
        """Stored tensors of its architecture; None for an unknown one, or without a matching layer name."""
        if self.architecture is None:
            return None
        inventory = Inventory(self.architecture, self._present_names())
        listed = any(part.isdecimal() for name in self.names for part in name.split("."))
        return inventory if inventory.layers or not listed else None

    @cached_property
    def draft(self) -> Draft | None:
        """The draft model, which may share the embedding and head of its target; None for another model."""
        return draft_of(self.model_config, self.names)

    @property
    def is_draft(self) -> bool:
        """True for a draft model."""
        return self.draft is not None

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
    def readable_names(self) -> list[str]:
        """Names of tensors with shapes and values to check: all except unread ones."""
        unread = self.unread
        return [name for name in self.names if name not in unread]

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

    @cached_property
    def values(self) -> Values:
        """Measurements of one pass over all bytes; `run_rules` distributes the work."""
        return measure(self)
