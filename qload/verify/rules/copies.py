"""Rules of repeated data: a layer that equals another, and blocks of bytes that occur twice in a tensor.

A matrix that was written over another, or an `up_proj` that equals the `gate_proj`, has the right shape and
valid values. Models made of other models repeat whole layers with their norms; that is a note and no finding.
A download that resumed at the wrong place writes stored bytes again. In codes, 256 equal bytes do not occur
twice by chance; in a vocabulary they do, in the rows of untrained tokens.
"""

import re
from collections.abc import Callable, Iterator, Mapping

import torch

from qload.architecture.names import NOT_A_LAYER, block_of, is_matrix_name
from qload.spec import Role
from qload.verify.blocks import BLOCK_BYTES, pieces, read_span
from qload.verify.checkpoint import VerifiedCheckpoint
from qload.verify.report import Finding
from qload.verify.rules.rule import Rule
from qload.verify.rules.unwritten import is_zero_weight, zero_outputs

MIN_COPY_BYTES = 256  # equal bytes, too many for an accident
MIN_MERGED_UNITS = 2  # copied layers, or experts, from this number on are by design
MIN_SHARING_LAYERS = (
    4  # layers with some matrices of other layers; from this number on they share them by design
)
EXPERT = re.compile(r"(.*\.experts\.\d+)\.")
REPEATED_HEADS = ("k_proj", "v_proj")  # their heads may be stored several times, if all are


def check_copies(rule: Rule, checkpoint: VerifiedCheckpoint) -> Iterator[Finding]:
    """Report each tensor that is a copy of an earlier one."""
    copies = {name: of for name, of in _copies(checkpoint).items() if _has_equal_bytes(checkpoint, name, of)}
    merged = _merged_units(checkpoint, copies)
    for name, of in copies.items():
        if merged.isdisjoint((block_of(name), _expert_of(name))):
            yield rule.finding(
                name,
                checkpoint.weights.info(name).file,
                f"{name}: equal to {of}, byte for byte",
                "write the checkpoint again: one of the two belongs to another layer",
            )


def repeated_layers(checkpoint: VerifiedCheckpoint) -> Mapping[str, str]:
    """Return layer -> the earlier layer with all equal tensors, apart from outputs that are all zero."""
    return _equal_layers(checkpoint, _copied_units(checkpoint, _copies(checkpoint), block_of))


def _copies(checkpoint: VerifiedCheckpoint) -> Mapping[str, str]:
    """Return name -> the first tensor with the same digest, dtype and shape."""
    originals: dict[object, str] = {}
    copies = {}
    for name in checkpoint.readable_names:
        contents = checkpoint.values.contents[name]
        if contents.nbytes < MIN_COPY_BYTES or contents.word is not None or not _is_unique(checkpoint, name):
            continue
        first = originals.setdefault(_content_key(checkpoint, name), name)
        if first != name:
            copies[name] = first
    return copies


def _content_key(checkpoint: VerifiedCheckpoint, name: str) -> object:
    """Return a key that equal tensors share."""
    info = checkpoint.weights.info(name)
    return checkpoint.values.contents[name].digest, info.dtype, info.shape


def _is_unique(checkpoint: VerifiedCheckpoint, name: str) -> bool:
    """Return whether a tensor is a layer's codes or matrix, without a lawful copy."""
    if block_of(name) is None or NOT_A_LAYER.search(name):
        return False
    if checkpoint.is_codes(name):
        return True
    numbers, shape = checkpoint.values.numbers.get(name), checkpoint.weights.info(name).shape
    if numbers is None or not is_matrix_name(name) or len(shape) < 2:
        return False
    return numbers.quantiles[0] < numbers.quantiles[2]


def _has_equal_bytes(checkpoint: VerifiedCheckpoint, name: str, other: str) -> bool:
    """Compare the bytes of two tensors; their digests are made of sums."""
    storage = checkpoint.weights.storage
    both = zip(pieces(storage, name), pieces(storage, other), strict=True)
    return all(ours.view(torch.uint8).equal(theirs.view(torch.uint8)) for ours, theirs in both)


