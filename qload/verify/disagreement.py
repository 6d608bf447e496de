"""Notes on disagreements between a config and sound tensors.

Programs that follow the config alone fail on such a checkpoint, or compute with other weights. Each note is
one sentence for all layers with the same cause, and ends with a remedy. The loader notes plain layers that
the config lists by name as quantized.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress

from qload.architecture.adapters import REMEDY, adapters_of, base_name, is_adapter
from qload.architecture.config import CAUSAL, TIE, Tie, tie_of
from qload.detect.config_reader import PatternEntry, pattern_entries
from qload.errors import ConfigError, MismatchError
from qload.loader import LayerDescription
from qload.loader.exclusion import parts, wholes
from qload.verify import kin
from qload.verify.subject import Subject
from qload.verify.values import Values

# Last segments of heads and embeddings, for model types without a table.
HEADS = ("lm_head", "output", "embed_out", "head")
EMBEDDINGS = ("embed_tokens", "tok_embeddings", "wte", "word_embeddings", "embed_in")
WITH_ADAPTERS = ("phi4mm", "phi4_multimodal")  # model types with adapters of their own, for images and audio
# A name in a list of layers, split at its number. Segments that name the text model.
LAYER = re.compile(r"(?:(.*?)\.)?(?:mtp_)?(?:layers|h|block|blocks)\.\d+\.(.+)")
TEXT = frozenset(("model", "language_model", "text_model", "transformer", "mtp"))
SEARCHED = 1000  # names of a config, searched among all stored names


def disagreements(subject: Subject) -> Iterator[str]:
    """Yield all notes of this module on one checkpoint."""
    yield from adapters(subject)
    yield from ties(subject)
    yield from left_plain(subject)
    yield from meaningless_patterns(subject)
    yield from unknown_modules(subject)


def adapters(subject: Subject) -> Iterator[str]:
    """Yield a note on a model saved inside PEFT's wrapper, except for types with adapters of their own."""
    unmerged = adapters_of(subject.names)
    if unmerged is not None and subject.model_config.get("model_type") not in WITH_ADAPTERS:
        yield (
            f"{unmerged}: the model was saved inside PEFT's wrapper, and other programs find no such layer "
            "or "
            f"ignore the adapter; {REMEDY}"
        )


def ties(subject: Subject) -> Iterator[str]:
    """Yield a note on a tie that the stored tensors or other keys contradict.

    Rules report a plain head that differs, and a missing head in a known model type.
    """
    tie = tie_of(subject.model_config)
    if tie.tied is None or subject.draft:
        return
    head, embedding = _end(subject, HEADS), _end(subject, EMBEDDINGS)
    if head and embedding and _is_a_finding(subject, tie, head, embedding):
        return
    if tie.denied:
        what = (
            f"{head} is stored: set both to false, if the model uses it" if head else _without_head(subject)
        )
        yield f"config.json: {tie}: programs differ in the key that they read; {what}"
    elif tie.tied and head and embedding:
        yield from _tied(subject, tie, head, embedding)
    elif not tie.tied and not head and embedding and subject.architecture is None and _predicts(subject):
        yield (
            f"config.json: {tie}, and no head is stored: programs start from a random one or fail; set it to "
            "true, if the embedding is the head"
        )


def _tied(subject: Subject, tie: Tie, head: str, embedding: str) -> Iterator[str]:
    """Yield a note on a stored head that differs from its tied embedding, if no rule compares them."""
    ours, theirs = subject.all_layers.get(head), subject.all_layers.get(embedding)
    if not isinstance(ours, LayerDescription) or not isinstance(theirs, LayerDescription):
        return
    if _equal(subject, ours, theirs):
        return
    yield (
        f"{head}: stored as {_shown(ours)}, and {embedding} as {_shown(theirs)}, while {tie}: programs "
        "that tie "
        f"the two ignore the stored head; set {tie.key or TIE} to false in config.json, or remove the head"
    )


def _is_a_finding(subject: Subject, tie: Tie, head: str, embedding: str) -> bool:
    """Return whether the rule `tied-head` reports a difference of the two."""
    ours, theirs = subject.all_layers.get(head), subject.all_layers.get(embedding)
    if not tie.tied or tie.outer or subject.inventory is None:
        return False
    if not isinstance(ours, LayerDescription) or not isinstance(theirs, LayerDescription):
        return False
    plain = ours.format.weight_type.plain and theirs.format.weight_type.plain
    return plain and not _equal(subject, ours, theirs)


def _equal(subject: Subject, ours: LayerDescription, theirs: LayerDescription) -> bool:
    """Return whether two layers have equal bytes; plain layers count as equal while no bytes are read."""
    values: Values | None = vars(subject).get("values")
    if ours.format != theirs.format or ours.sizes != theirs.sizes or ours.dtypes != theirs.dtypes:
        return False
    if values is None:
        return ours.format.weight_type.plain
    pairs = ((ours.names.full(spec.name), theirs.names.full(spec.name)) for spec in ours.specs)
    return all(values.contents[name].digest == values.contents[other].digest for name, other in pairs)


def _shown(layer: LayerDescription) -> str:
    return f"{layer.format.weight_type.format} {(layer.N, layer.K)}"


def _without_head(subject: Subject) -> str:
    """Remedy for contradicting keys without a stored head."""
    return "the head may be in another file" if subject.shard else "no head is stored: set both to true"


