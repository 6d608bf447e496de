"""Notes of `verify`: remarks about a sound checkpoint, each one sentence for all layers with one cause.

Notes cover harmless claims, ambiguous zero points, tensors that may be missing by design, and disagreements
between a config and sound tensors. Programs that follow the config alone fail on such a disagreement, or
compute with other weights; its note ends with a remedy. The loader notes plain layers that the config lists
by name as quantized.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from qload.architecture.architecture import CAUSAL, SHOWN, TIE, is_usual_class, tie_of
from qload.architecture.names import PROJECTION_GROUPS, REMEDY, adapters_of, base_name, is_adapter, pattern_of
from qload.checkpoint.layer_info import zero_point_convention, zero_point_words
from qload.configs import value_text
from qload.detect.config_reader import PatternEntry, pattern_entries
from qload.errors import ConfigError, MismatchError
from qload.formats import Exl2Config, GPTQConfig
from qload.formats.exl2 import scale_unit
from qload.layouts import Stored, StoredMinusOneUnmasked
from qload.lazy_torch import torch
from qload.loader import LayerDescription
from qload.loader.exclusion import parts, wholes
from qload.spec import LayerClaims
from qload.storage import WeightStorage
from qload.verify.checkpoint import VerifiedCheckpoint
from qload.verify.rules.architecture import join_numbers, missing_tensors
from qload.verify.rules.damaged_data import repeated_layers
from qload.verify.rules.layers import DETAILED_CONFIGS, lost_siblings
from qload.verify.values import Values

# Evidence for the reading of zero points of 0, by `GPTQConfig.evidence`.
EVIDENCE = {
    "alike": "as by all programs that mask",
    "codes": "as their codes show",
    "writer": "as by the quantizer in the config",
    "others": "as codes of other layers show",
}

# Last segments of heads and embeddings, for model types without a table.
HEADS = ("lm_head", "output", "embed_out", "head")
EMBEDDINGS = ("embed_tokens", "tok_embeddings", "wte", "word_embeddings", "embed_in")
TYPES_WITH_ADAPTERS = ("phi4mm", "phi4_multimodal")  # their own adapters, for images and audio
# A name in a list of layers, split at its number. Segments that name the text model.
LAYER = re.compile(r"(?:(.*?)\.)?(?:mtp_)?(?:layers|h|block|blocks)\.\d+\.(.+)")
TEXT = frozenset(("model", "language_model", "text_model", "transformer", "mtp"))
MAX_SEARCHED = 1000  # names of a config, searched among all stored names


@dataclass(frozen=True, slots=True)
class Counted:
    """Number of a tensor's values that a note is about; notes of one `text` are merged."""

    text: str
    tensor: str
    count: int
    total: int


def merge_counts(counts: Iterable[Counted]) -> Iterator[str]:
    """Yield one note for each text: the first layer, and the number of layers."""
    by_text: dict[str, list[Counted]] = {}
    for counted in counts:
        by_text.setdefault(counted.text, []).append(counted)
    for text, members in by_text.items():
        more = f"; {len(members)} layers in all" if len(members) > 1 else ""
        yield f"{members[0].tensor}: {members[0].count} of {members[0].total} {text}{more}"


def architecture(checkpoint: VerifiedCheckpoint) -> Iterator[str]:
    """Yield notes on a type of model without a table, on foreign names, and on invalid sizes."""
    config = checkpoint.model_config
    if checkpoint.architecture is None:
        if config:  # empty without a config.json
            known = isinstance(config.get("model_type"), str)
            state = f"is {value_text(config['model_type'])}, which is not known" if known else "is missing"
            yield (
                f"config.json: model_type {state}: neither shapes nor missing tensors are "
                "checked by the config"
            )
        return
    yield from checkpoint.architecture.notes
    if checkpoint.inventory is None:
        yield (
            "config.json: the names of its layers are not those of model_type "
            f"{checkpoint.architecture.type}: missing tensors are not checked by it"
        )
    elif beyond := sorted(checkpoint.inventory.undeclared_predictors):
        yield (
            f"{checkpoint.inventory.name_of_layer(beyond[0])}: a layer beyond num_hidden_layers, for "
            f"multi-token prediction ({len(beyond)} such in all), that config.json does not announce: "
            "engines leave it out"
        )


