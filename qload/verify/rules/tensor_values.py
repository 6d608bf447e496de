"""Rules of single values: NaN, infinities, outliers, wrong types and signs, overflow, packed fields.

Bits of fp16 read as bf16 have all sizes, down to 1e-16, because bf16 has three exponent bits more; bits of
bf16 read as fp16 are all about 1. One flipped exponent bit makes a value 256 times as large, or 1e30, and
both are valid floats. Scales that were inverted, or multiplied by a thousand, are finite too: they show in
the standard deviation of the weights, compared with the same projection of other layers, or with any trained
model.

A NaN or infinite scale turns whole groups into NaN; a negative one changes their sign. A symmetric quantizer
of integers states the end of the range it used by the sign, and about half of the scales are then negative; a
few negative scales among many are damage. A zero scale that multiplies is lawful: quantizers write a group of
zeros so. A layer with zero scales alone (or the least exponents) and different codes was not all zeros; the
same holds for scales that are codes, and for their own scales.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf, isfinite, prod
from statistics import median, median_high, median_low

from qload import dtypes
from qload.architecture.names import block_of, group_by_pattern
from qload.errors import QloadError
from qload.formats import AWQConfig, BNB4Config, CTPackConfig, GPTQConfig
from qload.formats.unquantized import FLOATS
from qload.lazy_torch import Tensor, torch
from qload.loader import LayerDescription
from qload.spec import Role, TensorSpec
from qload.storage import TensorInfo, rows
from qload.verify.blocks import find_wrong, load_output_blocks, read_float_rows
from qload.verify.checkpoint import VerifiedCheckpoint
from qload.verify.report import Finding, finding_of
from qload.verify.rules.rule import Rule
from qload.verify.values import Numbers
from qload.weights.exemptions import cache_scale, cache_zero, is_mask

Split = Callable[[Tensor], tuple[Tensor, Tensor]]  # rows -> their values, and a mask of wrong ones

# float-type
OTHER_TYPES = {dtypes.float16: "bf16", dtypes.bfloat16: "fp16"}
MIN_FLOATS = 64  # values of a tensor with quantiles
MIN_MEDIAN = 1e-9  # median of magnitudes; sound tensors have 1e-5 and more
USUAL_WIDTH = (8.0, 200.0)  # quantile 0.95 of magnitudes over quantile 0.05; 31 for a normal distribution
MEDIANS_OF_BF16_BITS = (0.5, 2.5)  # median of bits of bf16 read as fp16
MIN_WIDTH, MAX_WIDTH = 3.0, 1e6  # widths of bits of the other type

# value-outlier
MIN_SCALES = 8  # scales of a tensor with a median
MAX_SCALE = 200.0  # times the median; sound scales reach 15, and one weight of 100 deviations makes 40
MAX_SCALE_QUANTILE = 50.0  # times the quantile 0.95: many large scales are no outliers
MAX_PLAIN_VALUE = 1e6  # of a plain tensor, and so many times the median
# Share of groups with a zero scale: sound layers have none, and `scale-value` reports layers without another.
MIN_ZERO_SHARE, MAX_ZERO_SHARE = 0.1, 0.9

# weight-size: standard deviations
MAX_DEVIATION, MIN_DEVIATION = 2.0, 1e-5  # median of a model; sound models have 0.06 to 0.33
MIN_LAYERS = 4  # fewer layers may be a sample with any scale
MAX_RATIO = 10.0  # over the same projection of other layers, above MAX_DEVIATION; sound ones have up to 2
MAX_FAR_RATIO, LARGE_DEVIATION = 100.0, 0.5  # the same ratio, between LARGE_DEVIATION and MAX_DEVIATION
MAX_INVERSE_RATIO, SMALL_DEVIATION = 500.0, 1e-3  # of other layers over this one, below SMALL_DEVIATION
HUGE_DEVIATION = 1000.0  # for one layer, whatever the others have; inverted scales make 10,000 and more
EXPERTS = ".experts."  # an expert without tokens is lawfully as small as weight decay makes it


def check_finite(rule: Rule, checkpoint: VerifiedCheckpoint) -> Iterator[Finding]:
    """Report each tensor with a value that is not finite: its first place and the count."""
    storage = checkpoint.weights.storage
    for name in checkpoint.readable_names:
        numbers = checkpoint.values.numbers.get(name)
        if numbers is None or numbers.finite or checkpoint.role(name) is Role.SCALE:
            continue
        if is_mask(name, storage.info(name)) and numbers.low == -inf and numbers.high < inf:
            continue
        floats = read_float_rows(storage, name, checkpoint.specs.get(name))
        wrong = find_wrong((start, run, ~torch.isfinite(run)) for start, run in floats)
        count, place, value = wrong or (0, (), 0.0)
        yield rule.tensor_finding(checkpoint, name, f"{value:g} at {place}; {count} in all")


def check_float_types(rule: Rule, checkpoint: VerifiedCheckpoint) -> Iterator[Finding]:
    """Report each tensor with values like bits of the other 16-bit type."""
    for name in checkpoint.readable_names:
        numbers, info = checkpoint.values.numbers.get(name), checkpoint.weights.info(name)
        if numbers is None or numbers.count < MIN_FLOATS or not numbers.median:
            continue
        if info.stored_dtype not in OTHER_TYPES or checkpoint.values.contents[name].word is not None:
            continue  # one constant value, as the least scale of a layer of zeros
        if _is_other_type(numbers, info.dtype, checkpoint.role(name), len(info.shape)):
            stated = str(info.dtype).removeprefix("torch.")
            low, _, high = numbers.quantiles
            yield rule.tensor_finding(
                checkpoint,
                name,
                f"magnitudes are {low:g} to {high:g} as {stated}, the type in the header (without "
                f"the least and the largest 5 %), and usual as {OTHER_TYPES[info.stored_dtype]}",
            )


def _is_other_type(numbers: Numbers, dtype: torch.dtype, role: Role, axes: int) -> bool:
    """Return whether values are strange in their stated type, and usual in the other."""
    tiny = dtype is torch.bfloat16 and numbers.median < MIN_MEDIAN
    if role is not Role.FLOAT:
        return tiny and role is Role.SCALE  # other sizes of scales are lawful
    least, most = USUAL_WIDTH
    if axes < 2 or not least < _width(numbers.retyped) < most:
        return False  # a vector, as an untrained bias of keys, may have any size
    if tiny:
        return True
    width, (low, high) = _width(numbers.quantiles), MEDIANS_OF_BF16_BITS
    if dtype is torch.bfloat16:
        return width > MAX_WIDTH
    return 1 < width < MIN_WIDTH and low < numbers.median < high


def _width(quantiles: tuple[float, float, float]) -> float:
    low, _, high = quantiles
    return high / low if low else 0.0


def check_outliers(rule: Rule, checkpoint: VerifiedCheckpoint) -> Iterator[Finding]:
    """Report each tensor with a far outlier, and each layer with zero scales over different codes."""
    for name in checkpoint.readable_names:
        numbers, spec = checkpoint.values.numbers.get(name), checkpoint.specs.get(name)
        if numbers is not None and numbers.finite and numbers.median:
            most = _largest_sound(numbers, checkpoint.role(name), spec)
            if most is not None and numbers.largest > most:
                times = numbers.largest / numbers.median
                yield rule.tensor_finding(
                    checkpoint, name, f"a value of {numbers.largest:g}, {times:.3g} times the median"
                )
    for layer in checkpoint.described():
        statistics = checkpoint.values.statistics.get(layer.prefix)
        if statistics is not None and MIN_ZERO_SHARE < statistics.lost < MAX_ZERO_SHARE:
            field = next(spec.name for spec in layer.specs if spec.role is Role.SCALE)
            fault = f"{statistics.lost:.1%} of the scales are zero, and the codes of their groups differ"
            yield rule.field_finding(layer, field, fault)


def _largest_sound(numbers: Numbers, role: Role, spec: TensorSpec | None) -> float | None:
    """Return the largest sound magnitude; None if no bound is known."""
    if role is Role.SCALE:
        if numbers.count < MIN_SCALES or spec is None or spec.divides:
            return None
        return max(MAX_SCALE * numbers.median, MAX_SCALE_QUANTILE * numbers.quantiles[2])
    return max(MAX_PLAIN_VALUE, MAX_PLAIN_VALUE * numbers.median) if role is Role.FLOAT else None


def check_weight_sizes(rule: Rule, checkpoint: VerifiedCheckpoint) -> Iterator[Finding]:
    """Report layers with weights too large or too small, compared with other layers or trained models."""
    layers = {layer.prefix: layer for layer in checkpoint.described() if block_of(layer.prefix) is not None}
    statistics = checkpoint.values.statistics
    sizes = {
        prefix: statistics[prefix].deviation
        for prefix in layers
        if prefix in statistics and statistics[prefix].deviation and isfinite(statistics[prefix].deviation)
    }  # other rules report the rest
    usual = median(sizes.values()) if len(sizes) >= MIN_LAYERS else MIN_DEVIATION
    for prefixes in group_by_pattern(sizes).values():
        for prefix in prefixes:
            size = sizes[prefix]
            alone = size > HUGE_DEVIATION and len(sizes) >= MIN_LAYERS
            if alone or (
                not MIN_DEVIATION <= usual <= MAX_DEVIATION and not MIN_DEVIATION <= size <= MAX_DEVIATION
            ):
                against = f"sound layers have {MIN_DEVIATION:g} to {MAX_DEVIATION:g}"
            elif (like := _usual_size(prefix, prefixes, sizes)) is not None:
                against = f"the same projection of other layers has {like:g}"
            else:
                continue
            layer = layers[prefix]
            field = next((spec.name for spec in layer.specs if spec.role is Role.SCALE), layer.specs[0].name)
            fault = f"the weights have a standard deviation of {size:g}, and {against}"
            yield rule.field_finding(layer, field, fault)


def _usual_size(prefix: str, names: Sequence[str], sizes: Mapping[str, float]) -> float | None:
    """Return the size of most layers of one pattern if this layer is far from it; otherwise None."""
    size, others = sizes[prefix], [sizes[name] for name in names]
    low, high = median_low(others), median_high(others)
    if (size > MAX_DEVIATION and size > MAX_RATIO * low) or (
        size > LARGE_DEVIATION and size > MAX_FAR_RATIO * low
    ):
        return low
    small = size < SMALL_DEVIATION and MAX_INVERSE_RATIO * size < high
    return high if small and not _is_unused_expert(prefix, sizes) else None


def _is_unused_expert(prefix: str, sizes: Mapping[str, float]) -> bool:
    """Return whether a layer belongs to an expert with small layers alone."""
    lead = f"{prefix.rpartition('.')[0]}."
    return EXPERTS in lead and all(
        size < SMALL_DEVIATION for name, size in sizes.items() if name.startswith(lead)
    )


def check_fields(rule: Rule, checkpoint: VerifiedCheckpoint) -> Iterator[Finding]:
    """Report each tensor with a value outside of its declaration: the first, its place, and the count."""
    storage = checkpoint.weights.storage
    for layer in checkpoint.described():
        for spec in layer.specs:
            name = layer.names.full(spec.name)
            for what, allowed, split in _declared(spec):
                wrong = find_wrong((start, *split(run)) for start, run in rows(storage, name))
                if wrong:
                    count, place, value = wrong
                    yield rule.field_finding(
                        layer,
                        spec.name,
                        f"{what} {value:g} at {place}, it has to be {allowed}; {count} in all",
                    )


def _declared(spec: TensorSpec) -> Iterator[tuple[str, str, Split]]:
    """Yield (sort of value, allowed values, split of rows) for each limit of a declaration."""
    if spec.nibbles:
        allowed = torch.tensor(spec.nibbles)
        yield "field", f"one of {', '.join(map(str, spec.nibbles))}", lambda run: _split_fields(run, allowed)
    if spec.between:
        least, most = spec.between
        yield "code", f"{least} to {most}", lambda run: (run, (run < least) | (run > most))
    if spec.holds:
        table = torch.tensor(spec.holds)
        yield "value", "as in the table that kernels know", lambda run: (run, run != table)


def _split_fields(run: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
    fields = torch.stack([(run.to(torch.int32) >> shift) & 15 for shift in (0, 4, 8, 12)], -1)
    return fields, ~torch.isin(fields, allowed)


SIGNED_CONFIGS = (GPTQConfig, AWQConfig, CTPackConfig)
MIN_SIGNED_SHARE = 16  # negative scales are damage if they are fewer than one in so many
MAX_CACHE_SCALES = 1 << 16  # above the heads times inputs of a head of any attention
MAX_CODE = 1 << 16  # above the magnitude of any code
OFFSET_NAMES = ("zero", "bias", "shift")  # parts of field names
NESTED_SLACK = 0.1  # part of the offset; a block of zeros comes so far below zero, after rounding to a code


def check_scales(rule: Rule, checkpoint: VerifiedCheckpoint) -> Iterator[Finding]:
    """Report NaN, infinite, negative and wrongly zero scales, with the first place and count of each kind."""
    for name in checkpoint.readable_names:
        numbers = checkpoint.values.numbers.get(name)
        spec, layer = checkpoint.specs.get(name), checkpoint.layer_of(name)
        if spec is not None and spec.scale_bytes is not None:
            yield from _nonfinite_scale_bytes(rule, checkpoint, name, spec)
        if checkpoint.role(name) is not Role.SCALE:
            continue
        zero_divisors = numbers is not None and spec is not None and spec.divides and numbers.zeros
        if numbers is not None and (not numbers.finite or numbers.low < 0 or zero_divisors):
            # Integer codes with a zero point may have scales of both signs.
            signed = layer is not None and isinstance(layer.format.config, SIGNED_CONFIGS)
            yield from _invalid_scales(rule, checkpoint, name, spec, signed=signed)
        if spec and layer is not None and _are_all_zero(checkpoint, name, spec, layer):
            least = "2**-127" if spec.is_exponents else "zero"
            yield rule.tensor_finding(checkpoint, name, f"all scales are {least}, and the codes differ")


def _nonfinite_scale_bytes(
    rule: Rule, checkpoint: VerifiedCheckpoint, name: str, spec: TensorSpec
) -> Iterator[Finding]:
    """Report scales among the bytes of codes; those of ggml may be negative or zero."""
    floats = read_float_rows(checkpoint.weights.storage, name, spec)
    if wrong := find_wrong((start, run, ~torch.isfinite(run)) for start, run in floats):
        count, place, value = wrong
        yield rule.tensor_finding(checkpoint, name, f"scale {value:g} at {place}; {count} in all")


def _invalid_scales(
    rule: Rule, checkpoint: VerifiedCheckpoint, name: str, spec: TensorSpec | None, *, signed: bool
) -> Iterator[Finding]:
    storage = checkpoint.weights.storage
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
        scale = f"negative scale {value:g}" if fault == "negative" else f"{fault} scale"
        yield rule.tensor_finding(checkpoint, name, f"{scale} at {place}; {counts[fault]} in all")


def _invalid_masks(run: Tensor, spec: TensorSpec | None) -> dict[str, Tensor]:
    masks = {"NaN": run.isnan(), "infinite": run.isinf()}
    if spec is None or not spec.signed:
        masks["negative"] = (run < 0) & ~run.isinf()
    return {**masks, "zero": run == 0} if spec and spec.divides else masks


def _are_all_zero(
    checkpoint: VerifiedCheckpoint, name: str, spec: TensorSpec, layer: LayerDescription
) -> bool:
    """Return whether all scales are zero, or least exponents, and the codes differ."""
    numbers, contents = checkpoint.values.numbers.get(name), checkpoint.values.contents
    is_offset = spec.signed and any(part in spec.name for part in OFFSET_NAMES)
    if spec.divides or is_offset or numbers is None or not contents[name].nbytes:
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
            yield rule.tensor_finding(checkpoint, name, wrong)


def _cache_scale_fault(info: TensorInfo, heads: frozenset[int]) -> str | None:
    """Return the fault in the dtype or shape of a scale."""
    if info.stored_dtype not in FLOATS:
        return f"a scale of dtype {str(info.stored_dtype).removeprefix('torch.')}"
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
                    yield rule.tensor_finding(
                        checkpoint,
                        name,
                        f"scales this large, or divisors this small, make an infinity at {place}",
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
        info = checkpoint.weights.info(name)
        range_ = torch.finfo(info.dtype if info.stored_dtype in FLOATS else torch.float32)
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
        if config.nested_blocksize and statistics.low < -NESTED_SLACK * abs(config.offset):
            fault = f"a quantized scale is {statistics.low:g}, and a largest magnitude is never negative"
            remedy = "the nested_offset of the quantization state is wrong"
            yield rule.field_finding(layer, "absmax", fault, remedy)
        elif statistics.reach is not None and statistics.reach < 1 and layer.K % config.blocksize == 0:
            share = f"{1 - statistics.reach:.2%} of {statistics.groups} blocks"
            yield rule.field_finding(layer, "weight", f"{share} have no weight of 1 or -1")
