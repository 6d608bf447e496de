"""Rules of draft models for speculative decoding: their own matrices, and the maps of their vocabulary.

`qload.verify.target` compares a draft with its target. Engines that load a draft take shapes from its config,
and read d2t without a check: an id outside of the target's vocabulary is an access out of bounds on the GPU.
Sources: llama_eagle3.py and medusa.py of vllm-project/vllm, llama_eagle3.py of sgl-project/sglang, cnets.py
of SafeAILab/EAGLE.
"""

from collections.abc import Iterator

from qload.architecture.architecture import SHOWN, absent
from qload.architecture.drafts import JOINING, TAPPING, Draft, medusa_head
from qload.lazy_torch import Tensor, torch
from qload.loader import LayerDescription
from qload.verify.checkpoint import VerifiedCheckpoint
from qload.verify.report import Finding
from qload.verify.rules.architecture import join_numbers
from qload.verify.rules.rule import Rule

HIDDEN, TARGET_HIDDEN = ("hidden_size",), ("target_hidden_size", "hidden_size")
VOCABULARY, DRAFT_VOCABULARY = ("vocab_size",), ("draft_vocab_size", "vocab_size")
MEDUSA_VOCABULARY = ("truncated_vocab_size", "vocab_size")
MEDUSA_HEADS = ("medusa_num_heads", "num_heads")
MAX_IDS = 1 << 24  # of a map; larger vocabularies are implausible
STORE_OFFSETS = "store offsets in d2t: the target's id less the draft's"


def check_shapes(rule: Rule, checkpoint: VerifiedCheckpoint) -> Iterator[Finding]:
    """Report a projection or a Medusa head with another shape than by the draft's config, and lost heads."""
    draft = checkpoint.draft
    if draft is None:
        return
    for layer in joining_layers(checkpoint):
        yield from _check_joining(rule, draft, layer)
    heads = list(medusa_layers(checkpoint))
    if heads:
        yield from _check_medusa(rule, checkpoint, draft, heads)


def joining_layers(checkpoint: VerifiedCheckpoint) -> Iterator[LayerDescription]:
    """Yield the projections of joined vectors: `fc`, `eh_proj`."""
    for layer in checkpoint.described():
        if layer.prefix.rpartition(".")[2] in JOINING and "K" in layer.sizes:
            yield layer


def medusa_layers(checkpoint: VerifiedCheckpoint) -> Iterator[tuple[LayerDescription, int, bool]]:
    """Yield the matrices of Medusa heads, with the number of the head, and whether it has the outputs."""
    if checkpoint.draft is None or checkpoint.draft.kind != "Medusa":
        return
    for layer in checkpoint.described():
        head = medusa_head(layer.prefix)
        if head is not None and "K" in layer.sizes:
            yield (layer, *head)


def has_shape(layer: LayerDescription, N: int, K: int) -> bool:
    """Return whether a layer has a shape, as it is or padded by its format."""
    return (layer.N, layer.K) in ((N, K), layer.format.weight_type.pad(N, K))


def _check_joining(rule: Rule, draft: Draft, layer: LayerDescription) -> Iterator[Finding]:
    """Report a projection with other outputs than hidden_size, or inputs than the joined vectors have."""
    taps = draft.taps if draft.kind in TAPPING else None
    outputs, inputs = draft.size(*HIDDEN), draft.size(*(TARGET_HIDDEN if draft.kind in TAPPING else HIDDEN))
    if outputs is None or inputs is None:
        return
    count = draft.joined or layer.K // inputs[1] or 1
    N, K = outputs[1], count * inputs[1]
    if not has_shape(layer, N, K):
        of_layers = f" of {taps.key}" if taps else ""
        yield rule.field_finding(
            layer,
            layer.specs[0].name,
            f"(N, K) is {(layer.N, layer.K)}; for {count} vectors{of_layers} config.json says {(N, K)} "
            f"({outputs[0]}, {count} * {inputs[0]})",
        )


def _check_medusa(
    rule: Rule,
    checkpoint: VerifiedCheckpoint,
    draft: Draft,
    heads: list[tuple[LayerDescription, int, bool]],
) -> Iterator[Finding]:
    """Report lost heads, and matrices that are not (hidden, hidden) or (vocabulary, hidden)."""
    count = draft.size(*MEDUSA_HEADS)
    stored = {number for _, number, _ in heads}
    if count is not None and not checkpoint.is_shard:
        first, lost = absent(count[1], stored)
        beyond = sorted(number for number in stored if number >= count[1])
        if lost:
            text = f"config.json: {count[0]} is {count[1]}, and {lost} of these heads have no tensor: "
            yield rule.finding(None, "config.json", text + join_numbers(first, lost))
        if beyond:
            text = f"config.json: {count[0]} is {count[1]}, and further heads are stored: "
            yield rule.finding(None, "config.json", text + join_numbers(beyond[:SHOWN], len(beyond)))
    hidden = draft.number(*HIDDEN) or heads[0][0].K
    outputs = [layer.N for layer, _, output in heads if output]
    vocabulary = draft.number(*MEDUSA_VOCABULARY) or (outputs[0] if outputs else 0)
    for layer, _, output in heads:
        N = vocabulary if output else hidden
        if not has_shape(layer, N, hidden):
            what = "(vocab_size, hidden_size)" if output else "(hidden_size, hidden_size)"
            fault = f"(N, K) is {(layer.N, layer.K)}, expected {(N, hidden)} {what}"
            yield rule.field_finding(layer, layer.specs[0].name, fault)


