"""Comparison of a draft model with the target model that it drafts for.

An engine loads both and feeds hidden states of the target into the draft. A draft of another target has other
shapes, or the same ones: then it loads, and no drafted token is accepted. Engines differ in their checks:
vLLM compares vocabularies of independent drafts alone, and layers of hidden states beyond the target's are
never captured. Sources: config/speculative.py, models/llama_eagle3.py and models/interfaces.py
(EagleModelMixin) of vllm-project/vllm, set_eagle3_layers_to_capture of sgl-project/sglang.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from os import fspath
from pathlib import Path
from typing import Any

from qload.architecture.architecture import VOCABULARY_MULTIPLES
from qload.architecture.drafts import LAYER_PREFIX, Draft
from qload.errors import StorageError
from qload.errors.rules import RuleText, rule_texts
from qload.loader import LayerDescription
from qload.storage.files import is_directory, is_taken, load_json, read_whole
from qload.verify.checkpoint import VerifiedCheckpoint
from qload.verify.report import Finding, new_finding
from qload.verify.rules.architecture import join_numbers
from qload.verify.rules.drafts import (
    HIDDEN,
    TARGET_HIDDEN,
    VOCABULARY,
    find_map,
    has_shape,
    joining_layers,
    medusa_layers,
    read_map,
    target_ids,
)

CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
MAX_TOKENIZER_BYTES = 1 << 28
EMBEDDINGS, HEADS = ("embed_tokens", "wte", "tok_embeddings"), ("lm_head", "head", "output")
BORROWERS = ("EAGLE", "EAGLE-3", "DFlash", "MTP")  # kinds that take a missing embedding or head of the target
REMEDY = "take a draft that was trained for this target, or the target of this draft"


@dataclass(frozen=True)
class TargetModel:
    """Sizes of a target model; None for an unknown size."""

    checkpoint: VerifiedCheckpoint
    hidden: int | None
    vocabulary: int | None
    layers: int | None

    @classmethod
    def of(cls, checkpoint: VerifiedCheckpoint) -> "TargetModel":
        """Take the sizes from config.json; the hidden size and the vocabulary also from the embedding."""
        architecture = checkpoint.architecture

        def size(name: str, key: str) -> int | None:
            known = None if architecture is None else architecture.sizes.get(name)
            return known or next(checkpoint.config_integers(key), None)

        embedding = find_layer(checkpoint, EMBEDDINGS)
        return cls(
            checkpoint,
            size("hidden", "hidden_size") or (embedding.K if embedding else None),
            size("vocab", "vocab_size") or (embedding.N if embedding else None),
            size("layers", "num_hidden_layers"),
        )


def find_layer(checkpoint: VerifiedCheckpoint, lasts: tuple[str, ...]) -> LayerDescription | None:
    """Return the first matrix with one of these last segments; None without one."""
    for layer in checkpoint.described():
        if layer.prefix.rpartition(".")[2] in lasts and "K" in layer.sizes:
            return layer
    return None


def check_target(checkpoint: VerifiedCheckpoint, target: VerifiedCheckpoint) -> Iterator[Finding | str]:
    """Yield findings of a draft that does not fit its target, and notes."""
    draft, model = checkpoint.draft, TargetModel.of(target)
    if target.draft is not None:
        message = f"{target.path}: the target is a draft itself, of the kind {target.draft.kind}"
        yield new_finding(
            rule_texts()["target-shape"], None, None, message, "name the model that it drafts for"
        )
        return
    sizes = {
        "hidden_size": model.hidden,
        "vocab_size": model.vocabulary,
        "num_hidden_layers": model.layers,
    }
    for key, size in sizes.items():
        if size is None:
            yield f"the target {target.path} has no {key}: the draft is not compared with it"
    if draft is None:
        yield "no draft by its config and tensors, but an independent model: only vocabularies are compared"
        yield from _check_vocabulary_size(Draft("draft", checkpoint.model_config), model)
    else:
        yield from _check_hidden(checkpoint, draft, model)
        yield from _check_layers(checkpoint, draft, model)
        yield from _check_vocabulary(checkpoint, draft, model)
    yield from _check_tokenizers(checkpoint, target)


def _finding(rule: RuleText, place: LayerDescription | str, fault: str) -> Finding:
    """Make a finding about a matrix, or about a key of config.json."""
    if isinstance(place, str):
        return new_finding(rule, None, CONFIG, f"{CONFIG}: {place}{fault}", REMEDY)
    name = place.specs[0].name
    tensor = place.names.full(name)
    return new_finding(rule, tensor, place.names.file(name), f"{tensor}: {fault}", REMEDY)


def _check_hidden(checkpoint: VerifiedCheckpoint, draft: Draft, model: TargetModel) -> Iterator[Finding]:
    """Report matrices and sizes of a draft for another hidden size than the target's."""
    rule, hidden = rule_texts()["target-shape"], model.hidden
    if hidden is None:
        return
    wrong = [layer for layer in joining_layers(checkpoint) if not _joins(draft, layer, hidden)]
    wrong += [layer for layer, _, _ in medusa_layers(checkpoint) if hidden != layer.K]
    for layer in wrong:
        expected = f"{draft.joined} * {hidden}" if draft.joined else f"a multiple of {hidden}"
        expected = str(hidden) if draft.kind == "Medusa" else expected
        yield _finding(rule, layer, f"{layer.K} inputs, the target's hidden states need {expected}")
    if wrong:
        return
    stated = draft.size("emb_dim", *TARGET_HIDDEN)
    own = draft.number(*HIDDEN)
    if stated is not None and stated[1] != hidden and draft.kind in (*BORROWERS, "MLP speculator", "Medusa"):
        yield _finding(rule, stated[0], f" is {stated[1]}, the target has hidden_size {hidden}")
    elif own is not None and own != hidden and draft.kind in BORROWERS:
        borrowed = [
            name
            for name, lasts in (("embedding", EMBEDDINGS), ("head", HEADS))
            if find_layer(checkpoint, lasts) is None
        ]
        if borrowed and not checkpoint.is_shard:
            yield _finding(
                rule,
                "hidden_size",
                f" is {own}; the draft has no {' and no '.join(borrowed)}, and the target's has {hidden}",
            )


