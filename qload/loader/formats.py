"""The one loader that serves every format: it knows declarations, and no format by name."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Self

import torch
from torch import Tensor

from qload.errors import ArgumentError, CutError, ExcludedModuleError, MismatchError, checked
from qload.loader import pieces
from qload.loader.alike import Describer
from qload.loader.base import LoadPlan, Part, Split, WeightsLoader
from qload.loader.cuts import Share, share
from qload.loader.description import (
    ConfiguredFormat,
    DialectRecogniser,
    LayerDescription,
    check_alike,
    in_one_convention,
)
from qload.loader.exclusion import Exclusions
from qload.loader.finite_scales import check_scales, refuses_nonfinite
from qload.loader.layer_values import LayerDecisions, whole_source
from qload.loader.named_modules import NOTHING_NAMED, NamedModules
from qload.loader.source import Rectangle, TensorSource
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
    logged
        Schemes of inputs that were logged; loaders of one checkpoint may share the set.
    """

    @checked
    def __init__(self, *formats: ConfiguredFormat, exclusions: Exclusions = NOTHING) -> None:
        self.formats = formats
        self.exclusions = exclusions
        self.named: NamedModules = NOTHING_NAMED
        self.dialects: DialectRecogniser | None = None
        self._found: Describer | None = None
        self._decisions: LayerDecisions | None = None
        self.logged: set[str] = set()
        self.judged = False  # True: rules report contradictions, and loads do not raise them

    def recognise_by(self, dialects: DialectRecogniser) -> None:
        """Identify by `dialects` the layers that do not fit the config."""
        self.dialects, self._found = dialects, None

    @checked
    def shape(self, weights: TensorSource, prefix: str) -> tuple[int, int]:
        """(N, K) of the layer stored under a prefix."""
        layer = self.describe(weights, prefix)
        return layer.N, layer.K

    @checked
    def describe(self, weights: TensorSource, prefix: str) -> LayerDescription:
        """All that headers and facts tell about the layer `weights` has under `prefix`; reads no weight.

        ExcludedModuleError where the config leaves out what is quantized all the same.
        """
        layer = self._describer().describe(weights, prefix)
        named = not layer.format.weight_type.plain and layer.dialect is None
        entry = self.exclusions.entry(prefix) if named else None
        if entry is not None:
            raise ExcludedModuleError(
                prefix,
                "left out by the config, and quantized",
                f"plain tensors, as {self.exclusions.reason(entry)}",
                f"{layer.format.weight_type.format}: {', '.join(spec.name for spec in layer.specs)}",
                f"remedy   {self.exclusions.remedy(entry)}",
            )
        return self._noted(layer)

    def _noted(self, layer: LayerDescription) -> LayerDescription:
        """Add a note to a plain layer that the config lists as quantized."""
        if not self.named.keys or not layer.format.weight_type.plain or "K" not in layer.sizes:
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
        root = whole_source(weights)
        if self._decisions is None or not self._decisions.belongs_to(root):
            self._decisions = LayerDecisions(root, self.describe, every=self.judged)
        return self._decisions.settle(layer)

    def claims_of(self, prefix: str) -> LayerClaims | None:
        """Claims of the config about the layer `prefix`, even if it cannot be described."""
        return next((fmt.claims for fmt in self.formats if fmt.claims is not None), None)

    def left_out(self, prefix: str) -> str | None:
        """Which entry of which key leaves out the layer `prefix`; None where none does."""
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
        """The parts joined along N, sliced before they are read, checked before they are sliced.

        `out`: where the tensors of fields may be written to, so that the weight holds these.
        ArgumentError where a layer with a scale for each of its parts stands twice; MismatchError,
        ShapeError, CutError and the like where layers, ranks and formats do not go together.
        """
        return self._planned(weights, parts, split).load(weights, out)

    def plan(self, weights: TensorSource, parts: Sequence[Part], split: Split | None) -> LoadPlan:
        """The load of `parts` of `weights` along `split`: all is checked now, and all reads are known."""
        if type(self).load is not FormatLoader.load:  # a subclass that loads otherwise
            return super().plan(weights, parts, split)
        planned = self._planned(weights, parts, split)
        return LoadPlan(planned.reads(), planned.load)

    def _planned(self, weights: TensorSource, parts: Sequence[Part], split: Split | None) -> "_Planned":
        described = {part.prefix: self.describe(weights, part.prefix) for part in parts}
        twice = len(described) < len(parts) and any(part.stop is None for part in parts)
        if twice and any(layer.sizes.get("P", 1) > 1 for layer in described.values()):
            names = ", ".join(part.prefix for part in parts)
            raise ArgumentError("prefixes", "each layer once, as its parts have scales of their own", names)
        layers = in_one_convention(
            {prefix: self.settle(weights, layer) for prefix, layer in described.items()}
        )
        for layer in layers.values():
            self._refuse_contradiction(layer)
            self._log_scheme(layer)
        check_alike(list(layers.values()))
        widths = [(layers[p.prefix].N if p.stop is None else p.stop) - p.start for p in parts]
        alone = split is None or weights.process_group.size() == 1
        try:
            shares = shares_of(weights, layers, parts, split)
        except CutError:
            run = _joined_run(parts) if alone else None
            if run is None or layers[run.prefix].sizes.get("P", 1) > 1:
                raise
            shares = shares_of(weights, layers, [run], split)  # nothing of it is cut
        return _Planned(layers, shares, widths, alone)

    def for_rules(self) -> Self:
        """The same loader for rules: it does not raise contradictions of values and claims."""
        twin = copy(self)
        twin.judged = True
        return twin

    def _refuse_contradiction(self, layer: LayerDescription) -> None:
        if self.judged:
            return
        if layer.contradiction is not None:
            raise layer.contradiction
        config = layer.format.config
        for kind, text in (("doubt", config.doubt), ("denied", config.denied)):
            if text and self._decisions is not None and self._decisions.is_first(kind):
                log.warning("%s: %s", layer.prefix, text)

    def _log_scheme(self, layer: LayerDescription) -> None:
        """Log once, for all layers, how the inputs of a `layer` are quantized."""
        scheme = layer.format.activations
        if scheme is not None and not self.judged and str(scheme) not in self.logged:
            self.logged.add(str(scheme))
            log.info(DECLARED, layer.prefix, scheme)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_decisions": None}  # a copy starts with an empty cache

    def _describer(self) -> Describer:
        """Of these very formats: a twin with other ones has its own."""
        if self._found is None or self._found.formats is not self.formats:
            self._found = Describer(self.formats, self.dialects)
        return self._found

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
class _Planned:
    """Layers that were described, this rank's shares, and the outputs that each part has on all ranks.

    `alone`: whether every rank reads the same. A share is of one part, or then of all neighbouring ones.
    """

    layers: Mapping[str, LayerDescription]
    shares: Sequence[Share]
    widths: Sequence[int]
    alone: bool

    def reads(self) -> list[Rectangle]:
        """What a load asks for."""
        specs = [spec for spec in self.shares[0].layer.specs if not spec.fact]
        return [each for spec in specs for each in pieces.rectangles(spec, self.shares)]

    def load(self, weights: TensorSource, out: Mapping[str, Tensor] = MappingProxyType({})) -> Weight:
        """The typed weight, which is entered into the ledger."""
        first, layers = self.shares[0], self.layers.values()
        here = (one.bounds.n1 - one.bounds.n0 for one in self.shares)
        layer = Layer(
            parts=tuple(self.widths if self.alone else here),
            K=first.bounds.k1 - first.bounds.k0,
            whole=(sum(self.widths), first.layer.K),
            name=", ".join(self.layers),
            activations=first.layer.format.activations,
        )
        spent: dict[str, Tensor] = {}
        tensors = _tensors(weights, self.shares, out, spent)
        if refuses_nonfinite(weights):
            check_scales(weights, layers, {**tensors, **spent}, whole=self.alone)
        weight = self._made(layer, tensors)
        for one in layers:
            for note in (*one.notes, *([one.dialect] if one.dialect else [])):
                weights.note(f"{one.prefix}: {note}")
        weights.take(one.names.full(spec.name) for one in layers for spec in one.specs)
        return weight

    def _made(self, layer: Layer, tensors: Mapping[str, Tensor]) -> Weight:
        """The typed weight. Of a whole layer headers and facts were checked, and no device is waited for."""
        (share, *others), fmt = self.shares, self.shares[0].layer.format
        whole = not others and share.bounds.all_inputs and layer.parts == (share.bounds.N,)
        looks = fmt.weight_type.__post_init__ is not Weight.__post_init__  # at values that are no facts
        if whole and not looks and not any(spec.spent for spec in share.layer.specs):
            return fmt.weight_type.unchecked(fmt.config, layer, tensors)
        made: Weight = fmt.weight_type(config=fmt.config, layer=layer, **tensors)
        return made


