"""Some outputs of a weight as a weight of their own, by its declaration: views of its tensors, nothing read.

Whoever needs the values of a weight one range of outputs after another asks for `step`, where ranges may
begin, and for `outputs` of each range. What `outputs(weight, n0, n1)` means is rows [n0, n1) of what the
weight means, bit for bit: a declaration says where along each stored axis output n begins, as it does for
the shares of ranks.
"""

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from itertools import pairwise
from math import lcm

from torch import Tensor

from qload.spec.axis import LOGICAL, PARTS, Axis
from qload.spec.tensor import TensorSpec
from qload.spec.weight import Weight


def output_step(weight: Weight) -> int:
    """Outputs of a weight can be cut at multiples of this, and at its end; 0: only all of them together."""
    sizes = {"N": weight.layer.N, "K": weight.layer.K}
    steps = [
        axis.step("N", sizes) for spec in _stored_specs(weight) for axis in spec.places if axis.follows("N")
    ]
    return lcm(*steps) if all(steps) else 0


def can_cut(weight: Weight, start: int, stop: int) -> bool:
    """Whether outputs [start, stop) can be had alone."""
    unit, N = output_step(weight), weight.layer.N
    lawful = unit and start % unit == 0 and (stop % unit == 0 or stop == N)
    return (start, stop) == (0, N) or bool(lawful)


def outputs(weight: Weight, start: int, stop: int) -> Weight:
    """The weight of outputs [start, stop), whose tensors are views of this one's.

    `can_cut` has nothing against it; nobody checks that.
    """
    if (start, stop) == (0, weight.layer.N):
        return weight
    parts = _part_widths(weight.layer.parts, start, stop)
    held = {each.name: getattr(weight, each.name) for each in fields(weight)}
    for spec in _stored_specs(weight):
        held[spec.name] = _slice_tensor(held[spec.name], spec, weight, (start, stop), parts)
    layer = replace(held.pop("layer"), parts=tuple(parts.values()))
    return type(weight).unchecked(held.pop("config"), layer, held)


def ranges(weight: Weight, most: int, even: int = 1) -> Iterator[tuple[int, int]]:
    """[start, stop) after [start, stop), together all outputs, each of `most` outputs at the most.

    As few as that allows, of like width: multiples of `step`, and of `even` where `most` allows it. A weight
    that cannot be cut is one range.
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
    held = weight.fields()
    return [spec for spec in weight.tensors(weight.config) if spec.name in held]


def _part_widths(widths: tuple[int, ...], start: int, stop: int) -> dict[int, int]:
    """How many outputs of each part lie in a range, by the part's number; those that have some."""
    ends = [sum(widths[: part + 1]) for part in range(len(widths))]
    here = {
        part: min(stop, end) - max(start, end - width)
        for part, (end, width) in enumerate(zip(ends, widths, strict=True))
    }
    return {part: width for part, width in here.items() if width > 0}


def _slice_tensor(
    tensor: Tensor, spec: TensorSpec, weight: Weight, rows: tuple[int, int], parts: Mapping[int, int]
) -> Tensor:
    places, (N, K), all_parts = spec.places, (weight.layer.N, weight.layer.K), len(weight.layer.parts)
    if not any(axis.follows("N") or (axis.dim == PARTS and tensor.numel() == all_parts) for axis in places):
        return tensor
    whole = _padded_sizes(tensor, spec, {"N": N, "K": K, PARTS: all_parts})
    viewed = tensor if spec.view is None else tensor.reshape(_extents(places, whole))
    for at, axis in enumerate(places):
        if axis.dim == PARTS and viewed.ndim:
            viewed = viewed.narrow(at, min(parts), len(parts))
        elif axis.follows("N"):
            times, size = (K, N * K) if axis.flat else (1, N)
            begin, end = (axis.at(place * times, size) for place in rows)
            end = viewed.shape[at] if rows[1] == N else end  # with all that is padded
            viewed = viewed.narrow(at, begin, end - begin)
    if spec.view is None:
        return viewed
    stop = whole["N"] if rows[1] == N else rows[1]
    return viewed.reshape(_extents(spec.axes, whole | {"N": stop - rows[0], PARTS: len(parts)}))


def _padded_sizes(tensor: Tensor, spec: TensorSpec, sizes: Mapping[str, int]) -> dict[str, int]:
    """The sizes that a tensor was made for, which a kernel's order rounds up to whole tiles."""
    told = {
        axis.dim: int(stored / axis.factor)
        for axis, stored in zip(spec.axes, tensor.shape, strict=False)
        if axis.dim in LOGICAL and not (axis.rounds or axis.free)
    }
    return {**sizes, **told}


def _extents(axes: tuple[Axis, ...], sizes: Mapping[str, int]) -> list[int]:
    return [axis.size(axis.logical(sizes) or 0) or 0 for axis in axes]