def find_map(checkpoint: VerifiedCheckpoint, last: str) -> str | None:
    """Return the name of a map of vocabularies, `d2t` or `t2d`, at the top or under a prefix."""
    return next((name for name in checkpoint.names if name.rpartition(".")[2] == last), None)


def read_map(checkpoint: VerifiedCheckpoint, name: str) -> Tensor | None:
    """Read a map as integers; None for a tensor that is no list of integers or booleans."""
    info = checkpoint.weights.storage.info(name)
    if len(info.shape) != 1 or info.dtype.is_floating_point or info.shape[0] > MAX_IDS:
        return None
    return checkpoint.weights.storage.read(name).to(torch.int64)


def target_ids(offsets: Tensor) -> Tensor:
    """Return the ids in the target's vocabulary, by the offsets of d2t."""
    return torch.arange(len(offsets)) + offsets


def check_vocabulary(rule: Rule, checkpoint: VerifiedCheckpoint) -> Iterator[Finding]:
    """Report maps of vocabularies that contradict each other, the head, or the sizes of the config."""
    draft = checkpoint.draft
    name = find_map(checkpoint, "d2t") if draft is not None else None
    if draft is None or name is None:
        return
    offsets = read_map(checkpoint, name)
    if offsets is None:
        info = checkpoint.weights.storage.info(name)
        yield rule.tensor_finding(
            checkpoint, name, f"{info.dtype} of shape {info.shape}, not an integer for each id of the draft"
        )
        return
    yield from _check_length(rule, checkpoint, draft, name, len(offsets))
    vocabulary = draft.size(*VOCABULARY)
    ids = target_ids(offsets)
    if fault := _fault_of_ids(ids, offsets, vocabulary):
        yield rule.tensor_finding(checkpoint, name, *fault)
        return
    mask_name = find_map(checkpoint, "t2d")
    if mask_name is not None:
        yield from _check_mask(rule, checkpoint, (name, mask_name), ids, vocabulary)


def _check_length(
    rule: Rule, checkpoint: VerifiedCheckpoint, draft: Draft, name: str, length: int
) -> Iterator[Finding]:
    """Report a d2t with another number of ids than the config and the draft's head have."""
    size = draft.size(*DRAFT_VOCABULARY)
    if size is not None and size[1] != length:
        fault = f"{length} ids, and config.json says that {size[0]} is {size[1]}"
        yield rule.tensor_finding(checkpoint, name, fault)
        return
    head = next((layer for layer in checkpoint.described() if layer.prefix.endswith("lm_head")), None)
    if head is not None and not has_shape(head, length, head.K):
        yield rule.tensor_finding(checkpoint, name, f"{length} ids, and {head.prefix} has {head.N} outputs")


def _fault_of_ids(ids: Tensor, offsets: Tensor, vocabulary: tuple[str, int] | None) -> tuple[str, str] | None:
    """Return the first fault of the target's ids, with its remedy: out of range, or not increasing."""
    limit = MAX_IDS if vocabulary is None else vocabulary[1]
    outside, unordered = (ids < 0) | (ids >= limit), torch.diff(ids, prepend=ids[:1] - 1) <= 0
    remedy = ""
    if bool(outside.any()):
        wrong, fault = outside, "outside of the target's vocabulary"
        fault += f" ({vocabulary[0]} is {vocabulary[1]})" if vocabulary else ""
        if bool((torch.diff(offsets, prepend=torch.tensor([-1])) > 0).all()) and int(offsets[-1]) < limit:
            remedy = STORE_OFFSETS
    elif bool(unordered.any()):
        wrong, fault = unordered, "not above the one before it"
    else:
        return None
    at, count = int(wrong.nonzero()[0]), int(wrong.sum())
    return f"{int(offsets[at])} at {at} is the target's id {int(ids[at])}, {fault}; {count} in all", remedy


def _check_mask(
    rule: Rule,
    checkpoint: VerifiedCheckpoint,
    names: tuple[str, str],
    ids: Tensor,
    vocabulary: tuple[str, int] | None,
) -> Iterator[Finding]:
    """Report a t2d of another length than the vocabulary, or with other ids than d2t."""
    map_name, name = names
    mask = read_map(checkpoint, name)
    if mask is None or (vocabulary is not None and len(mask) != vocabulary[1]):
        info = checkpoint.weights.storage.info(name)
        size = f" ({vocabulary[0]} is {vocabulary[1]})" if vocabulary else ""
        fault = f"{info.dtype} of shape {info.shape}, not a boolean for each id of the target{size}"
        yield rule.tensor_finding(checkpoint, name, fault)
        return
    marked = mask.nonzero().reshape(-1)
    if not len(marked) and len(ids) == len(mask):  # unused: both vocabularies are one
        return
    if len(marked) != len(ids):
        fault = f"{len(marked)} ids of the target are True, and {map_name} has {len(ids)}"
        yield rule.tensor_finding(checkpoint, name, fault)
    elif not torch.equal(marked, ids):
        at = int(marked.ne(ids).nonzero()[0])
        fault = f"True number {at} is at {int(marked[at])}, and {map_name} has the target's id {int(ids[at])}"
        remedy = STORE_OFFSETS if torch.equal(marked, ids - torch.arange(len(ids))) else ""
        yield rule.tensor_finding(checkpoint, name, fault, remedy)
