"""What is worth telling and needs no action: claims without harm, zero points with several readings."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from qload.architecture.config import is_usual_class
from qload.detect.files import shown
from qload.formats import Exl2Config, GPTQConfig
from qload.formats.exl2 import scale_unit
from qload.layouts import Stored, StoredMinusOneUnmasked
from qload.listing.zero_points import convention, words
from qload.loader import LayerDescription
from qload.spec import LayerClaims
from qload.storage import WeightStorage
from qload.verify.rules import architecture_missing, copies, siblings
from qload.verify.rules.claimed_detail import CLAIMING
from qload.verify.subject import Subject


def flags(subject: Subject) -> Iterator[str]:
    """A flag that claims act order over groups that lie in order, and bits that some layers deny."""
    yield from _bits(subject)
    layers: dict[LayerClaims, list[GPTQConfig]] = {}
    for layer in subject.described():
        claims, config = layer.format.claims, layer.format.config
        if isinstance(config, GPTQConfig) and claims is not None and claims.desc_act:
            layers.setdefault(claims, []).append(config)
    for claims, configs in layers.items():
        in_order = [config for config in configs if config.positional]
        if in_order and subject.claims is not None:
            yield (
                f"{subject.claims.file} says {claims.says('desc_act')}; the groups of {len(in_order)} of "
                f"{len(configs)} layers lie in order (static groups), and g_idx is believed"
            )


def _bits(subject: Subject) -> Iterator[str]:
    """Layers of other bits than the config claims; a claim that all of its layers deny is a finding."""
    layers: dict[LayerClaims, list[LayerDescription]] = {}
    for layer in subject.described():
        if isinstance(layer.format.config, GPTQConfig) and layer.format.claims is not None:
            layers.setdefault(layer.format.claims, []).append(layer)
    for claims, those in layers.items():
        denied = {layer.prefix: bits for layer in those if (bits := _believed(layer)) is not None}
        if denied and len(denied) < len(those) and subject.claims is not None:
            first = next(iter(denied))
            yield (
                f"{first}: {denied[first]} bits by its shapes, which are believed, and {subject.claims.file} "
                f"says {claims.says('bits')}; so of {len(denied)} of {len(those)} layers: programs that go "
                "by the config fail; state it by an entry for these modules"
            )


def _believed(layer: LayerDescription) -> int | None:
    """The bits that shapes say where the config claims others."""
    config = layer.format.config
    assert isinstance(config, GPTQConfig)
    return None if config.claimed_bits is None else config.bits


def architecture(subject: Subject) -> Iterator[str]:
    """A type of model of no table, names that are not those of its table, and values that are no sizes."""
    config = subject.model_config
    if subject.architecture is None:
        if config:  # empty without a config.json
            known = isinstance(config.get("model_type"), str)
            said = f"is {shown(config['model_type'])}, which is not known" if known else "is missing"
            yield (
                f"config.json: model_type {said}: neither shapes nor missing tensors are "
                "checked by the config"
            )
        return
    yield from subject.architecture.notes
    if subject.inventory is None:
        yield (
            f"config.json: the names of its layers are not those of model_type {subject.architecture.type}: "
            "missing tensors are not checked by it"
        )
    elif beyond := sorted(subject.inventory.undeclared_predictors):
        yield (
            f"{subject.inventory.name_of_layer(beyond[0])}: beyond num_hidden_layers, and predicts further "
            f"words ({len(beyond)} such in all), which config.json does not announce: engines leave it out"
        )


def absences(subject: Subject) -> Iterator[str]:
    """What is missing from a model that may be made so: the first tensor, why, and how many."""
    config = subject.model_config
    said = f"model_type is {shown(config.get('model_type', config.get('_class_name')))}"
    if lost := list(siblings.doubtful(subject)):
        more = f"; {len(lost)} tensors in all" if len(lost) > 1 else ""
        yield f"{lost[0].text}; {said}, whose layers may differ by design{more}"
    if not subject.ordinary and subject.inventory is not None:
        missing = list(architecture_missing.lacking(architecture_missing.RULE, subject))
        if missing:
            more = f"; {len(missing)} such in all" if len(missing) > 1 else ""
            yield f"{missing[0].message}, and {_lacking(config)}{more}"


def _lacking(config: Mapping[str, Any]) -> str:
    """Reason for a missing tensor in a model of a known type: its class, or a draft."""
    classes = config.get("architectures")
    if isinstance(classes, list) and not is_usual_class(config):
        return f"the class {', '.join(map(str, classes)):.80}, which may do without"
    return "this is a draft by its tensors, and may share it with its target"


def repeated(subject: Subject) -> Iterator[str]:
    """Layers that are whole copies of others: the first, and how many."""
    found = copies.repeated_layers(subject)
    if found:
        here, there = next(iter(found.items()))
        more = f"; {len(found)} such layers in all" if len(found) > 1 else ""
        yield (
            f"{here}: every tensor is equal to that of {there}, or gives out zeros; the model was made "
            f"deeper, or a layer was written over another{more}"
        )


def of_loaders(subject: Subject) -> Iterator[str]:
    """What loaders note of layers, once for all that are alike, where no rule or other note tells it."""
    found: dict[str, list[str]] = {}
    for layer in subject.described():
        if not isinstance(layer.format.config, (*CLAIMING, GPTQConfig)):
            for note in layer.notes:
                found.setdefault(note, []).append(layer.prefix)
        if layer.dialect is not None:
            found.setdefault(layer.dialect, []).append(layer.prefix)
    for note, prefixes in found.items():
        yield f"{prefixes[0]}: {note}" + (f"; {len(prefixes)} layers in all" if len(prefixes) > 1 else "")


# Evidence for the reading of zero points of 0, by `GPTQConfig.evidence`.
DECIDED = {
    "alike": "as by all programs that mask",
    "codes": "as their codes show",
    "writer": "as by the quantizer in the config",
    "others": "as codes of other layers show",
}


@dataclass(frozen=True, slots=True)
class Counted:
    """Of the values of a layer's tensor, how many a note is about; notes of one `kind` are told as one."""

    kind: str
    tensor: str
    count: int
    total: int


