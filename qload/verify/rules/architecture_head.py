"""What the config says of the head is what is stored: tied to the embedding, or not quantized.

`tie_word_embeddings: true` beside a head of other values has two readings: transformers warns and keeps both
(`tie_weights`), engines never look at the head. `lm_head: false` in a quantization config makes engines look
for a plain head, and fail at a quantized one.
"""

from collections.abc import Iterator

from qload.architecture.config import TIE, Tie, tie_of
from qload.detect.config_reader import HEAD
from qload.spec import named
from qload.verify.chunks import rows
from qload.verify.report import Finding
from qload.verify.rules.rule import Rule
from qload.verify.subject import Subject


def check_tied(rule: Rule, subject: Subject) -> Iterator[Finding]:
    """Report the first row in which a tied head differs from the embedding; drafts are skipped."""
    architecture, inventory = subject.architecture, subject.inventory
    if architecture is None or inventory is None or not architecture.tied or subject.weights is None:
        return
    tie = tie_of(subject.model_config)
    if subject.draft or tie.outer:  # a default of some programs alone is a note
        return
    storage = subject.weights.storage
    head, embedding = (
        named(prefix, "weight")
        for prefix in inventory.spell(architecture.table.head, architecture.table.embedding)
    )
    if not {head, embedding} <= set(storage.keys()) or not subject.unread.keys().isdisjoint(
        (head, embedding)
    ):
        return
    ours, theirs = storage.info(head), storage.info(embedding)
    if not (ours.dtype.is_floating_point and theirs.dtype.is_floating_point):
        return  # one of them is quantized: its bytes say nothing about the other
    if ours.shape != theirs.shape:
        what = f"has shape {ours.shape}, not {theirs.shape}"
        yield _differs(rule, (head, embedding), ours.file, what, tie)
        return
    for start, run in rows(storage, head):
        other = storage.read(embedding, (slice(start, start + len(run)),)[: len(ours.shape)])
        apart = run.float().ne(other.float()).reshape(len(run), -1).any(1).nonzero()
        if apart.numel():
            at = f"differs from row {start + int(apart[0])} on"
            yield _differs(rule, (head, embedding), ours.file, at, tie)
            return


def _differs(rule: Rule, names: tuple[str, str], file: str | None, what: str, tie: Tie) -> Finding:
    head, embedding = names
    why = str(tie) if tie.denied or not tie.key else TIE
    keys = f"{tie.key} and {tie.denied}" if tie.denied else tie.key or TIE
    return rule.finding(
        head,
        file,
        f"{head}: {what}; the config ties it to {embedding} ({why}), so that engines ignore it",
        f"set {keys} to false in config.json, if the head is meant",
    )


def check_plain(rule: Rule, subject: Subject) -> Iterator[Finding]:
    """A quantized head where the config says that it is none."""
    architecture, inventory = subject.architecture, subject.inventory
    said = next((config for config in subject.configs if config.values.get("lm_head") is False), None)
    if said is None:
        return
    head = None  # a model type without a table
    if architecture is not None and inventory is not None:
        (head,) = inventory.spell(architecture.table.head)
    for layer in subject.described():
        is_head = layer.prefix == head if head else layer.prefix.rpartition(".")[2] == HEAD
        if is_head and not layer.format.weight_type.plain:
            name = layer.names.full(layer.specs[0].name)
            yield rule.finding(
                name,
                layer.names.file(layer.specs[0].name),
                f"{name}: the head is {layer.format.weight_type.format}, and {said.file} says that "
                f"{said.key('lm_head')} is false",
                f"set lm_head to true in {said.file}",
            )


TIED = Rule("tied-head", "values", check_tied, "warning")
PLAIN = Rule("quantized-head", "headers", check_plain)