def drafts(checkpoint: VerifiedCheckpoint) -> Iterator[str]:
    """Yield a note on the kind of a draft model, with the tapped layers and the target in its config."""
    draft = checkpoint.draft
    if draft is None or checkpoint.is_shard:
        return
    kind = "a draft" if draft.kind == "draft" else f"a draft of the kind {draft.kind}"
    facts = []
    if draft.taps is not None:
        layers = join_numbers(draft.taps.layers[:SHOWN], len(draft.taps.layers))
        facts.append(f"of the hidden states of layers {layers}")
    if draft.target is not None:
        key, name = draft.target
        facts.append(f"of the target {name:.200} by {key}, which is not opened")
    yield f"{', '.join([f'{kind} for speculative decoding', *facts])}; --target compares it with its target"


def missing_by_design(checkpoint: VerifiedCheckpoint) -> Iterator[str]:
    """Yield notes on tensors that may be missing by design: the first, the reason, and the number."""
    config = checkpoint.model_config
    type_text = f"model_type is {value_text(config.get('model_type', config.get('_class_name')))}"
    if lost := list(lost_siblings(checkpoint, certain=False)):
        more = f"; {len(lost)} tensors in all" if len(lost) > 1 else ""
        yield f"{lost[0].text}; {type_text}, whose layers may differ by design{more}"
    if not checkpoint.requires_all_tensors and checkpoint.inventory is not None:
        missing = list(missing_tensors(checkpoint))
        if missing:
            more = f"; {len(missing)} such in all" if len(missing) > 1 else ""
            yield f"{missing[0][1]}, and {_reason_of_missing(config)}{more}"


def _reason_of_missing(config: Mapping[str, Any]) -> str:
    """Return the reason for a missing tensor in a model of a known type: its class, or a draft."""
    classes = config.get("architectures")
    if isinstance(classes, list) and not is_usual_class(config):
        return f"the class {', '.join(map(str, classes)):.80}, which may not need it"
    return "this is a draft by its tensors, and may share it with its target"


def contradicted_settings(checkpoint: VerifiedCheckpoint) -> Iterator[str]:
    """Yield notes on bits that some layers contradict, and on act order with groups in order.

    If all layers contradict the bits, a finding reports it.
    """
    if checkpoint.claims is None:
        return
    file, layers = checkpoint.claims.file, dict[LayerClaims, list[tuple[str, GPTQConfig]]]()
    for layer in checkpoint.described():
        claims, config = layer.format.claims, layer.format.config
        if isinstance(config, GPTQConfig) and claims is not None:
            layers.setdefault(claims, []).append((layer.prefix, config))
    for claims, members in layers.items():
        denied = [(prefix, config.bits) for prefix, config in members if config.claimed_bits is not None]
        if 0 < len(denied) < len(members):
            first, bits = denied[0]
            yield (
                f"{first}: {bits} bits by its shapes, which are believed, and {file} says "
                f"{claims.says('bits')}; so of {len(denied)} of {len(members)} layers: programs that follow "
                "the config fail; add an entry for these modules"
            )
    for claims, members in layers.items():
        in_order = sum(config.positional for _, config in members)
        if in_order and claims.desc_act:
            yield (
                f"{file} says {claims.says('desc_act')}; the groups of {in_order} of {len(members)} layers "
                "are in order (static groups), and qload believes g_idx"
            )


