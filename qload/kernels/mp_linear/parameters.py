"""A layer's parameters, transposed or not, as a typed weight."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from qload.errors import AmbiguousIndexError, ArgumentError, DtypeError, ShapeError, check_values
from qload.formats import GPTQConfig, GPTQWeight
from qload.kernels.mp_linear.contract import MPLinearLayerConfig
from qload.layouts import STORED_MINUS_ONE, Packing, awq, gptq
from qload.spec import Codes, Layer


def permute_param_layout_(
    param: Tensor, input_dim: int, output_dim: int, *, packed_dim: int | None = None
) -> Tensor:
    """Transpose a parameter in place to the given axes, and set its attributes.

    A parameter with one attribute has the other at its other axis. ArgumentError if only a repack could move
    the packed axis.

    Parameters
    ----------
    param
        A matrix with attributes `input_dim`, `output_dim` and perhaps `packed_dim`; without them inputs are
        first.
    input_dim, output_dim
        New axes of inputs and outputs, 0 and 1.
    packed_dim
        New axis along which a word has several codes; None: either.
    """
    if {input_dim, output_dim} != {0, 1} or packed_dim not in (None, 0, 1):
        got = f"{input_dim}, {output_dim}, {packed_dim}"
        raise ArgumentError("input_dim, output_dim, packed_dim", "the axes 0 and 1 of a matrix", got)
    attrs: Any = param
    in_axis, out_axis = _axes_of(param)
    packed = getattr(attrs, "packed_dim", None)
    order = {input_dim: in_axis, output_dim: out_axis}
    if packed_dim is not None and (packed is None or order[packed_dim] != packed):
        raise ArgumentError("param", f"packed along the new axis {packed_dim}", f"packed along axis {packed}")
    if (in_axis, out_axis) != (input_dim, output_dim):
        param.data = param.data.t().contiguous()
    attrs.input_dim, attrs.output_dim = input_dim, output_dim
    if packed is not None:
        attrs.packed_dim = next(axis for axis, source in order.items() if source == packed)
    return param


def read_layer(
    config: MPLinearLayerConfig,
    name: str,
    w_q: Tensor,
    w_s: Tensor,
    w_zp: Tensor | None,
    g_idx: Tensor | None,
) -> GPTQWeight:
    """Read the parameters of an engine's layer as a typed weight, and check every shape."""
    for part, tensor in (("weight", w_q), ("scales", w_s), ("zero points", w_zp), ("g_idx", g_idx)):
        if tensor is not None:
            check_values(f"{name}: {part}", tensor)
    if w_s.dtype != config.scale_dtype:
        stated, got = (str(dtype).removeprefix("torch.") for dtype in (config.scale_dtype, w_s.dtype))
        hint = f"remedy   choose a kernel for a config whose scale_type is {got}"
        raise DtypeError(f"{name}: scales", [stated], got, hint=hint)
    K, N = config.partition_weight_shape
    bits, groups = config.weight_type.size_bits, config.groups
    codes = _codes(config, w_q)
    _expect(f"{name}: weight", codes, (K, N), "(K, N) codes")
    scales = _rows_first(w_s)
    _expect(f"{name}: scales", scales, (groups, N), "(G, N)")
    if w_zp is None:
        zeros = torch.full_like(scales, config.weight_type.bias, dtype=torch.int32)
    else:
        zeros = (config.zeros or STORED_MINUS_ONE).read(_packed(w_zp), _along_n(config, bits))
        _expect(f"{name}: zero points", zeros, (groups, N), "(G, N)")
    base = GPTQConfig(bits, config.group_size, config.zeros or STORED_MINUS_ONE)
    if g_idx is not None and not g_idx.numel() and not config.is_k_partitioned:
        g_idx = None  # rows in order; for a share the first group is unknown
    if g_idx is not None and g_idx.numel() > config.group_size and groups > 1 and not g_idx.any():
        problem, expected = "all zero, with two readings", f"the group of each row, 0 to {groups - 1}"
        raise AmbiguousIndexError(f"{name}: g_idx", problem, expected, f"0 for all {K} rows")
    rows = base.in_order(K, codes.device) if g_idx is None else g_idx.long()
    _expect(f"{name}: g_idx", rows, (K,), "(K,)")
    whole = (config.full_weight_shape[1], config.full_weight_shape[0])
    typed = Codes(bits, codes.T, scales.T, zeros.T, rows)
    own_config = replace(base, positional=groups > 1 and g_idx is None)
    return GPTQWeight.from_codes(typed, scales.data, Layer((N,), K, whole, name), own_config)


def _codes(config: MPLinearLayerConfig, param: Tensor) -> Tensor:
    bits, (in_axis, _) = config.weight_type.size_bits, _axes_of(param)
    along_k = getattr(param, "packed_dim", in_axis) == in_axis
    words = param.data if in_axis == 0 else param.data.t()
    if along_k and config.order == "awq":
        raise ArgumentError("weight", "packed along N, as AWQ's words are", "packed along K")
    packing = gptq.rows(bits) if along_k else _along_n(config, bits)
    return packing.unpack(words.contiguous())


def _packed(param: Tensor) -> Tensor:
    in_axis, out_axis = _axes_of(param)
    if getattr(param, "packed_dim", out_axis) != out_axis:
        raise ArgumentError("zero points", "packed along N", f"packed along axis {in_axis}")
    return _rows_first(param)


def _along_n(config: MPLinearLayerConfig, bits: int) -> Packing:
    return awq.columns(bits) if config.order == "awq" else gptq.columns(bits)


def _rows_first(param: Tensor) -> Tensor:
    return (param.data if _axes_of(param)[0] == 0 else param.data.t()).contiguous()


def _axes_of(param: Tensor) -> tuple[int, int]:
    """Return (input_dim, output_dim) of a matrix; (0, 1) without attributes."""
    in_axis, out_axis = getattr(param, "input_dim", None), getattr(param, "output_dim", None)
    if in_axis is None:
        in_axis = 0 if out_axis is None else 1 - out_axis
    if out_axis is None:
        out_axis = 1 - in_axis
    if param.ndim != 2 or {in_axis, out_axis} != {0, 1}:
        expected = "a matrix with input_dim and output_dim 0 and 1"
        raise ArgumentError("param", expected, f"{tuple(param.shape)}: {in_axis}, {out_axis}")
    return in_axis, out_axis


def _expect(name: str, tensor: Tensor, shape: tuple[int, ...], formula: str) -> None:
    """Raise ShapeError for a tensor of another shape."""
    if tuple(tensor.shape) != shape:
        raise ShapeError(name, f"{shape} = {formula}", tuple(tensor.shape))
