"""Notes on what a config and the stored tensors say of each other, where the tensors are sound.

Programs that go by the config alone fail on such a checkpoint, or compute with other weights. Each note is
one sentence for all layers with the same cause, and ends in what to change. Plain layers that the config has
quantized by their names are noted by the loader.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress

from qload.architecture.adapters import REMEDY, adapters_of, base_name, is_adapter
from qload.architecture.config import CAUSAL, TIE, Tie, tie_of
from qload.detect.entries import PatternEntry, pattern_entries
from qload.errors import ConfigError, MismatchError
from qload.loader import LayerDescription
from qload.loader.exclusion import parts, wholes
from qload.verify import kin
from qload.verify.subject import Subject
from qload.verify.values import Values

# The last part of the names of heads and embeddings, of types of model without a table.
HEADS = ("lm_head", "output", "embed_out", "head")
EMBEDDINGS = ("embed_tokens", "tok_embeddings", "wte", "word_embeddings", "embed_in")
WITH_ADAPTERS = ("phi4mm", "phi4_multimodal")  # for what they see and hear
# A name in a list of layers: what stands before and after the number. Segments that name the text model.
LAYER = re.compile(r"(?:(.*?)\.)?(?:mtp_)?(?:layers|h|block|blocks)\.\d+\.(.+)")
TEXT = frozenset(("model", "language_model", "text_model", "transformer", "mtp"))
SEARCHED = 1000  # names of a config that are looked for among all names


def disagreements(subject: Subject) -> Iterator[str]:
    """All notes of this module on one checkpoint."""
    yield from adapters(subject)
    yield from ties(subject)
    yield from left_plain(subject)
    yield from meaningless_patterns(subject)
    yield from unknown_modules(subject)


def adapters(subject: Subject) -> Iterator[str]:
    """A model that PEFT wrapped and that was saved whole; some types of model have adapters of their own."""
    found = adapters_of(subject.names)
    if found is not None and subject.model_config.get("model_type") not in WITH_ADAPTERS:
        yield (
            f"{found}: PEFT saved the model whole, and programs that load it find no such layer or lose what "
            f"was trained; {REMEDY}"
        )


def ties(subject: Subject) -> Iterator[str]:
    """A head that is stored although it is tied, or is neither stored nor tied; keys that contradict.

    A plain head that differs, and one that is missed in a known type of model, are findings of rules.
    """
    tie = tie_of(subject.model_config)
    if tie.tied is None or subject.draft:
        return
    head, embedding = _end(subject, HEADS), _end(subject, EMBEDDINGS)
    if head and embedding and _is_a_finding(subject, tie, head, embedding):
        return
    if tie.denied:
        what = f"{head} is stored: set both to false, if it is meant" if head else _without_head(subject)
        yield f"config.json: {tie}: some programs read the one, some the other; {what}"
    elif tie.tied and head and embedding:
        yield from _tied(subject, tie, head, embedding)
    elif not tie.tied and not head and embedding and subject.architecture is None and _predicts(subject):
        yield (
            f"config.json: {tie}, and no head is stored: programs start from a random one or fail; set it to "
            "true, if the embedding is the head"
        )


def _tied(subject: Subject, tie: Tie, head: str, embedding: str) -> Iterator[str]:
    """A head beside the embedding that it is tied to, where no rule compares them."""
    ours, theirs = subject.all_layers.get(head), subject.all_layers.get(embedding)
    if not isinstance(ours, LayerDescription) or not isinstance(theirs, LayerDescription):
        return
    if _equal(subject, ours, theirs):
        return
    yield (
        f"{head}: stored as {_shown(ours)}, beside {embedding} as {_shown(theirs)}, and {tie}: programs that "
        f"tie the two take the embedding for the head; set {tie.key or TIE} to false in config.json, if the "
        "head is meant, or leave the head out"
    )


def _is_a_finding(subject: Subject, tie: Tie, head: str, embedding: str) -> bool:
    """Whether the rule `tied-head` compares the two, and finds that they differ."""
    ours, theirs = subject.all_layers.get(head), subject.all_layers.get(embedding)
    if not tie.tied or tie.outer or subject.inventory is None:
        return False
    if not isinstance(ours, LayerDescription) or not isinstance(theirs, LayerDescription):
        return False
    plain = ours.format.weight_type.plain and theirs.format.weight_type.plain
    return plain and not _equal(subject, ours, theirs)


def _equal(subject: Subject, ours: LayerDescription, theirs: LayerDescription) -> bool:
    """Whether two layers hold the same bytes, or nobody has looked at the bytes of plain ones."""
    values: Values | None = vars(subject).get("values")
    if ours.format != theirs.format or ours.sizes != theirs.sizes or ours.dtypes != theirs.dtypes:
        return False
    if values is None:
        return ours.format.weight_type.plain
    pairs = ((ours.names.full(spec.name), theirs.names.full(spec.name)) for spec in ours.specs)
    return all(values.contents[one].digest == values.contents[other].digest for one, other in pairs)


def _shown(layer: LayerDescription) -> str:
    return f"{layer.format.weight_type.format} {(layer.N, layer.K)}"


def _without_head(subject: Subject) -> str:
    """What to do about keys that contradict where no head is stored."""
    return "the head may be in another file" if subject.shard else "no head is stored: set both to true"


def _end(subject: Subject, lasts: tuple[str, ...]) -> str | None:
    """The prefix of the head, or the embedding, where one is stored: as the table names it, or by name."""
    architecture, inventory = subject.architecture, subject.inventory
    if architecture is not None and inventory is not None:
        table = architecture.table
        (name,) = inventory.spell(table.head if lasts is HEADS else table.embedding)
        return name if name in subject.suffixes else None
    outside = (name for name in subject.suffixes if not any(part.isdecimal() for part in name.split(".")))
    return next((name for name in outside if name.rpartition(".")[2] in lasts), None)


def _predicts(subject: Subject) -> bool:
    """Whether config.json names a class that predicts words, and this is the whole of it."""
    classes = subject.model_config.get("architectures")
    named = classes if isinstance(classes, list) else []
    return not subject.shard and any(isinstance(name, str) and name.endswith(CAUSAL) for name in named)


def left_plain(subject: Subject) -> Iterator[str]:
    """Plain layers that no entry of the config is about, while others of their kind are quantized."""
    plain, quantized = _matrices(subject)
    kinds = {key for prefix in quantized for key in _alike(prefix)}
    meant = {prefix for _, prefixes in _meaningless(subject) for prefix in prefixes}
    meant |= {prefix for prefix in plain if subject.loader.named.entry(prefix) is not None}
    found = [prefix for prefix in plain if prefix not in meant and not kinds.isdisjoint(_alike(prefix))]
    if found:
        like = next(prefix for prefix in quantized if not set(_alike(found[0])).isdisjoint(_alike(prefix)))
        yield (
            f"{found[0]}: plain, while {like} is quantized, and no entry of the config leaves it out"
            f"{_more(found)}: programs that go by the config look for quantized tensors, and fail or read "
            f"others; "
            f"leave {'them' if found[1:] else 'it'} out by {subject.loader.named.leaving_out}"
        )


def meaningless_patterns(subject: Subject) -> Iterator[str]:
    """Patterns that have modules quantized, of which none is stored quantized."""
    for entry, meant in _meaningless(subject):
        yield (
            f"{meant[0]}: plain, and {entry.key} has it quantized by {entry.text!r:.80}"
            f"{_more(meant)}: programs that go by the config look for quantized tensors and fail; "
            "take the entry out"
        )


def _meaningless(subject: Subject) -> Iterator[tuple[PatternEntry, list[str]]]:
    """The patterns that mean plain layers alone, and these."""
    if not subject.configs:
        return
    plain, quantized = _matrices(subject)
    for entry in pattern_entries(subject.configs[0]) if plain else ():
        with suppress(ConfigError):  # of a pattern that cannot be judged, which loads refuse
            meant = [prefix for prefix in plain if entry.means(prefix)]
            if meant and not any(map(entry.means, quantized)):
                yield entry, meant


def unknown_modules(subject: Subject) -> Iterator[str]:
    """Names of modules that the config has quantized, and of which no layer is stored."""
    named = subject.loader.named
    if subject.shard or not named.keys:
        return
    prefixes = list(map(base_name, subject.suffixes))
    used = {entry[0] for prefix in prefixes if (entry := named.entry(prefix)) is not None}
    unused, text = sorted(named.keys.keys() - used), "".join(f".{prefix}.\n" for prefix in prefixes)
    found: dict[str, list[str]] = {}
    for name in unused[:SEARCHED]:
        known = (name, *parts(name), *wholes(name))  # under a longer name, in parts, or in one with others
        if not any(f".{each}." in text for each in known):
            found.setdefault(named.keys[name], []).append(name)
    for key, names in sorted(found.items()):
        if names != ["lm_head"] or key == "lm_head":  # which a class means too, and a tied model has not
            yield (
                f"{names[0]}: {key} has it quantized, and no such layer is stored{_more(names)}: take the "
                f"{'entries' if names[1:] else 'entry'} out, if no layer was lost"
            )


def _matrices(subject: Subject) -> tuple[list[str], list[str]]:
    """The prefixes of plain matrices that the config does not leave out, and of quantized layers."""
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
    """Keys that a layer has in common with those of its kind: the same of other layers, and its siblings.

    A layer that predicts further words is like the others, wherever it stands.
    """
    name = base_name(prefix)
    found = LAYER.fullmatch(name)
    if found is None:
        return
    lead = (part for part in (found[1] or "").split(".") if part not in TEXT)
    yield f"{'.'.join(lead)}: {kin.kind(found[2])}"
    parent, _, last = name.rpartition(".")
    yield from (f"{parent}: {group}" for group in kin.SIBLINGS if last in group)


def _more(found: Sequence[str]) -> str:
    return f"; {len(found)} in all" if len(found) > 1 else ""
