"""Rules of complete layers: errors of the loader, empty or incomplete layers, biases, claims of the config.

The loader's checks cover shapes, dtypes and indices; `verify` applies them to all layers and keeps each
error.

`missing-sibling` compares `model.layers.0`, `model.layers.1`, ... and the experts of a layer by the tensor
names under them. Layers of a hybrid model lawfully differ, but then each has tensors without a counterpart,
or several layers are equal; a single layer with strictly fewer tensors than others has lost some.

Loaders believe the tensors. A program that believes the config reads bytes of e5m2 as e4m3, or floating point
scales as codes. A checkpoint that names a method and contains plain tensors alone has lost its quantized
layers without another contradiction.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from qload.architecture.drafts import PREDICTING
from qload.architecture.names import block_of, is_adapter, is_block_list
from qload.detect import read_claims
from qload.errors import QloadError, UnsupportedFormatError
from qload.formats import BNB4Config, Fp8Config
from qload.formats.unquantized import FLOATS
from qload.loader import LayerDescription
from qload.spec import Config, LayerClaims, Role, is_appended, named
from qload.storage.checkpoint_files import INDEX
from qload.verify.checkpoint import VerifiedCheckpoint
from qload.verify.report import Contradiction, Finding, LayerContradiction, finding_of
from qload.verify.rules.rule import Rule, claims_of

Names = frozenset[str]


def check_layers(rule: Rule, checkpoint: VerifiedCheckpoint) -> Iterator[Finding]:
    """Report every layer that cannot be loaded, with the loader's error; unread layers are skipped."""
    for prefix, layer in checkpoint.layers.items():
        if isinstance(layer, QloadError) and not isinstance(layer, UnsupportedFormatError):
            finding = finding_of(layer)
            stored = _stored_groups(checkpoint, prefix) if finding.rule == "tensor-shape" else None
            claims = claims_of(checkpoint, prefix)
            if stored is None or claims is None or checkpoint.claims is None:
                yield replace(finding, severity=rule.severity)
                continue
            contradiction = _group_contradiction(stored, claims, checkpoint.claims.file)
            yield LayerContradiction(
                finding.rule,
                rule.severity,
                finding.tensor,
                finding.file,
                finding.message + _evidence(stored, claims, checkpoint.claims.file),
                finding.remedy,
                contradiction=contradiction,
            )