def loader_notes(checkpoint: VerifiedCheckpoint) -> Iterator[str]:
    """Yield notes of the loader without a rule or another note, once for all equal ones."""
    prefixes_of: dict[str, list[str]] = {}
    for layer in checkpoint.described():
        if not isinstance(layer.format.config, (*DETAILED_CONFIGS, GPTQConfig)):
            for note in layer.notes:
                prefixes_of.setdefault(note, []).append(layer.prefix)
        if layer.dialect is not None:
            prefixes_of.setdefault(layer.dialect, []).append(layer.prefix)
    for note, prefixes in prefixes_of.items():
        yield f"{prefixes[0]}: {note}" + (f"; {len(prefixes)} layers in all" if len(prefixes) > 1 else "")


def repeated_layer_note(checkpoint: VerifiedCheckpoint) -> Iterator[str]:
    """Yield a note on layers that are whole copies of others: the first, and the number."""
    repeated = repeated_layers(checkpoint)
    if repeated:
        layer, other = next(iter(repeated.items()))
        more = f"; {len(repeated)} such layers in all" if len(repeated) > 1 else ""
        yield (
            f"{layer}: every tensor is equal to that of {other}, or is a zero output; the model was made "
            f"deeper, or a layer was written over another{more}"
        )


def zero_point_readings(checkpoint: VerifiedCheckpoint) -> Iterator[Counted]:
    """Count the zero points of each gptq v1 layer that kernels without a mask read differently."""
    for layer in checkpoint.described():
        config = layer.format.config
        if isinstance(config, GPTQConfig) and config.evidence in EVIDENCE:
            count = _count_unmasked(checkpoint.weights.storage, layer)
            if count:
                text = (
                    f"zero points are read as {config.zeros.name}, {EVIDENCE[config.evidence]}; kernels "
                    f"without a mask read up to {2**config.bits}"
                )
                yield Counted(text, f"{layer.prefix}.qzeros", count, config.groups(layer.K) * layer.N)


def _count_unmasked(storage: WeightStorage, layer: LayerDescription) -> int:
    known = zero_point_convention(layer)
    assert known is not None  # a GPTQ layer has zero points
    zeros, packing = known
    if isinstance(zeros, Stored):
        return 0
    other = StoredMinusOneUnmasked()
    return sum(
        int((zeros.read(run, packing) != other.read(run, packing)).sum())
        for _, run in zero_point_words(storage, layer)
    )


def subnormals(checkpoint: VerifiedCheckpoint) -> Iterator[Counted]:
    """Count the groups of each EXL2 layer with scales that are subnormal in fp16, and not in float32."""
    for layer in checkpoint.described():
        if isinstance(layer.format.config, Exl2Config):
            units = scale_unit(layer.facts["q_scale_max"]).abs()
            count = int(((units > 0) & (units < torch.finfo(torch.float16).smallest_normal)).sum())
            if count:
                text = (
                    "units are subnormal in fp16, as their writer used them (used here); readers that divide "
                    "in float32 differ by up to 0.2 %"
                )
                yield Counted(text, f"{layer.prefix}.q_scale_max", count, units.numel())


def unmerged_adapters(checkpoint: VerifiedCheckpoint) -> Iterator[str]:
    """Yield a note on a model saved inside PEFT's wrapper, except for types with adapters of their own."""
    unmerged = adapters_of(checkpoint.names)
    if unmerged is not None and checkpoint.model_config.get("model_type") not in TYPES_WITH_ADAPTERS:
        yield (
            f"{unmerged}: the model was saved inside PEFT's wrapper, and other programs find no such layer "
            f"or ignore the adapter; {REMEDY}"
        )


