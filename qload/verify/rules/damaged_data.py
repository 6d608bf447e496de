"""Rules of data that was never written, or written twice: constants, runs of a byte, copies, repeats.

A buffer that was allocated and never filled contains zeros, ones, or its initial value: it has the right
dtype and shape, and valid values. A download that was cut and resumed leaves zeros from one page or chunk of
the file to another, and so from within a row to within a row.

Runs of zeros are sound if inputs or outputs were padded or pruned: whole rows of zeros, up to half of a
matrix, and zeros at the same place of several rows. A byte of codes shows nothing by itself, because a group
of zeros has the codes of its zero point; the dequantized weights decide. Layers that were added to a model
and do nothing yet are sound too: they copy the layer before, and their `o_proj` and `down_proj` are zeros.
Source: Wu et al., LLaMA Pro: Progressive LLaMA with Block Expansion, 2024.

A matrix that was written over another, or an `up_proj` that equals the `gate_proj`, has the right shape and
valid values. Models made of other models repeat whole layers with their norms; that is a note and no finding.
A download that resumed at the wrong place writes stored bytes again. In codes, 256 equal bytes do not occur
twice by chance; in a vocabulary they do, in the rows of untrained tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod

from qload.architecture.names import NOT_A_LAYER, block_of, group_by_pattern, is_matrix_name, pattern_of
from qload.errors import QloadError
from qload.formats import Exl2Config
from qload.lazy_torch import Tensor, torch
from qload.loader import LayerDescription, Part
from qload.loader.sharding import granule
from qload.spec import Role
from qload.storage import ComfyStorage
from qload.verify.blocks import BLOCK_BYTES, pieces, read_span
from qload.verify.checkpoint import VerifiedCheckpoint
from qload.verify.report import Finding
from qload.verify.rules.rule import Rule
from qload.verify.values import Run

# constant-values
NORM = re.compile(r".*(?:norm\w*|\bln_\w+)\.weight", re.IGNORECASE)
# Types of model that add one to their norms. Source: transformers 5.23.0.
NORM_PLUS_ONE = re.compile(r"gemma|qwen3_(?:5|next)|minimax_m3|minicpm(?:_ocr|v4)|step3p")
MIN_CONSTANT_BYTES = 64  # equal bytes, too many for an accident

# hole
MIN_RUN_BYTES = 512  # sound codes have runs of 12 at most, and damaged ones of 4,096
EDGE_BYTES = 64  # beyond whole rows
MAX_ZERO_PART = 2  # rows of zeros are less than a half of a matrix: padding to any power of two is

# Zero weights
CHECKED_OUTPUTS = 16  # at most
MAX_CHECKED_WEIGHTS = 1 << 22  # if a layer cannot be split; larger layers are not checked
MIN_STRIPES = 4  # rows with zeros at the same place
STRIPE_EDGE_BYTES = 8  # by which equal neighbours extend a run

# Output projections, by the names of published checkpoints, and the mark of those of attention.
OUTPUT_PROJECTION = re.compile(r"(o|out|down|c)_proj|w2|wo|fc2|dense|dense_4h_to_h")
ATTENTION = re.compile(r"attn|attention")


def check_constants(rule: Rule, checkpoint: VerifiedCheckpoint) -> Iterator[Finding]:
    """Report each constant tensor, and a tensor of its kind that varies."""
    contents, zeros = checkpoint.values.contents, zero_outputs(checkpoint)
    groups = (_codes(checkpoint), _scales(checkpoint), _matrices(checkpoint), _norms(checkpoint))
    for group in groups:
        varying = [name for name in group if contents[name].word is None]
        by_pattern = group_by_pattern(group)
        varied = {
            pattern: next((other for other in names if contents[other].word is None), None)
            for pattern, names in by_pattern.items()
        }
        for name in group:
            word = contents[name].word
            small = contents[name].nbytes < MIN_CONSTANT_BYTES
            if word is None or small or checkpoint.prefixes[name] in zeros:
                continue
            pattern = pattern_of(name)
            other = varied[pattern]
            if other is None and len(by_pattern[pattern]) == 1 and not group[name]:
                other = next(iter(varying), None)
            if other is not None:
                why = f"those of {other} differ"
            elif _is_multiplier(checkpoint, name, word):
                why = "the model multiplies by its norms"
            else:
                continue
            fault = (
                f"all {contents[name].nbytes} bytes repeat {_hex_word(word)}, and {why}: it was never filled"
            )
            yield rule.tensor_finding(checkpoint, name, fault, "fetch or write the checkpoint again")


# name -> True if only tensors of the same pattern show the usual contents


def _codes(checkpoint: VerifiedCheckpoint) -> Mapping[str, bool]:
    return {
        layer.names.full(spec.name): False
        for layer in checkpoint.described()
        for spec in layer.specs[:1]
        if not layer.format.weight_type.plain
        and getattr(layer.format.config, "group_size", None) != 1  # the weight of a group has the code 0
    }


def _scales(checkpoint: VerifiedCheckpoint) -> Mapping[str, bool]:
    storage = checkpoint.weights.storage
    is_repeated = storage.is_repeated if isinstance(storage, ComfyStorage) else lambda name: False
    return {
        name: True
        for layer in checkpoint.described()
        for spec in layer.specs
        if spec.role is Role.SCALE and not spec.is_exponents
        if not is_repeated(name := layer.names.full(spec.name))
    }


def _matrices(checkpoint: VerifiedCheckpoint) -> Mapping[str, bool]:
    matrices = {}
    for name in checkpoint.readable_names:
        shape = checkpoint.weights.info(name).shape
        is_float = name in checkpoint.values.numbers and checkpoint.role(name) is Role.FLOAT
        if is_float and len(shape) > 1 and min(shape) > 1 and "lora" not in name:
            matrices[name] = not name.endswith(".weight") or len(shape) > 2
    return matrices


def _norms(checkpoint: VerifiedCheckpoint) -> Mapping[str, bool]:
    """Return norms that are all zero; any other constant is an initial value."""
    norms = {}
    for name in checkpoint.readable_names:
        numbers = checkpoint.values.numbers.get(name)
        if numbers and NORM.fullmatch(name) and checkpoint.values.contents[name].word in (None, 0):
            norms[name] = False
    return norms


def _is_multiplier(checkpoint: VerifiedCheckpoint, name: str, word: int) -> bool:
    """Return whether a tensor of zeros is a norm that the model multiplies by as it is stored."""
    architecture = checkpoint.architecture
    if word or not NORM.fullmatch(name) or architecture is None:
        return False
    return not NORM_PLUS_ONE.search(architecture.type) and architecture.find(name) is not None


def _hex_word(word: int) -> str:
    return "zeros" if not word else f"0x{word % 2**64:016x}"


def check_holes(rule: Rule, checkpoint: VerifiedCheckpoint) -> Iterator[Finding]:
    """Report each tensor with a run of one byte that no rows of zeros explain: its place and length."""
    for name in checkpoint.readable_names:
        contents = checkpoint.values.contents[name]
        if contents.word is not None:
            continue
        width = _checked_row_bytes(checkpoint, name)
        long = [run for run in contents.runs if run.length >= MIN_RUN_BYTES] if width else []
        stripes = zero_stripes(checkpoint, name, long, width) if long else frozenset()
        for run in long:
            if run not in stripes and not _is_zero_rows(checkpoint, name, run, width, contents.nbytes):
                place = f"{run.length} bytes of 0x{run.byte:02x} from byte {run.first} on"
                fault = f"{place}, of {contents.nbytes}: nothing was written there"
                yield rule.tensor_finding(checkpoint, name, fault, "fetch or write the file again")
                break


def _checked_row_bytes(checkpoint: VerifiedCheckpoint, name: str) -> int:
    """Return the bytes of a row of a matrix; 0 for a tensor with lawful runs."""
    info, spec = checkpoint.weights.info(name), checkpoint.specs.get(name)
    layer = checkpoint.layer_of(name)
    if spec is not None and layer is not None and not layer.format.weight_type.plain:
        if not checkpoint.is_codes(name) or getattr(layer.format.config, "bits", None) == 1:
            return 0  # symmetric codes of one bit are nearly all 0
        if info.shape[-1] == 1:  # bytes in one dimension over the matrix
            return max(1, info.nbytes // max(1, layer.N))
    elif name not in checkpoint.values.numbers or len(info.shape) < 2 or not is_matrix_name(name):
        return 0
    rows = prod(info.shape[:-1]) if len(info.shape) < 4 else prod(info.shape[:2])
    return info.nbytes // max(1, rows)


def _is_zero_rows(checkpoint: VerifiedCheckpoint, name: str, run: Run, width: int, nbytes: int) -> bool:
    """Return whether a run is whole rows of zero weights, less than half of all; a hole has any bounds."""
    layer, stop = checkpoint.layer_of(name), run.first + run.length
    if layer is not None and has_mixed_widths(layer):
        return is_zero_weight(checkpoint, name, 0, nbytes)
    first, last = -(-run.first // width), stop // width
    # The neighbours of a row of zeros may begin or end with zeros too.
    at_rows = first * width - run.first < EDGE_BYTES and stop - last * width < EDGE_BYTES
    rows = last - first
    if not at_rows or rows < 1 or rows * width * MAX_ZERO_PART >= nbytes:
        return False
    if checkpoint.is_codes(name):
        return is_zero_weight(checkpoint, name, first * width, rows * width)
    return run.byte == 0


def zero_outputs(checkpoint: VerifiedCheckpoint) -> frozenset[str]:
    """Return the prefixes of zero output projections of layers with zero attention and zero MLP outputs."""
    zero: dict[str, dict[str, bool]] = {}
    for name, prefix in _output_projections(checkpoint).items():
        block = block_of(name)
        if block is not None:
            zero.setdefault(block, {})[prefix] = is_zero(checkpoint, name)
    zeros: set[str] = set()
    for prefixes in zero.values():
        kinds = {ATTENTION.search(prefix) is not None for prefix in prefixes}
        if len(kinds) == 2 and all(prefixes.values()):
            zeros.update(prefixes)
    return frozenset(zeros)


def is_zero(checkpoint: VerifiedCheckpoint, name: str) -> bool:
    """Return whether the weights of a plain matrix or of codes are zero; codes of mixed widths differ."""
    contents = checkpoint.values.contents[name]
    if not checkpoint.is_codes(name):
        return contents.word == 0
    statistics = checkpoint.values.statistics.get(checkpoint.prefixes[name])
    constant = contents.word is not None or (statistics is not None and not statistics.deviation)
    return constant and is_zero_weight(checkpoint, name, 0, contents.nbytes)


def _output_projections(checkpoint: VerifiedCheckpoint) -> Mapping[str, str]:
    """Return name -> prefix of each output projection, a plain matrix or codes."""
    projections = {}
    for name in checkpoint.readable_names:
        prefix = checkpoint.prefixes[name]
        if OUTPUT_PROJECTION.fullmatch(prefix.rpartition(".")[2]):
            plain = name == f"{prefix}.weight" and len(checkpoint.weights.info(name).shape) > 1
            if plain or checkpoint.is_codes(name):
                projections[name] = prefix
    return projections


def outer_row_bytes(checkpoint: VerifiedCheckpoint, name: str) -> int:
    """Return the bytes of a row of the outermost axis; of one output, if the bytes are in one dimension."""
    info, layer = checkpoint.weights.info(name), checkpoint.layer_of(name)
    flat = len(info.shape) == 2 and info.shape[-1] == 1 and layer is not None
    rows = layer.N if flat and layer is not None else info.shape[0]
    return max(1, info.nbytes // max(1, rows))


def has_mixed_widths(layer: LayerDescription) -> bool:
    """Return whether codes of several widths fill the words, so that no row has fixed inputs."""
    return isinstance(layer.format.config, Exl2Config)


def is_zero_weight(
    checkpoint: VerifiedCheckpoint, name: str, first: int, length: int, columns: tuple[int, int] | None = None
) -> bool:
    """Return whether all weights in the rows of a range of bytes are zero; in all rows for mixed widths.

    `columns`: the range of bytes within a row; None: the whole row.
    """
    layer = checkpoint.layer_of(name)
    if layer is None or not checkpoint.is_codes(name):
        return False
    width = outer_row_bytes(checkpoint, name)
    rows = max(1, checkpoint.weights.info(name).nbytes // width)
    start, stop = first // width, -(-(first + length) // width)
    axis = layer.specs[0].axes[0]
    try:
        if axis.follows("K"):
            per_row = -(-layer.K // rows)
            inputs, outputs = slice(start * per_row, stop * per_row), _covered(columns, width, layer.N)
            ends = (outputs.start, (outputs.start + outputs.stop) // 2)
            return outputs.start < outputs.stop and all(
                not _load_weights(checkpoint, layer, at, 1)[:, inputs].any() for at in ends
            )
        if has_mixed_widths(layer):
            ends = (0, layer.N // 2)
            return not any(_load_weights(checkpoint, layer, at, 1).any() for at in ends)
        if not (axis.follows("N") or axis.flat):
            return False
        per_row, inputs = -(-layer.N // rows), _covered(columns, width, layer.K)
        some = min(stop - start, CHECKED_OUTPUTS) * per_row
        return not _load_weights(checkpoint, layer, start * per_row, some)[:, inputs].any()
    except QloadError:
        return False  # another rule reports it


def _covered(columns: tuple[int, int] | None, width: int, count: int) -> slice:
    """Return the part of `count` inputs or outputs in a range of bytes of a row."""
    if columns is None:
        return slice(0, count)
    return slice(-(-columns[0] * count // width), columns[1] * count // width)


def zero_stripes(
    checkpoint: VerifiedCheckpoint, name: str, runs: Sequence[Run], width: int
) -> frozenset[Run]:
    """Return the runs at one place of several rows: inputs or outputs that were padded or pruned."""
    stripes: set[Run] = set()
    for run in runs:
        low, high = _place_in_row(run, width)
        aligned = [other for other in runs if _is_near(_place_in_row(other, width), (low, high))]
        if len(aligned) < MIN_STRIPES or high - low >= width or high > width + STRIPE_EDGE_BYTES:
            continue
        if checkpoint.is_codes(name):
            inside = (max(0, low) + STRIPE_EDGE_BYTES, min(high, width) - STRIPE_EDGE_BYTES)
            zero = is_zero_weight(checkpoint, name, run.first + STRIPE_EDGE_BYTES, 1, inside)
        else:
            zero = run.byte == 0
        if zero:
            stripes.add(run)
    return frozenset(stripes)


def _place_in_row(run: Run, width: int) -> tuple[int, int]:
    """Return begin and end of a run in its row; below 0 if it begins at the end of the row before."""
    low = run.first % width
    low -= width * (width - low < STRIPE_EDGE_BYTES)
    return low, low + run.length


def _is_near(place: tuple[int, int], other: tuple[int, int]) -> bool:
    return abs(place[0] - other[0]) < STRIPE_EDGE_BYTES and abs(place[1] - other[1]) < STRIPE_EDGE_BYTES


def _load_weights(checkpoint: VerifiedCheckpoint, layer: LayerDescription, first: int, count: int) -> Tensor:
    """Return the weights of these outputs, (count or fewer, K); ones for no output or too large a layer."""
    block = granule(layer, "N") or layer.N
    start = first // block * block
    stop = min(layer.N, -(-(first + count) // block) * block)
    if stop <= first or (stop - start) * layer.K * layer.sizes.get("E", 1) > MAX_CHECKED_WEIGHTS:
        return torch.ones(1, layer.K)
    weight = checkpoint.loader.load(checkpoint.weights, [Part(layer.prefix, start, stop)], None)
    return weight.dequantize()[first - start : first - start + count]


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
            remedy = "write the checkpoint again: one of the two belongs to another layer"
            yield rule.tensor_finding(checkpoint, name, f"equal to {of}, byte for byte", remedy)


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
            fault = (
                f"the {BLOCK_BYTES} bytes from {repeats.again} on are those from {repeats.first} on; "
                f"{repeats.count} of {repeats.blocks} blocks are stored before"
            )
            yield rule.tensor_finding(checkpoint, name, fault, "fetch the file again")


def _is_varied(checkpoint: VerifiedCheckpoint, name: str) -> bool:
    """Return whether a tensor is codes, or a matrix of more than two values; a rotation has two."""
    if checkpoint.is_codes(name):
        return True
    numbers = checkpoint.values.numbers.get(name)
    matrix = checkpoint.role(name) is Role.FLOAT and len(checkpoint.weights.info(name).shape) > 1
    if numbers is None or not matrix or not is_matrix_name(name):
        return False
    return numbers.quantiles[0] < numbers.quantiles[2]