def _end(subject: Subject, lasts: tuple[str, ...]) -> str | None:
    """Prefix of the stored head or embedding, by the model type's table or by name; None without one."""
    architecture, inventory = subject.architecture, subject.inventory
    if architecture is not None and inventory is not None:
        table = architecture.table
        (name,) = inventory.spell(table.head if lasts is HEADS else table.embedding)
        return name if name in subject.suffixes else None
    outside = (name for name in subject.suffixes if not any(part.isdecimal() for part in name.split(".")))
    return next((name for name in outside if name.rpartition(".")[2] in lasts), None)


def _predicts(subject: Subject) -> bool:
    """Return whether this is a whole checkpoint of a class for causal language models."""
    classes = subject.model_config.get("architectures")
    named = classes if isinstance(classes, list) else []
    return not subject.shard and any(isinstance(name, str) and name.endswith(CAUSAL) for name in named)


def left_plain(subject: Subject) -> Iterator[str]:
    """Yield a note on plain layers without an entry in the config, if similar layers are quantized."""
    plain, quantized = _matrices(subject)
    kinds = {key for prefix in quantized for key in _alike(prefix)}
    meant = {prefix for _, prefixes in _meaningless(subject) for prefix in prefixes}
    meant |= {prefix for prefix in plain if subject.loader.named.entry(prefix) is not None}
    alike = [prefix for prefix in plain if not kinds.isdisjoint(_alike(prefix))]
    unlisted = [prefix for prefix in alike if prefix not in meant]
    if unlisted:
        like = next(prefix for prefix in quantized if not set(_alike(unlisted[0])).isdisjoint(_alike(prefix)))
        yield (
            f"{unlisted[0]}: plain, while {like} is quantized, and no entry of the config excludes it"
            f"{_more(unlisted)}: programs that follow the config expect quantized tensors, and fail or read "
            f"others; "
            f"exclude {'them' if unlisted[1:] else 'it'} by {subject.loader.named.leaving_out}"
        )


def meaningless_patterns(subject: Subject) -> Iterator[str]:
    """Yield a note on each pattern of modules to quantize that matches plain layers alone."""
    for entry, meant in _meaningless(subject):
        yield (
            f"{meant[0]}: plain, and {entry.key} lists it as quantized by {entry.text!r:.80}"
            f"{_more(meant)}: programs that follow the config expect quantized tensors and fail; "
            "remove the entry"
        )


def _meaningless(subject: Subject) -> Iterator[tuple[PatternEntry, list[str]]]:
    """Yield each pattern that matches plain layers alone, with these layers."""
    if not subject.configs:
        return
    plain, quantized = _matrices(subject)
    for entry in pattern_entries(subject.configs[0]) if plain else ():
        with suppress(ConfigError):  # an invalid pattern, which loads refuse
            meant = [prefix for prefix in plain if entry.means(prefix)]
            if meant and not any(map(entry.means, quantized)):
                yield entry, meant


def unknown_modules(subject: Subject) -> Iterator[str]:
    """Yield a note on modules listed as quantized without a stored layer."""
    named = subject.loader.named
    if subject.shard or not named.keys:
        return
    prefixes = list(map(base_name, subject.suffixes))
    used = {entry[0] for prefix in prefixes if (entry := named.entry(prefix)) is not None}
    unused, text = sorted(named.keys.keys() - used), "".join(f".{prefix}.\n" for prefix in prefixes)
    missing: dict[str, list[str]] = {}
    for name in unused[:SEARCHED]:
        known = (name, *parts(name), *wholes(name))  # with a longer name, as parts, or fused
        if not any(f".{alias}." in text for alias in known):
            missing.setdefault(named.keys[name], []).append(name)
    for key, names in sorted(missing.items()):
        if names != ["lm_head"] or key == "lm_head":  # a target that includes the head fits a tied model
            yield (
                f"{names[0]}: {key} lists it as quantized, and no such layer is stored{_more(names)}: "
                "remove the "
                f"{'entries' if names[1:] else 'entry'}, if no layer was lost"
            )


def _matrices(subject: Subject) -> tuple[list[str], list[str]]:
    """Prefixes of plain matrices without an exclusion, and of quantized layers."""
    plain, quantized = [], []
    for layer in subject.described():
        if not layer.format.weight_type.plain:
            quantized.append(layer.prefix)
        elif "K" in layer.sizes and len(layer.specs) == 1 and not is_adapter(layer.prefix):
            with suppress(ConfigError, MismatchError):
                if subject.loader.left_out(layer.prefix) is None:
                    plain.append(layer.prefix)
    return plain, quantized


def _alike(prefix: str) -> Iterator[str]:
    """Keys shared by similar layers: the same matrix of other blocks, and siblings in the block.

    Blocks of MTP count as other blocks.
    """
    name = base_name(prefix)
    match = LAYER.fullmatch(name)
    if match is None:
        return
    lead = (part for part in (match[1] or "").split(".") if part not in TEXT)
    yield f"{'.'.join(lead)}: {kin.kind(match[2])}"
    parent, _, last = name.rpartition(".")
    yield from (f"{parent}: {group}" for group in kin.SIBLINGS if last in group)


def _more(prefixes: Sequence[str]) -> str:
    return f"; {len(prefixes)} in all" if len(prefixes) > 1 else ""
