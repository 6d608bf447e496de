"""Rules of scales: sign and range, the key/value cache, overflow, and the largest code of each NF4/FP4 block.

A NaN or infinite scale turns whole groups into NaN; a negative one changes their sign. A symmetric quantizer
of integers states the end of the range it used by the sign, and about half of the scales are then negative; a
few negative scales among many are damage. A zero scale that multiplies is lawful: quantizers write a group of
zeros so. A layer with zero scales alone (or the least exponents) and different codes was not all zeros; the
same holds for scales that are codes, and for their own scales.
"""

from collections.abc import Iterator
from math import prod

import torch
from torch import Tensor

from qload.errors import QloadError
from qload.formats import AWQConfig, BNB4Config, CTPackConfig, GPTQConfig
from qload.formats.unquantized import FLOATS
from qload.loader import LayerDescription
from qload.spec import Role, TensorSpec
from qload.storage import TensorInfo, WeightStorage
from qload.verify.blocks import load_output_blocks, read_float_rows
from qload.verify.checkpoint import VerifiedCheckpoint
from qload.verify.report import Finding, finding_of
from qload.verify.rules.rule import Rule
from qload.weights.exemptions import cache_scale, cache_zero

SIGNED_CONFIGS = (GPTQConfig, AWQConfig, CTPackConfig)
MIN_SIGNED_SHARE = 16  # negative scales are damage if they are fewer than one in so many
MAX_CACHE_SCALES = 1 << 16  # above the heads times inputs of a head of any attention
MAX_CODE = 1 << 16  # above the magnitude of any code
NESTED_SLACK = 0.1  # part of the offset; a block of zeros comes so far below zero, after rounding to a code


def check_scales(rule: Rule, checkpoint: VerifiedCheckpoint) -> Iterator[Finding]:
    """Report NaN, infinite, negative and wrongly zero scales, with the first place and count of each kind."""
    storage = checkpoint.weights.storage
    for name in checkpoint.readable_names:
        numbers = checkpoint.values.numbers.get(name)
        if checkpoint.role(name) is not Role.SCALE:
            continue
        spec, layer = checkpoint.specs.get(name), checkpoint.layer_of(name)
        zero_divisors = numbers is not None and spec is not None and spec.divides and numbers.zeros
        if numbers is not None and (not numbers.finite or numbers.low < 0 or zero_divisors):
            # Integer codes with a zero point may have scales of both signs.
            signed = layer is not None and isinstance(layer.format.config, SIGNED_CONFIGS)
            yield from _invalid_scales(rule, storage, name, spec, signed=signed)
        if spec and layer is not None and _are_all_zero(checkpoint, name, spec, layer):
            least = "2**-127" if spec.is_exponents else "zero"
            yield rule.finding(
                name, storage.info(name).file, f"{name}: all scales are {least}, and the codes differ"
            )


def _invalid_scales(
    rule: Rule, storage: WeightStorage, name: str, spec: TensorSpec | None, *, signed: bool
) -> Iterator[Finding]:
    counts: dict[str, int] = {}
    places: dict[str, tuple[tuple[int, ...], float]] = {}
    total = prod(storage.info(name).shape)
    for start, run in read_float_rows(storage, name, spec):
        for fault, mask in _invalid_masks(run, spec).items():
            count = int(mask.sum())
            counts[fault] = counts.get(fault, 0) + count
            if count and fault not in places:
                first, *rest = torch.nonzero(mask)[0].tolist()
                places[fault] = ((start + first, *rest), float(run[(first, *rest)]))
    for fault, (place, value) in places.items():
        if fault == "negative" and signed and counts[fault] * MIN_SIGNED_SHARE >= total >= MIN_SIGNED_SHARE:
            continue
        yield rule.finding(
            name,
            storage.info(name).file,
            f"{name}: {fault} scale {value:g} at {place}; {counts[fault]} in all",
        )


def _invalid_masks(run: Tensor, spec: TensorSpec | None) -> dict[str, Tensor]:
    masks = {"NaN": run.isnan(), "infinite": run.isinf(), "negative": (run < 0) & ~run.isinf()}
    return {**masks, "zero": run == 0} if spec and spec.divides else masks


def _are_all_zero(
    checkpoint: VerifiedCheckpoint, name: str, spec: TensorSpec, layer: LayerDescription
) -> bool:
    """Return whether all scales are zero, or least exponents, and the codes differ."""
    numbers, contents = checkpoint.values.numbers.get(name), checkpoint.values.contents
    if spec.divides or numbers is None or not contents[name].nbytes:
        return False
    zero = contents[name].byte == 0 if spec.is_exponents else not numbers.low and not numbers.high
    return zero and contents[_scaled_tensor(spec, layer)].byte is None


def _scaled_tensor(spec: TensorSpec, layer: LayerDescription) -> str:
    """Return the name of the scaled tensor: the layer's codes, or quantized scales."""
    role = Role.SCALE if spec.spent else Role.WORD
    return next(layer.names.full(other.name) for other in layer.specs if other.role is role)


