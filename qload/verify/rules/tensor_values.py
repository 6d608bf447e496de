"""Rules of single values: NaN and infinities, wrong float types, outliers, weight sizes, and packed fields.

Bits of fp16 read as bf16 have all sizes, down to 1e-16, because bf16 has three exponent bits more; bits of
bf16 read as fp16 are all about 1. One flipped exponent bit makes a value 256 times as large, or 1e30, and
both are valid floats. Scales that were inverted, or multiplied by a thousand, are finite too: they show in
the standard deviation of the weights, compared with the same projection of other layers, or with any trained
model.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf, isfinite
from statistics import median, median_high, median_low

import torch
from torch import Tensor

from qload.architecture.names import block_of, group_by_pattern
from qload.spec import Role, TensorSpec
from qload.storage import WeightStorage, rows
from qload.verify.blocks import read_float_rows
from qload.verify.checkpoint import VerifiedCheckpoint
from qload.verify.report import Finding
from qload.verify.rules.rule import Rule
from qload.verify.values import Numbers
from qload.weights.exemptions import is_mask

Split = Callable[[Tensor], tuple[Tensor, Tensor]]  # rows -> their values, and a mask of wrong ones

# float-type
OTHER_TYPES = {torch.float16: "bf16", torch.bfloat16: "fp16"}
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
        count, place, value = 0, (), 0.0
        for start, run in read_float_rows(storage, name, checkpoint.specs.get(name)):
            wrong = ~torch.isfinite(run)
            in_run = int(wrong.sum())
            if in_run and not count:
                first, *rest = torch.nonzero(wrong)[0].tolist()
                place, value = (start + first, *rest), float(run[(first, *rest)])
            count += in_run
        message = f"{name}: {value:g} at {place}; {count} in all"
        yield rule.finding(name, storage.info(name).file, message)


def check_float_types(rule: Rule, checkpoint: VerifiedCheckpoint) -> Iterator[Finding]:
    """Report each tensor with values like bits of the other 16-bit type."""
    for name in checkpoint.readable_names:
        numbers, info = checkpoint.values.numbers.get(name), checkpoint.weights.info(name)
        if numbers is None or numbers.count < MIN_FLOATS or not numbers.median:
            continue
        if info.dtype not in OTHER_TYPES or checkpoint.values.contents[name].word is not None:
            continue  # one constant value, as the least scale of a layer of zeros
        if _is_other_type(numbers, info.dtype, checkpoint.role(name), len(info.shape)):
            stated = str(info.dtype).removeprefix("torch.")
            low, _, high = numbers.quantiles
            yield rule.finding(
                name,
                info.file,
                f"{name}: magnitudes are {low:g} to {high:g} as {stated}, the type in the header (without "
                f"the least and the largest 5 %), and usual as {OTHER_TYPES[info.dtype]}",
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
                yield rule.finding(
                    name,
                    checkpoint.weights.info(name).file,
                    f"{name}: a value of {numbers.largest:g}, {times:.3g} times the median",
                )
    for layer in checkpoint.described():
        statistics = checkpoint.values.statistics.get(layer.prefix)
        if statistics is not None and MIN_ZERO_SHARE < statistics.lost < MAX_ZERO_SHARE:
            field = next(spec.name for spec in layer.specs if spec.role is Role.SCALE)
            name, file = layer.names.full(field), layer.names.file(field)
            message = (
                f"{name}: {statistics.lost:.1%} of the scales are zero, and the codes of their groups differ"
            )
            yield rule.finding(name, file, message)


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
            name, file = layer.names.full(field), layer.names.file(field)
            yield rule.finding(
                name, file, f"{name}: the weights have a standard deviation of {size:g}, and {against}"
            )


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
                first = _first_wrong(storage, name, split)
                if first:
                    value, place, count = first
                    yield rule.finding(
                        name,
                        layer.names.file(spec.name),
                        f"{name}: {what} {value:g} at {place}, it has to be {allowed}; {count} in all",
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


def _first_wrong(
    storage: WeightStorage, name: str, split: Split
) -> tuple[float, tuple[int, ...], int] | None:
    """Return the first wrong value, its place, and the number of wrong values."""
    count, first = 0, None
    for start, run in rows(storage, name):
        values, wrong = split(run)
        places = torch.nonzero(wrong)
        if places.numel() and first is None:
            row, *rest = places[0].tolist()
            first = (float(values[(row, *rest)]), (start + row, *rest))
        count += places.shape[0]
    return (*first, count) if first else None
