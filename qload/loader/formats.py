"""`FormatLoader`, the loader of every format, by declarations and without knowledge of any format."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from types import MappingProxyType
from typing import Any, ClassVar, Self

from qload.errors import ArgumentError, CutError, ExcludedModuleError, check_call, checked
from qload.lazy_torch import Tensor, torch
from qload.loader.base import LoadPlan, Part, Split, WeightsLoader
from qload.loader.description import (
    ConfiguredFormat,
    DialectRecogniser,
    LayerDescriber,
    LayerDescription,
    check_alike,
    in_one_convention,
)
from qload.loader.exclusion import NOTHING_NAMED, Exclusions, NamedModules
from qload.loader.layer_values import LayerDecisions, check_scales
from qload.loader.sharding import (
    Share,
    join_parts,
    keeps_words,
    read_part,
    read_tensor,
    rectangles,
    shares_of,
)
from qload.loader.source import Rectangle, TensorSource
from qload.loader.transforms import LayerTransforms
from qload.spec import Layer, LayerClaims, Weight

NOTHING = Exclusions()
DECLARED = (
    "%s and layers like it: the checkpoint declares quantized inputs, %s; linears quantize x so before each "
    'product, and activations="unquantized" takes x as it comes'
)
log: logging.Logger = logging.getLogger("qload")


class FormatLoader(WeightsLoader):
    """Loads each layer in one of several formats, chosen by its tensors.

    Parameters
    ----------
    formats
        Possible formats of a layer: a type of weight with its config, each.
    exclusions
        Layers that the config excludes; they must not be quantized.

    Attributes
    ----------
    named
        Modules that the config lists by name as quantized: a plain one gets a note.
    transforms
        Transforms of layers when they run; None without any.
    logged
        Logged schemes of inputs; loaders of one checkpoint may share the set.
    """

    _has_exact_shapes: ClassVar[bool] = True

    @checked
    def __init__(self, *formats: ConfiguredFormat, exclusions: Exclusions = NOTHING) -> None:
        self.formats = formats
        self.exclusions = exclusions
        self.named: NamedModules = NOTHING_NAMED
        self.transforms: LayerTransforms | None = None
        self.dialects: DialectRecogniser | None = None
        self._describer: LayerDescriber | None = None
        self._decisions: LayerDecisions | None = None
        self.logged: set[str] = set()
        self.judged = False  # True: rules report contradictions, and loads do not raise them

    def recognise_by(self, dialects: DialectRecogniser) -> None:
        """Identify by `dialects` the layers that do not fit the config."""
        self.dialects, self._describer = dialects, None

    def shape(self, weights: TensorSource, prefix: str) -> tuple[int, int]:
        """(N, K) of the layer stored under a prefix."""
        layer = self.describe(weights, prefix)
        return layer.N, layer.K

    def describe(self, weights: TensorSource, prefix: str) -> LayerDescription:
        """Describe the stored layer `prefix` of `weights` by headers and facts; reads no weight.

        ExcludedModuleError for a quantized layer that the config excludes.
        """
        if type(prefix) is not str or TensorSource not in type(weights).__mro__:
            check_call(FormatLoader.describe, (self, weights, prefix), {})
        describer = self._describer
        if describer is None or describer.formats is not self.formats:  # a twin may have other formats
            describer = self._describer = LayerDescriber(self.formats, self.dialects)
        layer = describer.describe(weights, prefix)
        is_claimed = not layer.format.weight_type.plain and layer.dialect is None
        entry = self.exclusions.entry(prefix) if is_claimed and not self.exclusions.is_empty else None
        if entry is not None:
            raise ExcludedModuleError(
                prefix,
                "left out by the config, and quantized",
                f"plain tensors, as {self.exclusions.reason(entry)}",
                f"{layer.format.weight_type.format}: {', '.join(spec.name for spec in layer.specs)}",
                f"remedy   {self.exclusions.remedy(entry)}",
            )
        layer = self._add_note(layer) if self.named.keys else layer
        return layer if self.transforms is None else self.transforms.add_to(layer)

    def names_alike(self, first: str, other: str) -> bool:
        """Return whether the config treats the layers `first` and `other` alike, by their names."""
        if type(self).describe is not FormatLoader.describe or not self._transforms_alike(first, other):
            return False
        return self._entries(first) == self._entries(other)

    def _transforms_alike(self, first: str, other: str) -> bool:
        """Return whether neither layer has transforms, as those of two layers may differ."""
        return self.transforms is None or not any(map(self.transforms.rules_of, (first, other)))

    def _entries(self, prefix: str) -> tuple[bool, Any]:
        """Entries of the config for a layer: True if excluded, and the key that lists it as quantized."""
        if self.exclusions.is_empty and not self.named.keys:
            return False, None
        excluded = self.exclusions.entry(prefix) is not None
        listed = self.named.entry(prefix) if self.named.keys else None
        return excluded, None if listed is None else listed[1]

    def _add_note(self, layer: LayerDescription) -> LayerDescription:
        """Add a note to a plain layer that the config lists as quantized."""
        if not layer.format.weight_type.plain or "K" not in layer.sizes:
            return layer
        note = self.named.note(layer.prefix)
        if note is None or self.left_out(layer.prefix) is not None:
            return layer
        return replace(layer, notes=(*layer.notes, note))

    def settle(self, weights: TensorSource, layer: LayerDescription) -> LayerDescription:
        """Complete the description of a `layer` of `weights` by its values; every load does this.

        For GPTQ with claims it reads zero points, and codes if zero points are ambiguous.
        """
        if not layer.format.config.by_values or layer.format.claims is None:
            return layer
        source = weights.whole()
        if self._decisions is None or not self._decisions.belongs_to(source):
            self._decisions = LayerDecisions(source, self.describe, every=self.judged)
        return self._decisions.settle(layer)

    def complete(self, weights: TensorSource, layer: LayerDescription) -> LayerDescription:
        """Complete the description of a `layer` of `weights` as loads do; raise its contradiction."""
        return self._check_settled(self.settle(weights, layer))

    def _check_settled(self, layer: LayerDescription) -> LayerDescription:
        """Raise the contradiction of a settled layer, and log its doubts."""
        if self.judged:
            return layer
        if layer.contradiction is not None:
            raise layer.contradiction
        config, scheme = layer.format.config, layer.format.activations
        for kind, text in (("doubt", config.doubt), ("denied", config.denied)):
            if text and self._decisions is not None and self._decisions.is_first(kind):
                log.warning("%s: %s", layer.prefix, text)
        if scheme is not None and str(scheme) not in self.logged:  # once for all layers
            self.logged.add(str(scheme))
            log.info(DECLARED, layer.prefix, scheme)
        return layer

    def claims_of(self, prefix: str) -> LayerClaims | None:
        """Claims of the config about the layer `prefix`, even if it cannot be described."""
        return next((fmt.claims for fmt in self.formats if fmt.claims is not None), None)

    def left_out(self, prefix: str) -> str | None:
        """Reason for which the config excludes the layer `prefix`, with entry and key; None for others."""
        entry = self.exclusions.entry(prefix)
        return None if entry is None else self.exclusions.reason(entry)

    @checked
    def load(
        self,
        weights: TensorSource,
        parts: Sequence[Part],
        split: Split | None,
        *,
        out: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> Weight:
        """Load `parts` of `weights` along `split`, joined along N: checked, then sliced, then read.

        `out`: memory for the weight's tensors, by field. Errors are those of `plan`.
        """
        return FormatLoader.plan(self, weights, parts, split).read(weights, out)

    def plan(self, weights: TensorSource, parts: Sequence[Part], split: Split | None) -> LoadPlan:
        """Plan the load of `parts` of `weights` along `split`: all checks, before any weight is read.

        ArgumentError for a layer in two parts with a scale for each part; MismatchError, ShapeError, CutError
        and the like for contradictions of layers, ranks and formats.
        """
        layers: dict[str, LayerDescription] = {}
        for part in parts:
            if part.prefix not in layers:
                layers[part.prefix] = self.describe(weights, part.prefix)
        twice = len(layers) < len(parts) and any(part.stop is None for part in parts)
        if twice and any(layer.sizes.get("P", 1) > 1 for layer in layers.values()):
            names = ", ".join(part.prefix for part in parts)
            raise ArgumentError("prefixes", "each layer once, as its parts have scales of their own", names)
        for prefix, layer in layers.items():
            layers[prefix] = self._check_settled(self.settle(weights, layer))
        if len(layers) > 1:
            layers = in_one_convention(layers)
            check_alike(list(layers.values()))
        is_whole = split is None or weights.process_group.size() == 1
        try:
            shares = shares_of(weights.process_group, layers, parts, split)
        except CutError:
            run = _joined_run(parts) if is_whole else None
            if run is None or layers[run.prefix].sizes.get("P", 1) > 1:
                raise
            shares = shares_of(weights.process_group, layers, [run], split)  # the run of parts has no cut
        planned = PlannedShares(layers, shares, parts, is_whole)
        return LoadPlan(planned.load, planned.find_reads)

    def for_rules(self) -> Self:
        """The same loader for rules: it does not raise contradictions of values and claims."""
        twin = copy(self)
        twin.judged = True
        return twin

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_decisions": None}  # a copy starts with an empty cache

    def with_config(self, **changes: Any) -> Self:
        """The same loader, its first format's config changed, as `zeros=StoredMinusOneUnmasked()`.

        `changes`: by the config's fields; ArgumentError for a name that is none.
        """
        first, *rest = self.formats
        known = [field.name for field in fields(first.config)]
        if not changes.keys() <= set(known):
            settings = f"settings of {first.weight_type.format}: {', '.join(known)}"
            raise ArgumentError("changes", settings, ", ".join(changes))
        twin = copy(self)
        claims = None if "zeros" in changes else first.claims  # the caller's settings replace the claims
        twin.formats = (replace(first, config=replace(first.config, **changes), claims=claims), *rest)
        return twin

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({', '.join(f'{r.weight_type.format}: {r.config}' for r in self.formats)})"
        )


@dataclass(frozen=True)
class PlannedShares:
    """A load with all checks done: layers by prefix, and this rank's shares.

    `is_whole`: True if every rank reads all of the parts. A share is of one part, or of a run of all parts.
    """

    layers: Mapping[str, LayerDescription]
    shares: Sequence[Share]
    parts: Sequence[Part]
    is_whole: bool

    def find_reads(self) -> list[Rectangle]:
        """List the slices of the load, except facts."""
        return [
            rectangle
            for spec in self.shares[0].layer.specs
            if not spec.fact
            for rectangle in rectangles(spec, self.shares)
        ]

    def load(self, weights: TensorSource, out: Mapping[str, Tensor] = MappingProxyType({})) -> Weight:
        """Read the typed weight, and enter it into the ledger."""
        first, layers = self.shares[0], self.layers
        widths = [(layers[p.prefix].N if p.stop is None else p.stop) - p.start for p in self.parts]
        shared = widths
        if not self.is_whole:
            shared = [share.bounds.n1 - share.bounds.n0 for share in self.shares]
        layer = Layer.unchecked(
            {
                "parts": tuple(shared),
                "K": first.bounds.k1 - first.bounds.k0,
                "whole": (sum(widths), first.layer.K),
                "name": ", ".join(layers),
                "origin": None,
                "activations": first.layer.format.activations,
                "transforms": first.layer.transforms,
            }
        )
        spent: dict[str, Tensor] = {}
        tensors = self._tensors(weights, out, spent)
        if weights.nonfinite == "error":
            check_scales(weights, layers.values(), {**tensors, **spent}, whole=self.is_whole)
        weight = self._weight(layer, tensors)
        for one in layers.values():
            for note in (*one.notes, *([one.dialect] if one.dialect else [])):
                weights.note(f"{one.prefix}: {note}")
        weights.take([one.names.full(spec.name) for one in layers.values() for spec in one.specs])
        return weight

    def _tensors(
        self, weights: TensorSource, out: Mapping[str, Tensor], spent: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """Tensors of the typed weight: sliced, resolved if the format has to, and joined.

        `spent` gets the tensors that are read and not part of the weight, the parts joined.
        """
        specs = self.shares[0].layer.specs
        kept = [spec for spec in specs if not spec.spent]
        tensors: dict[str, Tensor] = {}
        if len(kept) == len(specs):
            for spec in specs:
                tensors[spec.name] = read_tensor(weights, spec, self.shares, out.get(spec.name))
            return tensors
        resolved = []
        for share in self.shares:
            stored = {
                spec.name: read_tensor(weights, spec, [share], None)
                if keeps_words(spec, self.shares)
                else read_part(weights, spec, share)
                for spec in share.layer.specs
            }
            for spec in (spec for spec in share.layer.specs if spec.spent):
                before = [spent[spec.name]] if spec.name in spent else []
                spent[spec.name] = torch.cat([*before, stored[spec.name].reshape(-1)])
            fmt = share.layer.format
            resolved.append(fmt.weight_type.resolve(fmt.config, stored, share.bounds))
        names = {name for tensors in resolved for name in tensors}
        return {
            spec.name: join_parts([tensors[spec.name] for tensors in resolved], spec, self.shares)
            for spec in kept
            if spec.name in names
        }

    def _weight(self, layer: Layer, tensors: Mapping[str, Tensor]) -> Weight:
        """Construct the typed weight; a whole layer without checks of values, which wait for a device."""
        (share, *others), fmt = self.shares, self.shares[0].layer.format
        is_layer = not others and share.bounds.all_inputs and layer.parts == (share.bounds.N,)
        checks_values = fmt.weight_type.__post_init__ is not Weight.__post_init__
        if is_layer and not checks_values and not any(spec.spent for spec in share.layer.specs):
            return fmt.weight_type.unchecked(fmt.config, layer, tensors)
        weight: Weight = fmt.weight_type(config=fmt.config, layer=layer, **tensors)
        return weight


def _joined_run(parts: Sequence[Part]) -> Part | None:
    """One part for a run of neighbouring parts of one layer; None for other parts."""
    first, last = parts[0], parts[-1]
    run = all(one.prefix == other.prefix and one.stop == other.start for one, other in pairwise(parts))
    return Part(first.prefix, first.start, last.stop) if run and len(parts) > 1 else None