def check_cache_scales(rule: Rule, checkpoint: VerifiedCheckpoint) -> Iterator[Finding]:
    """Report scales and zero points of the cache with a wrong shape, dtype or value."""
    storage, heads = checkpoint.weights.storage, _head_counts(checkpoint)
    for name in checkpoint.account.report.exempted:
        is_scale = cache_scale(name)
        if not is_scale and not cache_zero(name):
            continue
        info = storage.info(name)
        wrong = _cache_scale_fault(info, heads) if is_scale else _cache_zero_fault(info)
        if wrong is None:
            values = storage.read(name).double().flatten()
            bad = ~torch.isfinite(values) | (values <= 0) if is_scale else ~torch.isfinite(values)
            if bool(bad.any()):
                at = int(bad.nonzero()[0, 0])
                expected = "a finite number above 0" if is_scale else "a finite number"
                wrong = f"{float(values[at]):g} at {at}, it has to be {expected}; {int(bad.sum())} in all"
        if wrong is not None:
            yield rule.finding(name, info.file, f"{name}: {wrong}")


def _cache_scale_fault(info: TensorInfo, heads: frozenset[int]) -> str | None:
    """Return the fault in the dtype or shape of a scale."""
    if info.dtype not in FLOATS:
        return f"a scale of dtype {str(info.dtype).removeprefix('torch.')}"
    entries, along = prod(info.shape), [size for size in info.shape if size != 1]
    if entries != 1 and (len(along) != 1 or entries > MAX_CACHE_SCALES or (heads and entries not in heads)):
        counts = f", of {' or '.join(map(str, sorted(heads)))} heads" if heads else ""
        return f"shape {info.shape}, it has to be one scale, or one a head{counts}"
    return None


def _cache_zero_fault(info: TensorInfo) -> str | None:
    """Return the fault in the shape of a zero point or bias; one for each input of a head is lawful."""
    if sum(size != 1 for size in info.shape) > 2 or prod(info.shape) > MAX_CACHE_SCALES:
        return f"shape {info.shape}, it has to be one value, one a head, or one for each input of a head"
    return None


def _head_counts(checkpoint: VerifiedCheckpoint) -> frozenset[int]:
    """Return the numbers of key and query heads in config.json."""
    keys = ("num_key_value_heads", "num_attention_heads")
    return frozenset(count for key in keys for count in checkpoint.config_integers(key) if count > 0)


def check_overflow(rule: Rule, checkpoint: VerifiedCheckpoint) -> Iterator[Finding]:
    """Report each layer with an infinite weight from finite scales and codes, and its first place.

    Only layers with scales within 16 bits of the end of their range are dequantized: no code is larger.
    """
    for layer in checkpoint.described():
        name = _extreme_scales(checkpoint, layer)
        if name is None:
            continue
        try:
            for start, weight in load_output_blocks(checkpoint.weights, checkpoint.loader, layer):
                infinite = torch.nonzero(weight.dequantize().isinf())
                if infinite.numel():
                    *experts, n, k = infinite[0].tolist()
                    place = (*experts, start + n, k)
                    yield rule.finding(
                        name,
                        checkpoint.weights.storage.info(name).file,
                        f"{name}: scales this large, or divisors this small, make an infinity at {place}",
                    )
                    break
        except QloadError as error:
            yield finding_of(error)


def _extreme_scales(checkpoint: VerifiedCheckpoint, layer: LayerDescription) -> str | None:
    """Return the name of scales near the end of their range; None if a value is not finite anyway."""
    extreme = None
    for spec in layer.specs:
        name = layer.names.full(spec.name)
        numbers = checkpoint.values.numbers.get(name)
        if spec.role is not Role.SCALE or numbers is None:
            continue
        if not numbers.finite:
            return None
        dtype = checkpoint.weights.info(name).dtype
        range_ = torch.finfo(dtype if dtype in FLOATS else torch.float32)
        near = numbers.largest > range_.max / MAX_CODE
        if spec.divides:
            near = near or 0 < numbers.least < range_.tiny * MAX_CODE
        extreme = name if near else extreme
    return extreme


def check_block_maxima(rule: Rule, checkpoint: VerifiedCheckpoint) -> Iterator[Finding]:
    """Report bitsandbytes layers with a block without a weight of 1 or -1, or with a scale below zero.

    The scale of a block is its largest magnitude, so that this weight has an end of the table. A quantized
    scale is a sum with an offset, and a wrong offset makes it negative.
    """
    for layer in checkpoint.described():
        statistics, config = checkpoint.values.statistics.get(layer.prefix), layer.format.config
        if statistics is None or not isinstance(config, BNB4Config):
            continue
        name, file = layer.names.full("absmax"), layer.names.file("absmax")
        if config.nested_blocksize and statistics.low < -NESTED_SLACK * abs(config.offset):
            message = (
                f"{name}: a quantized scale is {statistics.low:g}, and a largest magnitude is never negative"
            )
            yield rule.finding(name, file, message, "the nested_offset of the quantization state is wrong")
        elif statistics.reach is not None and statistics.reach < 1 and layer.K % config.blocksize == 0:
            name = layer.names.full("weight")
            yield rule.finding(
                name, layer.names.file("weight"),
                f"{name}: {1 - statistics.reach:.2%} of {statistics.groups} blocks have no weight of 1 or -1",
            )  # fmt: skip
