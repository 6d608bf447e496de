"""Another weight into the tensors of a layer, which stay where they are: what a captured graph reads.

copy_into(model.layers[0].mlp.down_proj, other.get_weights_row("layers.0.mlp.down_proj"))
"""

from dataclasses import replace

import torch
from torch import Tensor

from qload.devices.tensors import check_writable
from qload.errors import ArgumentError, check_values, checked
from qload.kernels.linear import Linear, in_multiplied_order
from qload.spec import Layer, Weight


@checked
def copy_into(linear: Linear, weight: Weight, bias: Tensor | None = None) -> None:
    """Write a weight of the same layout, and a bias, into the buffers of `linear`: graphs then read them.

    Nothing is written where anything is refused. Afterwards the layer has the bits of a fresh load.

    Parameters
    ----------
    linear
        A module that `Weight.get_linear` made.
    weight
        Of the format, config, share and shapes of the layer's own; a name has to be that of the layer where
        both have one. It may lie on another device. ArgumentError where it differs.
    bias
        (N,), in the dtype of the layer's bias, else ArgumentError; None: the layer keeps its own.

    Examples
    --------
    >>> import torch
    >>> from qload import UnquantizedWeight, copy_into
    >>> linear = UnquantizedWeight(weight=torch.ones(2, 3)).get_linear()
    >>> copy_into(linear, UnquantizedWeight(weight=torch.zeros(2, 3)))
    >>> linear(torch.ones(3))
    tensor([0., 0.])
    """
    weight = in_multiplied_order(weight)
    own, name = linear.typed, linear.typed.layer.name or "weight"
    for what, here, there in (
        ("format", own.format, weight.format),
        ("config", own.config, weight.config),
        ("layer", _placed(own.layer, weight.layer), _placed(weight.layer, own.layer)),
        ("tensors", [*own.fields()], [*weight.fields()]),
    ):
        if here != there:
            raise ArgumentError(f"{name}: {what}", str(here), str(there))
    pairs = [(field, tensor, weight.fields()[field]) for field, tensor in own.fields().items()]
    if bias is not None:
        if linear.bias is None:
            raise ArgumentError(f"{name}: bias", "None, as the layer has none", "a tensor")
        pairs.append(("bias", linear.bias, bias))
    for field, tensor, new in pairs:
        here, there = ((tuple(each.shape), each.dtype) for each in (tensor, new))
        if here != there:
            raise ArgumentError(f"{name}: {field}", *(f"{shape}, {dtype}" for shape, dtype in (here, there)))
        check_values(f"{name}: {field}", new)
        if tensor.is_meta:
            raise ArgumentError(f"{name}: {field}", "a layer with memory to write to", "one on meta")
        check_writable(tensor, f"{name}: {field}")
    with torch.no_grad():
        for _, tensor, new in pairs:
            tensor.copy_(new)


def _placed(layer: Layer, beside: Layer) -> Layer:
    """A layer as it is compared: without its name where the other has none."""
    return layer if beside.name else replace(layer, name="")