@dataclass(frozen=True)
class _StoredGroups:
    """Bits, inputs, and number of groups, by the shapes of a layer."""

    bits: float
    K: int
    groups: int

    @property
    def size(self) -> int:
        """Rows of a group."""
        return -(-self.K // self.groups)

    def has_size(self, size: int | None) -> bool:
        """Return whether a group size, -1 for all rows, makes as many groups; None is no claim."""
        return size is None or self.groups == (1 if size == -1 else -(-self.K // max(1, size)))


def _stored_groups(checkpoint: VerifiedCheckpoint, prefix: str) -> _StoredGroups | None:
    """Return the groups of a GPTQ or AWQ layer by its shapes; None for shapes of another format."""
    weights, base = checkpoint.weights, checkpoint.claims
    if base is None or base.method not in ("gptq", "auto-round", "awq"):
        return None
    needed = [named(prefix, name) for name in ("qweight", "scales")]
    if not all(map(weights.has_tensor, needed)):
        return None
    words, scales = (weights.get_shape(name) for name in needed)
    if len(words) != 2 or len(scales) != 2 or 0 in (*words, *scales):
        return None
    if weights.has_tensor(named(prefix, "g_idx")):
        index = weights.get_shape(named(prefix, "g_idx"))
        rows, bits = (index[0], words[0] * 32 / index[0]) if len(index) == 1 and index[0] else (0, 0.0)
    else:  # words along the outputs
        rows, bits = (words[0], words[1] * 32 / scales[1]) if base.method == "awq" else (0, 0.0)
    return _StoredGroups(bits, rows, scales[0]) if rows else None


def _evidence(stored: _StoredGroups, claims: LayerClaims, file: str) -> str:
    """Return a line with bits and groups by the shapes and by the config."""
    return (
        f"\nthe shapes say {stored.bits:g} bits and {stored.groups} groups of {stored.size} rows, "
        f"{file} claims {claims.bits} bits and a group size of {claims.group_size}"
        + (f" in {claims.source:.160}" if claims.source else "")
    )


def _group_contradiction(stored: _StoredGroups, claims: LayerClaims, file: str) -> Contradiction | None:
    """Return the contradicted setting, groups or bits; None if the shapes contradict both or none."""
    groups = not stored.has_size(claims.group_size)
    bits = claims.bits not in (None, stored.bits)
    if groups == bits:
        return None
    key, value = ("group_size", stored.size) if groups else ("bits", int(stored.bits))
    what = f"groups of {value} rows" if groups else f"{value} bits"
    shown, remedy = f"have {what} by their shapes", f"set {key} to {value} in {claims.place(file)}"
    return Contradiction(claims, claims.says(key), shown, remedy)


def check_not_empty(rule: Rule, checkpoint: VerifiedCheckpoint) -> Iterator[Finding]:
    """Report each quantized layer without outputs or without inputs."""
    for layer in checkpoint.described():
        if not layer.format.weight_type.plain and 0 in (layer.N, layer.K):
            yield rule.field_finding(
                layer, layer.specs[0].name, f"a layer of (N, K) = ({layer.N}, {layer.K})"
            )


def check_biases(rule: Rule, checkpoint: VerifiedCheckpoint) -> Iterator[Finding]:
    """Report each bias of a quantized layer with a wrong length or with integers."""
    for layer in checkpoint.described():
        name = named(layer.prefix, "_bias" if is_appended(layer.specs[0].suffix) else "bias")
        if layer.format.weight_type.plain or not checkpoint.weights.has_tensor(name):
            continue
        info, dims = checkpoint.weights.info(name), [dim for dim in "EN" if dim in layer.sizes]
        expected = tuple(layer.sizes[dim] for dim in dims)
        if info.shape != expected:
            formula = f"({', '.join(dims)}{',' * (len(dims) == 1)})"
            yield rule.tensor_finding(
                checkpoint, name, f"wrong shape\nexpected {expected} = {formula}\ngot      {info.shape}"
            )
        if info.stored_dtype not in FLOATS:
            allowed, got = (str(dtypes).replace("torch.", "") for dtypes in (FLOATS, info.stored_dtype))
            yield rule.tensor_finding(
                checkpoint, name, f"wrong dtype\nexpected one of {allowed}\ngot      {got}"
            )


def check_unexplained(rule: Rule, checkpoint: VerifiedCheckpoint) -> Iterator[Finding]:
    """Report each tensor that neither a format nor its name explains."""
    for name, layer in checkpoint.account.unexplained.items():
        info = checkpoint.weights.storage.info(name)
        dtype = str(info.stored_dtype).removeprefix("torch.")
        place = f"{dtype} {info.shape} belongs to no layer"
        if layer is not None:
            place = f"not a tensor of a {layer.format.weight_type.format} layer"
        yield rule.tensor_finding(checkpoint, name, f"{place}, and no loader reads it")


@dataclass(frozen=True, slots=True)
class MissingSibling:
    """A tensor that one layer lacks, and the same tensor of a sibling that has it."""

    name: str
    sibling: str
    block: str
    having: int
    siblings: int

    @property
    def text(self) -> str:
        """The missing tensor, and the number of siblings that have it."""
        having = f"{self.having} of its {self.siblings} siblings have it"
        return f"{self.name}: missing, and {having}, such as {self.sibling}"


def check_siblings(rule: Rule, checkpoint: VerifiedCheckpoint) -> Iterator[Finding]:
    """Report each tensor that one layer lacks and its siblings have."""
    for missing in lost_siblings(checkpoint):
        yield rule.finding(missing.name, None, missing.text, "fetch or write the checkpoint again")


def lost_siblings(checkpoint: VerifiedCheckpoint, *, certain: bool = True) -> Iterator[MissingSibling]:
    """Yield the missing tensors without which no model is made, or those that may be missing by design."""
    for missing in missing_siblings(checkpoint):
        if _is_certain(checkpoint, missing) == certain and not _is_by_design(checkpoint, missing):
            yield missing


def missing_siblings(checkpoint: VerifiedCheckpoint) -> Iterator[MissingSibling]:
    """Yield each tensor that one layer lacks and its siblings have, apart from MTP layers."""
    for block, layers in layer_lists(_comparable_names(checkpoint)).items():
        equal = Counter(layers.values())
        if len(equal) == 1:
            continue
        supersets = _Supersets(layers)
        for index, names in layers.items():
            fuller = None if equal[names] > 1 else supersets.fullest(names)
            if fuller is None:
                continue
            having = sum(equal[other] for other in supersets.containing(layers[fuller]))
            for lost in sorted(layers[fuller] - names):
                sibling, name = f"{block}.{fuller}.{lost}", f"{block}.{index}.{lost}"
                if not any(map(checkpoint.account.hides, (sibling, name))):  # unread dialects differ
                    yield MissingSibling(name, sibling, block, having, len(layers) - 1)


def _is_by_design(checkpoint: VerifiedCheckpoint, missing: MissingSibling) -> bool:
    """Return whether a layer lacks a tensor by design: plain, or under another entry of the config."""
    other = checkpoint.all_layers.get(checkpoint.prefixes[missing.sibling])
    if not isinstance(other, LayerDescription) or other.format.weight_type.plain:
        return False
    names = {other.names.full(spec.name) for spec in other.specs}
    layer = checkpoint.all_layers.get(missing.name.removesuffix(missing.sibling[len(other.prefix) :]))
    if missing.sibling not in names or not isinstance(layer, LayerDescription):
        return False
    ours, theirs = (
        (description.format.claims, description.format.activations) for description in (layer, other)
    )
    return layer.format.weight_type.plain or ours != theirs


def _comparable_names(checkpoint: VerifiedCheckpoint) -> list[str]:
    """Return all names apart from those of MTP layers, which have more tensors, and of adapters."""
    architecture = checkpoint.architecture
    names = [name for name in checkpoint.names if not is_adapter(name)]
    predicting = {block_of(name) for name in names if not PREDICTING.isdisjoint(name.split("."))}
    announced = architecture is not None and architecture.sizes.get("predict")
    return [
        name
        for name in names
        if not (predicting and block_of(name) in predicting)
        and not (announced and architecture is not None and architecture.predictor(name) is not None)
    ]


def _is_certain(checkpoint: VerifiedCheckpoint, missing: MissingSibling) -> bool:
    """Return whether no model is made without this tensor."""
    if _may_vary(checkpoint, missing):
        return False
    if checkpoint.requires_all_tensors or missing.block.endswith("experts"):
        return True
    layer = checkpoint.all_layers.get(checkpoint.prefixes[missing.sibling])
    prefix, _, part = missing.name.rpartition(".")
    quantized = isinstance(layer, LayerDescription) and not layer.format.weight_type.plain
    return quantized and part != "bias" and prefix in checkpoint.suffixes


def _may_vary(checkpoint: VerifiedCheckpoint, missing: MissingSibling) -> bool:
    """Return whether a table of some classes leaves open if this layer has the tensor."""
    architecture = checkpoint.architecture
    if architecture is None or not architecture.table.classes:
        return False
    place = architecture.find(missing.name) or architecture.find(missing.name.rpartition(".")[0])
    if place is not None and place.expert is not None and missing.block.endswith("experts"):  # all are alike
        return place.expert >= (architecture.sizes.get("experts") or 0)
    return place is None or place.row.optional or architecture.is_promised(place) is not True


def layer_lists(names: list[str]) -> Mapping[str, Mapping[str, Names]]:
    """Return `model.layers` -> its indices -> the tensor names under each."""
    blocks: dict[str, dict[str, set[str]]] = {}
    for name in names:
        parts = name.split(".")
        for at, part in enumerate(parts[:-1]):
            if part.isdecimal() and is_block_list(".".join(parts[:at])):
                members = blocks.setdefault(".".join(parts[:at]), {}).setdefault(part, set())
                members.add(".".join(parts[at + 1 :]))
    return {
        block: {index: frozenset(members) for index, members in layers.items()}
        for block, layers in blocks.items()
    }


class _Supersets:
    """Search for layers that have all names of another; it looks only at layers with the rarest name."""

    def __init__(self, layers: Mapping[str, Names]) -> None:
        self._first: dict[Names, str] = {}  # the first of equal layers, in the order of layers
        for index, names in layers.items():
            self._first.setdefault(names, index)
        self._having: dict[str, list[Names]] = {}
        for names in self._first:
            for name in names:
                self._having.setdefault(name, []).append(names)

    def containing(self, names: Names) -> Iterator[Names]:
        """Yield each set of names that contains all of these, once."""
        rarest = min((self._having[name] for name in names), key=len)
        return (other for other in rarest if names <= other)

    def fullest(self, names: Names) -> str | None:
        """Return the first of the layers with the most names beyond all of these."""
        fuller = [other for other in self.containing(names) if len(other) > len(names)]
        return self._first[max(fuller, key=len)] if fuller else None


DETAILED_CONFIGS = (BNB4Config, Fp8Config)  # configs with details that notes of the loader contradict


def check_side_files(rule: Rule, checkpoint: VerifiedCheckpoint) -> Iterator[Finding]:
    """Report each further config file that is malformed, or of an unsupported method."""
    for config in checkpoint.configs[1:]:
        try:
            read_claims(config)
        except QloadError as error:
            finding = finding_of(error, severity="warning")
            if isinstance(error, UnsupportedFormatError):  # about this config, not the checkpoint
                finding = Finding(
                    rule.id,
                    "warning",
                    None,
                    config.file,
                    f"{config.file}: {finding.message}",
                    finding.remedy or rule.text.remedy,
                )
            yield finding


def check_method(rule: Rule, checkpoint: VerifiedCheckpoint) -> Iterator[Finding]:
    """Report a method without a layer if all layers are plain and read, and bits without a layer."""
    claims = checkpoint.claims
    if claims is None or not claims.formats or _is_file_of_index(Path(checkpoint.location)):
        return
    formats = {fmt.weight_type.format for fmt in claims.formats}
    if all(_is_plain(layer) for layer in checkpoint.layers.values()) and not checkpoint.unread:
        yield rule.finding(
            None,
            claims.file,
            f"{claims.file}: quant_method is {claims.method}, and no layer is stored as "
            f"{' or '.join(sorted(formats))}: {len(checkpoint.layers)} layers are plain",
        )
    yield from _denied_bits(rule, checkpoint, claims.file)


def _denied_bits(rule: Rule, checkpoint: VerifiedCheckpoint, file: str) -> Iterator[Finding]:
    """Report each claim of bits, of the base config or an entry, that all of its layers contradict."""
    of_claims: dict[LayerClaims, list[Config]] = {}
    for layer in checkpoint.described():
        if layer.format.claims is not None and not layer.format.weight_type.plain:
            of_claims.setdefault(layer.format.claims, []).append(layer.format.config)
    for claims, configs in of_claims.items():
        denied = [config for config in configs if getattr(config, "claimed_bits", None) is not None]
        if denied and len(denied) == len(configs):
            stored = " or ".join(sorted({str(getattr(config, "bits", None)) for config in denied}))
            layers = f"its {len(configs)} layers" if claims.source else "all layers"
            yield rule.finding(
                None,
                file,
                f"{file}: {claims.says('bits')}, but by shape {layers} have {stored}",
                f"set bits to {stored} in {claims.place(file)}",
            )


def _is_plain(layer: LayerDescription | QloadError) -> bool:
    """Return whether a layer is plain, without a scale of the method next to it."""
    if isinstance(layer, QloadError) or not layer.format.weight_type.plain:
        return False
    return not any(spec.role is Role.UNUSED for spec in layer.specs)


def _is_file_of_index(path: Path) -> bool:
    """Return whether a path is a file next to an index: the quantized layers may be in another file."""
    return path.is_file() and not path.name.endswith(INDEX) and any(path.parent.glob(f"*{INDEX}"))


def check_details(rule: Rule, checkpoint: VerifiedCheckpoint) -> Iterator[Finding]:
    """Report each wrong detail once: for all layers, or for the first layer with their number."""
    prefixes_of: dict[str, list[str]] = {}
    for layer in checkpoint.described():
        if isinstance(layer.format.config, DETAILED_CONFIGS):
            for note in layer.notes:
                prefixes_of.setdefault(note, []).append(layer.prefix)
    layers = [layer for layer in checkpoint.described() if isinstance(layer.format.config, DETAILED_CONFIGS)]
    file = checkpoint.claims.file if checkpoint.claims else None
    for note, prefixes in prefixes_of.items():
        remedy = f"correct this setting in {file or 'the config'}"
        if len(prefixes) == len(layers) > 1 and not checkpoint.is_shard:
            message = f"{file}: {note}, in all {len(prefixes)} layers"
            yield rule.finding(None, file, message, remedy)
        else:
            message = f"{prefixes[0]}: {note}; {len(prefixes)} layers in all"
            yield rule.finding(prefixes[0], file, message, remedy)