def contradicted_ties(checkpoint: VerifiedCheckpoint) -> Iterator[str]:
    """Yield a note on a tie that the stored tensors or other keys contradict.

    Rules report a plain head that differs, and a missing head in a known model type.
    """
    tie = tie_of(checkpoint.model_config)
    if tie.tied is None or checkpoint.is_draft:
        return
    head, embedding = _find_prefix(checkpoint, HEADS), _find_prefix(checkpoint, EMBEDDINGS)
    found = [checkpoint.all_layers.get(prefix) for prefix in (head, embedding) if prefix]
    pair = [layer for layer in found if isinstance(layer, LayerDescription)]
    differ = tie.tied and len(pair) == 2 and not _is_equal(checkpoint, *pair)
    plain = all(layer.format.weight_type.plain for layer in pair)
    if differ and plain and not tie.outer and checkpoint.inventory is not None:
        return  # the rule `tied-head` reports it
    if tie.denied:
        what = "no head is stored: set both to true"
        if head:
            what = f"{head} is stored: set both to false, if the model uses it"
        elif checkpoint.is_shard:
            what = "the head may be in another file"
        yield f"config.json: {tie}: programs differ in the key that they read; {what}"
    elif differ:
        ours, theirs = (f"{layer.format.weight_type.format} {(layer.N, layer.K)}" for layer in pair)
        yield (
            f"{head}: stored as {ours}, and {embedding} as {theirs}, while {tie}: programs that tie the two "
            f"ignore the stored head; set {tie.key or TIE} to false in config.json, or remove the head"
        )
    elif (
        not tie.tied
        and not head
        and embedding
        and checkpoint.architecture is None
        and _is_causal_model(checkpoint)
    ):
        yield (
            f"config.json: {tie}, and no head is stored: programs start from a random one or fail; set it to "
            "true, if the embedding is the head"
        )


def _is_equal(checkpoint: VerifiedCheckpoint, ours: LayerDescription, theirs: LayerDescription) -> bool:
    """Return whether two layers have equal bytes; plain layers count as equal while no bytes are read."""
    values: Values | None = vars(checkpoint).get("values")
    if ours.format != theirs.format or ours.sizes != theirs.sizes or ours.dtypes != theirs.dtypes:
        return False
    if values is None:
        return ours.format.weight_type.plain
    pairs = ((ours.names.full(spec.name), theirs.names.full(spec.name)) for spec in ours.specs)
    return all(values.contents[name].digest == values.contents[other].digest for name, other in pairs)


def _find_prefix(checkpoint: VerifiedCheckpoint, lasts: tuple[str, ...]) -> str | None:
    """Return the prefix of the head or embedding, by the model type's table or by name; None without one."""
    architecture, inventory = checkpoint.architecture, checkpoint.inventory
    if architecture is not None and inventory is not None:
        table = architecture.table
        (name,) = inventory.spell(table.head if lasts is HEADS else table.embedding)
        return name if name in checkpoint.suffixes else None
    outside = (name for name in checkpoint.suffixes if not any(part.isdecimal() for part in name.split(".")))
    return next((name for name in outside if name.rpartition(".")[2] in lasts), None)


def _is_causal_model(checkpoint: VerifiedCheckpoint) -> bool:
    """Return whether this is a whole checkpoint of a class for causal language models."""
    classes = checkpoint.model_config.get("architectures")
    names = classes if isinstance(classes, list) else []
    return not checkpoint.is_shard and any(isinstance(name, str) and name.endswith(CAUSAL) for name in names)


def unlisted_plain_layers(checkpoint: VerifiedCheckpoint) -> Iterator[str]:
    """Yield a note on plain layers without an entry in the config, if similar layers are quantized."""
    plain, quantized = _matrices(checkpoint)
    kinds = {key for prefix in quantized for key in _similarity_keys(prefix)}
    listed = {prefix for _, prefixes in _useless_patterns(checkpoint) for prefix in prefixes}
    listed |= {prefix for prefix in plain if checkpoint.loader.named.entry(prefix) is not None}
    similar = [prefix for prefix in plain if not kinds.isdisjoint(_similarity_keys(prefix))]
    unlisted = [prefix for prefix in similar if prefix not in listed]
    if unlisted and checkpoint.loader.named.leaving_out:
        keys = set(_similarity_keys(unlisted[0]))
        like = next(prefix for prefix in quantized if not keys.isdisjoint(_similarity_keys(prefix)))
        yield (
            f"{unlisted[0]}: plain, while {like} is quantized, and no entry of the config excludes it"
            f"{_number(unlisted)}: programs that follow the config expect quantized tensors, and fail or "
            f"read others; exclude {'them' if unlisted[1:] else 'it'} by "
            f"{checkpoint.loader.named.leaving_out}"
        )


