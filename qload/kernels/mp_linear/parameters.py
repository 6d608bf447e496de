"""A layer's tagged parameters as a typed weight, whichever way round they lie."""

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
    """Transpose a tagged parameter in place so that its tags are the ones asked for.

    A parameter with one tag has the other one at its other axis. ArgumentError where only a repack could
    bring the packed axis to where it is asked.

    Parameters
    ----------
    param
        A matrix, tagged `input_dim`, `output_dim` and perhaps `packed_dim`; inputs first where it is not
        tagged.
    input_dim, output_dim
        The axes, 0 and 1, along which inputs and outputs are to lie.
    packed_dim
        The axis along which words are to hold several codes; None: wherever they do.
    """
    if {input_dim, output_dim} != {0, 1} or packed_dim not in (None, 0, 1):
        asked = f"{input_dim}, {output_dim}, {packed_dim}"
        raise ArgumentError("input_dim, output_dim, packed_dim", "the axes 0 and 1 of a matrix", asked)
    tags: Any = param
    here_in, here_out = _dims(param)
    packed = getattr(tags, "packed_dim", None)
    order = {input_dim: here_in, output_dim: here_out}
    if packed_dim is not None and (packed is None or order[packed_dim] != packed):
        raise ArgumentError(
            "param", f"packed along what is to be axis {packed_dim}", f"packed along axis {packed}"
        )
    if (here_in, here_out) != (input_dim, output_dim):
        param.data = param.data.t().contiguous()
    tags.input_dim, tags.output_dim = input_dim, output_dim
    if packed is not None:
        tags.packed_dim = next(to for to, source in order.items() if source == packed)
    return param


def read_layer(
    config: MPLinearLayerConfig,
    name: str,
    w_q: Tensor,
    w_s: Tensor,
    w_zp: Tensor | None,
    g_idx: Tensor | None,
) -> GPTQWeight:
    """Parameters as the engines hold them -> a typed weight, every shape checked."""
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
    known = GPTQConfig(bits, config.group_size, config.zeros or STORED_MINUS_ONE)
    if g_idx is not None and not g_idx.numel() and not config.is_k_partitioned:
        g_idx = None  # rows in order; of a share nothing would tell from which group on
    if g_idx is not None and g_idx.numel() > config.group_size and groups > 1 and not g_idx.any():
        what, wanted = "all zero, with two readings", f"the group of each row, 0 to {groups - 1}"
        raise AmbiguousIndexError(f"{name}: g_idx", what, wanted, f"0 for all {K} rows")
    rows = known.in_order(K, codes.device) if g_idx is None else g_idx.long()
    _expect(f"{name}: g_idx", rows, (K,), "(K,)")
    whole = (config.full_weight_shape[1], config.full_weight_shape[0])
    typed = Codes(bits, codes.T, scales.T, zeros.T, rows)
    own = replace(known, positional=groups > 1 and g_idx is None)
    return GPTQWeight.from_codes(typed, scales.data, Layer((N,), K, whole, name), own)


def _codes(config: MPLinearLayerConfig, param: Tensor) -> Tensor:
    bits, (here_in, _) = config.weight_type.size_bits, _dims(param)
    along_k = getattr(param, "packed_dim", here_in) == here_in
    words = param.data if here_in == 0 else param.data.t()
    if along_k and config.order == "awq":
        raise ArgumentError("weight", "packed along N, as AWQ's words are", "packed along K")
    packing = gptq.rows(bits) if along_k else _along_n(config, bits)
    return packing.unpack(words.contiguous())


def _packed(param: Tensor) -> Tensor:
    here_in, here_out = _dims(param)
    if getattr(param, "packed_dim", here_out) != here_out:
        raise ArgumentError("zero points", "packed along N", f"packed along axis {here_in}")
    return _rows_first(param)


def _along_n(config: MPLinearLayerConfig, bits: int) -> Packing:
    return awq.columns(bits) if config.order == "awq" else gptq.columns(bits)


def _rows_first(param: Tensor) -> Tensor:
    return (param.data if _dims(param)[0] == 0 else param.data.t()).contiguous()


def _dims(param: Tensor) -> tuple[int, int]:
    """(input_dim, output_dim) of a matrix; an untagged one has its inputs first."""
    here_in, here_out = getattr(param, "input_dim", None), getattr(param, "output_dim", None)
    if here_in is None:
        here_in = 0 if here_out is None else 1 - here_out
    if here_out is None:
        here_out = 1 - here_in
    if param.ndim != 2 or {here_in, here_out} != {0, 1}:
        raise ArgumentError(
            "param",
            "a matrix with input_dim and output_dim 0 and 1",
            f"{tuple(param.shape)}: {here_in}, {here_out}",
        )
    return here_in, here_out


def _expect(what: str, tensor: Tensor, shape: tuple[int, ...], formula: str) -> None:
    if tuple(tensor.shape) != shape:
        raise ShapeError(what, f"{shape} = {formula}", tuple(tensor.shape))
