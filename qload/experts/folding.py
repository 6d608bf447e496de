"""Experts of a stack as one layer of all their outputs, so that one repack converts all of them.

    (E, N, K) -> (E N, K)    axes along N, and of parts, have the entries of expert 0, then those of expert 1

The declarations of both formats say which axes these are. A tensor without a valid cut between two experts
cannot be folded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from qload.experts.weight import Stack
from qload.lazy_torch import Tensor
from qload.spec import PARTS, Layer, TensorSpec, Weight


def fold(stack: Stack, repacked: Weight) -> Weight | None:
    """Fold whole experts with equal facts into one layer.

    `repacked`: one expert after its repack. None if a tensor of either has no cut between two experts, or if
    the repack pads outputs.
    """
    specs, layer, count = _specs(stack), stack.layer, len(stack)
    later = {**specs, **_specs(repacked)}
    if not all(_has_cuts(specs.get(name), layer) for name in stack.tensors):
        return None
    if not all(_has_cuts(later.get(name), layer) for name in repacked.fields()):
        return None
    if any(_is_padded(tensor, later[name], layer) for name, tensor in repacked.fields().items()):
        return None
    tensors = dict[str, Tensor]()
    for name, tensor in stack.tensors.items():
        axis = joined_axis(specs[name])
        tensors[name] = tensor[0] if axis is None else tensor.movedim(0, axis).flatten(axis, axis + 1)
    N, K = layer.whole
    folded = replace(layer, parts=layer.parts * count, whole=(N * count, K))
    return stack.weight_type.unchecked(stack.config, folded, tensors)


def unfold(weight: Weight, stack: Stack) -> Stack:
    """Split a repacked `fold(stack)` into its experts."""
    specs, count, tensors = {**_specs(stack), **_specs(weight)}, len(stack), dict[str, Tensor]()
    for name, tensor in weight.fields().items():
        axis = joined_axis(specs[name])
        if axis is None:
            tensors[name] = tensor.expand(count, *tensor.shape)
        else:
            parts: Tensor = tensor.unflatten(axis, (count, -1))  # type: ignore[no-untyped-call]
            tensors[name] = parts.movedim(axis, 0)
    layer = stack.layer.with_origin(weight.layer.origin, weight.layer.activations)
    return Stack(type(weight), weight.config, layer, stack.names, tensors)


def _specs(owner: Stack | Weight) -> Mapping[str, TensorSpec]:
    weight_type = owner.weight_type if isinstance(owner, Stack) else type(owner)
    return {spec.name: spec for spec in weight_type.tensors(owner.config)}


def joined_axis(spec: TensorSpec) -> int | None:
    """Number of the stored axis along which parts are joined; None if all parts have the same tensor."""
    axes = enumerate(spec.axes)
    return next((at for at, axis in axes if axis.follows("N") or axis.dim == PARTS), None)


def has_stored_axes(spec: TensorSpec) -> bool:
    """Return whether cuts and joins are along stored axes; a view may differ in axes of length 1."""
    stored, viewed = ([axis.text for axis in axes if axis.text != "1"] for axes in (spec.axes, spec.places))
    return stored == viewed


def _has_cuts(spec: TensorSpec | None, layer: Layer) -> bool:
    """Return whether a tensor can be cut at multiples of a layer's outputs, or is a fact of all outputs."""
    number = None if spec is None else joined_axis(spec)
    if spec is None or number is None:
        return spec is not None and spec.fact
    axis = spec.axes[number]
    step = axis.step("N", {"N": layer.N, "K": layer.K})
    return has_stored_axes(spec) and (axis.dim == PARTS or (step > 0 and layer.N % step == 0))


def _is_padded(tensor: Tensor, spec: TensorSpec, layer: Layer) -> bool:
    """Return whether a tensor has padding along its joined axis."""
    number = joined_axis(spec)
    if number is None:
        return False
    axis = spec.axes[number]
    sizes = {"N": layer.N, "K": layer.K, PARTS: len(layer.parts)}
    return tensor.shape[number] != axis.size(axis.logical(sizes) or 0)