def _joined_run(parts: Sequence[Part]) -> Part | None:
    """Neighbouring parts of one layer as one part; None for others."""
    first, last = parts[0], parts[-1]
    run = all(one.prefix == other.prefix and one.stop == other.start for one, other in pairwise(parts))
    return Part(first.prefix, first.start, last.stop) if run and len(parts) > 1 else None


def shares_of(
    weights: TensorSource, layers: Mapping[str, LayerDescription], parts: Sequence[Part], split: Split | None
) -> list[Share]:
    """This rank's share of each part, every cut checked before anything is read."""
    numbers: Counter[str] = Counter()
    shares = []
    for part in parts:
        joined, number = part is not parts[-1], numbers[part.prefix]
        numbers[part.prefix] += 1
        shares.append(
            share(layers[part.prefix], part, split, weights.process_group, joined=joined, number=number)
        )
    for prefix, layer in layers.items():
        stored = layer.sizes.get("P", 1)
        if stored not in (1, numbers[prefix]):
            raise MismatchError(
                prefix,
                "scales of fused parts",
                f"a load in {stored} parts, as there are {stored} scales (get_weights_col_packed)",
                f"{numbers[prefix]} parts",
            )
    return shares


def _tensors(
    weights: TensorSource, shares: Sequence[Share], out: Mapping[str, Tensor], spent: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Every tensor of the typed weight, sliced, resolved where its format has to, and joined.

    `spent`: is given what was read and the weight does not hold, the parts one after another.
    """
    layer = shares[0].layer
    kept = [spec for spec in layer.specs if not spec.spent]
    if len(kept) == len(layer.specs):
        return {spec.name: pieces.read(weights, spec, shares, out.get(spec.name)) for spec in kept}
    resolved = []
    for one in shares:
        raw = {spec.name: pieces.piece(weights, spec, one) for spec in one.layer.specs}
        for spec in (spec for spec in one.layer.specs if spec.spent):
            before = [spent[spec.name]] if spec.name in spent else []
            spent[spec.name] = torch.cat([*before, raw[spec.name].reshape(-1)])
        fmt = one.layer.format
        resolved.append(fmt.weight_type.resolve(fmt.config, raw, one.bounds))
    made = {name for tensors in resolved for name in tensors}
    return {
        spec.name: pieces.join([tensors[spec.name] for tensors in resolved], spec, shares)
        for spec in kept
        if spec.name in made
    }