def _merged_units(checkpoint: VerifiedCheckpoint, copies: Mapping[str, str]) -> set[str | None]:
    """Return layers and experts that are copies by design.

    Several layers or experts with all matrices of another are by design; a single layer, if everything is
    equal. A model may also share some matrices between several layers.
    """
    if not copies:
        return set()
    layers = _copied_units(checkpoint, copies, block_of)
    within = {name: of for name, of in copies.items() if block_of(name) == block_of(of)}
    sharing = {block_of(name) for name, of in copies.items() if block_of(name) != block_of(of)}
    experts = _copied_units(checkpoint, within, _expert_of)
    limits = ((layers, MIN_MERGED_UNITS), (experts, MIN_MERGED_UNITS), (sharing, MIN_SHARING_LAYERS))
    merged = {unit for units, least in limits if len(units) >= least for unit in units}
    return merged | _equal_layers(checkpoint, layers).keys()


def _copied_units(
    checkpoint: VerifiedCheckpoint, copies: Mapping[str, str], unit_of: Callable[[str], str | None]
) -> Mapping[str, str]:
    """Return each unit (layer or expert) -> another unit with all its matrices, apart from zero outputs."""
    if not copies:
        return {}
    zeros, members = zero_outputs(checkpoint), dict[str, list[str]]()
    for name in checkpoint.readable_names:
        unit = unit_of(name)
        if unit is not None and checkpoint.prefixes[name] not in zeros and _is_unique(checkpoint, name):
            members.setdefault(unit, []).append(name)
    copied = {}
    for unit, names in members.items():
        sources = {unit_of(copies[name]) if name in copies else unit for name in names}
        other = sources.pop()
        if len(names) > 1 and not sources and other not in (None, unit):
            copied[unit] = other
    return copied


def _equal_layers(checkpoint: VerifiedCheckpoint, layers: Mapping[str, str]) -> Mapping[str, str]:
    """Return the layers whose tensors, norms and scales included, all equal another's, apart from zeros."""
    zeros = zero_outputs(checkpoint) if layers else frozenset()
    under: dict[str, list[str]] = {}
    for name in checkpoint.readable_names if layers else ():
        block = block_of(name)
        if block is not None and checkpoint.prefixes[name] not in zeros:
            under.setdefault(block, []).append(name)

    def is_equal(block: str, other: str) -> bool:
        pairs = {name: other + name.removeprefix(block) for name in under[block]}
        known = set(under.get(other, ()))
        return all(
            theirs in known and _content_key(checkpoint, ours) == _content_key(checkpoint, theirs)
            for ours, theirs in pairs.items()
        )

    return {block: other for block, other in layers.items() if is_equal(block, other)}


def _expert_of(name: str) -> str | None:
    """Return the expert of a tensor; None outside of experts."""
    match = EXPERT.match(name)
    return match[1] if match else None


def check_repeats(rule: Rule, checkpoint: VerifiedCheckpoint) -> Iterator[Finding]:
    """Report each tensor with a repeated block: both places, and the number of repeated blocks."""
    storage = checkpoint.weights.storage
    for name in checkpoint.readable_names:
        repeats = checkpoint.values.contents[name].repeats
        if repeats is None or block_of(name) is None or not _is_varied(checkpoint, name):
            continue
        if any(part in name for part in REPEATED_HEADS) and 2 * repeats.count >= repeats.blocks:
            continue
        first = read_span(storage, name, repeats.first, BLOCK_BYTES)
        same = first.equal(read_span(storage, name, repeats.again, BLOCK_BYTES))
        if same and not is_zero_weight(checkpoint, name, repeats.again, BLOCK_BYTES):
            yield rule.finding(
                name,
                storage.info(name).file,
                f"{name}: the {BLOCK_BYTES} bytes from {repeats.again} on are those from {repeats.first} on; "
                f"{repeats.count} of {repeats.blocks} blocks are stored before",
                "fetch the file again",
            )


def _is_varied(checkpoint: VerifiedCheckpoint, name: str) -> bool:
    """Return whether a tensor is codes, or a matrix of more than two values; a rotation has two."""
    if checkpoint.is_codes(name):
        return True
    numbers = checkpoint.values.numbers.get(name)
    matrix = checkpoint.role(name) is Role.FLOAT and len(checkpoint.weights.info(name).shape) > 1
    if numbers is None or not matrix or not is_matrix_name(name):
        return False
    return numbers.quantiles[0] < numbers.quantiles[2]