def _joins(draft: Draft, layer: LayerDescription, hidden: int) -> bool:
    """Return whether a projection has the inputs of joined vectors of the target's hidden size."""
    if draft.joined is None:
        return layer.K % hidden == 0
    return has_shape(layer, layer.N, draft.joined * hidden)


def _check_layers(checkpoint: VerifiedCheckpoint, draft: Draft, model: TargetModel) -> Iterator[Finding]:
    """Report tapped layers, layer counts and numbers of MTP layers of another target."""
    rule, count = rule_texts()["target-layer"], model.layers
    if count is None:
        return
    taps = draft.taps
    if taps is not None:
        beyond = [layer for layer in taps.layers if not taps.first <= layer <= taps.last(count)]
        if beyond:
            fault = f" has {join_numbers(beyond, len(beyond))}, the target has {count} layers"
            yield _finding(rule, taps.key, fault)
        elif not taps.reserve and count in taps.layers:
            fault = (
                f" has {count}, the output of the last of {count} layers: SGLang and older versions of vLLM "
                "capture no such state"
            )
            yield replace(_finding(rule, taps.key, fault), severity="warning")
    stated = draft.size("num_target_layers")
    if stated is not None and stated[1] != count:
        yield _finding(rule, stated[0], f" is {stated[1]}, the target has {count} layers")
    if draft.kind == "MTP":
        yield from _check_mtp_numbers(rule, checkpoint, draft, model, count)


def _check_mtp_numbers(
    rule: RuleText, checkpoint: VerifiedCheckpoint, draft: Draft, model: TargetModel, count: int
) -> Iterator[Finding]:
    """Report MTP layers with other numbers than those after the target's layers; layer 0 is a draft's own."""
    numbers = {
        int(match[2]): match[1]
        for name in checkpoint.names
        if not name.startswith("mtp") and (match := LAYER_PREFIX.match(name))
    }
    if not numbers or 0 in numbers:
        return
    architecture = model.checkpoint.architecture
    announced = architecture.sizes.get("predict") if architecture is not None else None
    extra = announced or draft.number("num_nextn_predict_layers") or 1
    wrong = sorted(number for number in numbers if not count <= number < count + extra)
    if wrong:
        name, last = numbers[wrong[0]], count + extra - 1
        lawful = str(count) if extra == 1 else f"{count} to {last}"
        message = (
            f"{name}: an MTP layer; the target has {count} layers, and its MTP layers are number {lawful}"
        )
        yield new_finding(rule, name, None, message, REMEDY)


