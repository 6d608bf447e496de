"""Slices of a weight along outputs: weights with views of its tensors, by its declaration.

`outputs(weight, n0, n1).dequantize()` is rows [n0, n1) of `weight.dequantize()`, bit for bit. The declaration
gives the position of output n on each stored axis, as for the shares of ranks. `output_step` is the step of
valid slices, `ranges` divides all outputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from itertools import pairwise
from math import lcm

from qload.lazy_torch import Tensor
from qload.spec.axis import LOGICAL, PARTS
from qload.spec.tensor import TensorSpec
from qload.spec.weight import Weight


def output_step(weight: Weight) -> int:
    """Step of valid slices along outputs; the end is always valid; 0: no slice is valid."""
    sizes, transforms = {"N": weight.layer.N, "K": weight.layer.K}, weight.layer.transforms
    steps = [
        axis.step("N", sizes)
        for spec in _stored_specs(weight)
        for axis in (spec.places if spec.packing is None else spec.binding)
        if axis.follows("N")
    ]
    if transforms is not None:
        steps.append(transforms.step("N"))
    return lcm(*steps) if all(steps) else 0


def can_cut(weight: Weight, start: int, stop: int) -> bool:
    """Return whether outputs [start, stop) are a valid slice."""
    unit, N = output_step(weight), weight.layer.N
    lawful = unit and start % unit == 0 and (stop % unit == 0 or stop == N)
    return (start, stop) == (0, N) or bool(lawful)


def outputs(weight: Weight, start: int, stop: int) -> Weight:
    """Slice outputs [start, stop) of a weight, as views of its tensors.

    The slice has to be valid by `can_cut`; this is not checked.
    """
    if (start, stop) == (0, weight.layer.N):
        return weight
    parts = _part_widths(weight.layer.parts, start, stop)
    values = {attribute.name: getattr(weight, attribute.name) for attribute in fields(weight)}
    for spec in _stored_specs(weight):
        values[spec.name] = _slice_tensor(values[spec.name], spec, weight, (start, stop), parts)
    layer = replace(values.pop("layer"), parts=tuple(parts.values()))
    return type(weight).unchecked(values.pop("config"), layer, values)


def ranges(weight: Weight, most: int, even: int = 1) -> Iterator[tuple[int, int]]:
    """Divide all outputs into ranges [start, stop) of at most `most` outputs.

    The ranges are few and of similar width: multiples of `output_step`, and of `even` if `most` permits. A
    weight without valid slices is one range.
    """
    N, unit = weight.layer.N, output_step(weight)
    if not unit or most >= N:
        yield 0, N
        return
    if lcm(unit, even) <= most:
        unit = lcm(unit, even)
    count = -(-N // max(most // unit * unit, unit))
    width = -(-N // (count * unit)) * unit
    yield from pairwise([*range(0, N, width), N])


def _stored_specs(weight: Weight) -> list[TensorSpec]:
    tensors = weight.fields()
    return [spec for spec in weight.tensors(weight.config) if spec.name in tensors]


def _part_widths(widths: tuple[int, ...], start: int, stop: int) -> dict[int, int]:
    """Part number -> its outputs within a range, for parts with any."""
    ends = [sum(widths[: part + 1]) for part in range(len(widths))]
    inside = {
        part: min(stop, end) - max(start, end - width)
        for part, (end, width) in enumerate(zip(ends, widths, strict=True))
    }
    return {part: width for part, width in inside.items() if width > 0}


def _slice_tensor(
    tensor: Tensor, spec: TensorSpec, weight: Weight, rows: tuple[int, int], parts: Mapping[int, int]
) -> Tensor:
    places, (N, K), all_parts = spec.places, (weight.layer.N, weight.layer.K), len(weight.layer.parts)
    if not any(axis.follows("N") or (axis.dim == PARTS and tensor.numel() == all_parts) for axis in places):
        return tensor
    padded = _padded_sizes(tensor, spec, {"N": N, "K": K, PARTS: all_parts})
    viewed = tensor if spec.view is None else spec.to_view(tensor, padded)
    for at, axis in enumerate(places):
        if axis.dim == PARTS and viewed.ndim:
            viewed = viewed.narrow(at, min(parts), len(parts))
        elif axis.follows("N"):
            times, size = (K, N * K) if axis.flat else (1, N)
            begin, end = (axis.at(place * times, size) for place in rows)
            end = viewed.shape[at] if rows[1] == N else end  # includes padding
            viewed = viewed.narrow(at, begin, end - begin)
    if spec.view is None:
        return viewed
    stop = padded["N"] if rows[1] == N else rows[1]
    return spec.from_view(viewed, padded | {"N": stop - rows[0], PARTS: len(parts)})


def _padded_sizes(tensor: Tensor, spec: TensorSpec, sizes: Mapping[str, int]) -> dict[str, int]:
    """Sizes of a layer with N and K as stored: a kernel's order pads them to full tiles."""
    stored_sizes = {
        axis.dim: int(stored / axis.factor)
        for axis, stored in zip(spec.axes, tensor.shape, strict=False)
        if axis.dim in LOGICAL and not (axis.rounds or axis.free)
    }
    return {**sizes, **stored_sizes}