def readings(subject: Subject) -> Iterator[Counted]:
    """Count the zero points of each gptq v1 layer that kernels without a mask read otherwise."""
    assert subject.weights is not None
    for layer in subject.described():
        config = layer.format.config
        if isinstance(config, GPTQConfig) and config.evidence in DECIDED:
            count = _apart(subject.weights.storage, layer)
            if count:
                kind = (
                    f"zero points are read as {config.zeros.name}, {DECIDED[config.evidence]}; kernels "
                    f"without a mask read up to {2**config.bits}"
                )
                yield Counted(kind, f"{layer.prefix}.qzeros", count, config.groups(layer.K) * layer.N)


def subnormals(subject: Subject) -> Iterator[Counted]:
    """Per EXL2 layer, how many groups have scales that fp16 rounds hard, and float32 does not."""
    for layer in subject.described():
        if isinstance(layer.format.config, Exl2Config):
            units = scale_unit(layer.facts["q_scale_max"]).abs()
            count = int(((units > 0) & (units < torch.finfo(torch.float16).smallest_normal)).sum())
            if count:
                kind = (
                    "units are subnormal in fp16, as their writer had them (taken here); readers that divide "
                    "in float32 differ by up to 0.2 %"
                )
                yield Counted(kind, f"{layer.prefix}.q_scale_max", count, units.numel())


def told_once(shares: Iterable[Counted]) -> Iterator[str]:
    """One note for each kind: the first layer, and how many layers there are."""
    found: dict[str, list[Counted]] = {}
    for share in shares:
        found.setdefault(share.kind, []).append(share)
    for kind, alike in found.items():
        more = f"; {len(alike)} layers in all" if len(alike) > 1 else ""
        yield f"{alike[0].tensor}: {alike[0].count} of {alike[0].total} {kind}{more}"


def _apart(storage: WeightStorage, layer: LayerDescription) -> int:
    known = convention(layer)
    assert known is not None  # a GPTQ layer has zero points
    zeros, packing = known
    if isinstance(zeros, Stored):
        return 0
    other = StoredMinusOneUnmasked()
    return sum(
        int((zeros.read(run, packing) != other.read(run, packing)).sum()) for _, run in words(storage, layer)
    )