def _check_vocabulary(checkpoint: VerifiedCheckpoint, draft: Draft, model: TargetModel) -> Iterator[Finding]:
    """Report sizes, outputs and ids of a draft for another vocabulary than the target's."""
    rule, vocabulary = rule_texts()["target-vocabulary"], model.vocabulary
    if vocabulary is None:
        return
    sizes = list(_check_vocabulary_size(draft, model))
    yield from sizes
    name = find_map(checkpoint, "d2t")
    offsets = None if name is None else read_map(checkpoint, name)
    if name is not None and offsets is not None and len(offsets):
        ids = target_ids(offsets)
        last = int(ids.argmax())
        if int(ids[last]) >= vocabulary:
            file = checkpoint.weights.storage.info(name).file
            fault = f"{name}: id {last} is the target's id {int(ids[last])}, the target has {vocabulary}"
            yield new_finding(rule, name, file, fault, REMEDY)
    if sizes:
        return
    matrices = [find_layer(checkpoint, EMBEDDINGS)]
    if offsets is None and draft.number("truncated_vocab_size", "draft_vocab_size") in (None, vocabulary):
        matrices += [find_layer(checkpoint, HEADS)]
        matrices += [layer for layer, _, output in medusa_layers(checkpoint) if output]
    for layer in filter(None, matrices):
        if not fits_vocabulary(layer.N, vocabulary):
            yield _finding(rule, layer, f"{layer.N} rows, the target has {vocabulary} ids")


def _check_vocabulary_size(draft: Draft, model: TargetModel) -> Iterator[Finding]:
    """Report another vocabulary size; a padded one is a warning."""
    stated = draft.size(*VOCABULARY)
    if stated is None or model.vocabulary is None or stated[1] == model.vocabulary:
        return
    finding = _finding(
        rule_texts()["target-vocabulary"],
        stated[0],
        f" is {stated[1]}, the target has {model.vocabulary}",
    )
    less, more = sorted((stated[1], model.vocabulary))
    padded = fits_vocabulary(more, less)
    yield replace(finding, severity="warning") if padded else finding


def fits_vocabulary(size: int, vocabulary: int) -> bool:
    """Return whether a size is that of a vocabulary, or of one padded to a usual multiple."""
    return size == vocabulary or size in {-(-vocabulary // block) * block for block in VOCABULARY_MULTIPLES}


def _check_tokenizers(checkpoint: VerifiedCheckpoint, target: VerifiedCheckpoint) -> Iterator[Finding | str]:
    """Report the first id with another token than in the target's tokenizer.json, if both have the file."""
    vocabularies = []
    for side in (checkpoint, target):
        try:
            vocabularies.append(_vocabulary_of(side))
        except StorageError as error:
            yield f"the tokenizers are not compared: {error}"
            return
    ours, theirs = vocabularies
    different = sorted(id for id in ours.keys() & theirs.keys() if ours[id] != theirs[id])
    if different:
        first = different[0]
        message = (
            f"{TOKENIZER}: id {first} is {ours[first]!r:.80}, in the target's {theirs[first]!r:.80}; "
            f"{len(different)} ids differ"
        )
        yield new_finding(rule_texts()["target-vocabulary"], None, TOKENIZER, message, REMEDY)


def _vocabulary_of(checkpoint: VerifiedCheckpoint) -> Mapping[int, str]:
    """Read id -> token from tokenizer.json, without added tokens, which models rename; empty without them."""
    place = Path(fspath(checkpoint.location))
    folder = place if is_directory(place) else place.parent
    if not is_taken(folder / TOKENIZER, TOKENIZER):
        return {}
    text = read_whole(folder / TOKENIZER, TOKENIZER, MAX_TOKENIZER_BYTES, "config")
    content = load_json(text, TOKENIZER, "config")
    model = content.get("model")
    vocabulary: Any = model.get("vocab") if isinstance(model, dict) else None
    added = content.get("added_tokens")
    renamed = (
        {token.get("id") for token in added if isinstance(token, dict)} if isinstance(added, list) else ()
    )
    if isinstance(vocabulary, list):  # of a unigram model: [token, score] by id
        pairs = [(each[0], id) for id, each in enumerate(vocabulary) if isinstance(each, list) and each]
    else:
        pairs = list(vocabulary.items()) if isinstance(vocabulary, dict) else []
    return {
        id: token for token, id in pairs if type(id) is int and isinstance(token, str) and id not in renamed
    }