def useless_patterns(checkpoint: VerifiedCheckpoint) -> Iterator[str]:
    """Yield a note on each pattern of modules to quantize that matches plain layers alone."""
    for entry, matched in _useless_patterns(checkpoint):
        yield (
            f"{matched[0]}: plain, and {entry.key} lists it as quantized by {entry.text!r:.80}"
            f"{_number(matched)}: programs that follow the config expect quantized tensors and fail; "
            "remove the entry"
        )


def _useless_patterns(checkpoint: VerifiedCheckpoint) -> Iterator[tuple[PatternEntry, list[str]]]:
    """Yield each pattern that matches plain layers alone, with these layers."""
    if not checkpoint.configs:
        return
    plain, quantized = _matrices(checkpoint)
    for entry in pattern_entries(checkpoint.configs[0]) if plain else ():
        with suppress(ConfigError):  # an invalid pattern, which loads refuse
            matched = [prefix for prefix in plain if entry.means(prefix)]
            if matched and not any(map(entry.means, quantized)):
                yield entry, matched


def unknown_modules(checkpoint: VerifiedCheckpoint) -> Iterator[str]:
    """Yield a note on modules listed as quantized without a stored layer."""
    named = checkpoint.loader.named
    if checkpoint.is_shard or not named.keys:
        return
    prefixes = list(map(base_name, checkpoint.suffixes))
    used = {entry[0] for prefix in prefixes if (entry := named.entry(prefix)) is not None}
    unused, text = sorted(named.keys.keys() - used), "".join(f".{prefix}.\n" for prefix in prefixes)
    missing: dict[str, list[str]] = {}
    for name in unused[:MAX_SEARCHED]:
        known = (name, *parts(name), *wholes(name))  # with a longer name, as parts, or fused
        if not any(f".{alias}." in text for alias in known):
            missing.setdefault(named.keys[name], []).append(name)
    for key, names in sorted(missing.items()):
        if names != ["lm_head"] or key == "lm_head":  # a target that includes the head fits a tied model
            yield (
                f"{names[0]}: {key} lists it as quantized, and no such layer is stored{_number(names)}: "
                f"remove the {'entries' if names[1:] else 'entry'}, if no layer was lost"
            )


def _matrices(checkpoint: VerifiedCheckpoint) -> tuple[list[str], list[str]]:
    """Return the prefixes of plain matrices without an exclusion, and of quantized layers."""
    plain, quantized = [], []
    for layer in checkpoint.described():
        if not layer.format.weight_type.plain:
            quantized.append(layer.prefix)
        elif "K" in layer.sizes and len(layer.specs) == 1 and not is_adapter(layer.prefix):
            with suppress(ConfigError, MismatchError):
                if checkpoint.loader.left_out(layer.prefix) is None:
                    plain.append(layer.prefix)
    return plain, quantized


def _similarity_keys(prefix: str) -> Iterator[str]:
    """Yield keys that similar layers share: the same matrix of other blocks, and siblings in the block.

    Blocks of MTP count as other blocks.
    """
    name = base_name(prefix)
    match = LAYER.fullmatch(name)
    if match is None:
        return
    lead = (part for part in (match[1] or "").split(".") if part not in TEXT)
    yield f"{'.'.join(lead)}: {pattern_of(match[2])}"
    parent, _, last = name.rpartition(".")
    yield from (f"{parent}: {group}" for group in PROJECTION_GROUPS if last in group)


def _number(prefixes: Sequence[str]) -> str:
    return f"; {len(prefixes)} in all" if len(prefixes) > 1 else ""
