"""Marlin's limits and orders as functions on plain tensors, under their names in engines.

K is `size_k`, N `size_n`, G the number of groups; all functions support 4 and 8 bits. `qload.layouts.marlin`
defines the orders.
"""

import torch
from torch import Tensor, nn

from qload.errors import ArgumentError, DtypeError, ShapeError
from qload.kernel_formats.marlin import GROUP_SIZES, MIN_THREAD_N, count_locks
from qload.kernels.chips import multiprocessors
from qload.kernels.scalar_type import ScalarType, scalar_types
from qload.layouts import awq, gptq, marlin

MARLIN_SUPPORTED_GROUP_SIZES = list(GROUP_SIZES)
GPTQ_MARLIN_MIN_THREAD_N = MIN_THREAD_N
GPTQ_MARLIN_MIN_THREAD_K = 128
GPTQ_MARLIN_TILE = marlin.TILE_K

SCALAR_TYPE_UINT4: ScalarType = scalar_types.uint4
SCALAR_TYPE_UINT8: ScalarType = scalar_types.uint8
WITH_ZERO_POINTS = (SCALAR_TYPE_UINT4, SCALAR_TYPE_UINT8)
SYMMETRIC = (scalar_types.uint4b8, scalar_types.uint8b128)


def verify_marlin_supported(quant_type: ScalarType, group_size: int, has_zp: bool = True) -> None:
    """Raise ArgumentError if Marlin has no kernel for codes of type `quant_type` in groups of `group_size`.

    `has_zp`: whether zero points are stored.
    """
    types = WITH_ZERO_POINTS if has_zp else SYMMETRIC
    if quant_type not in types:
        zeros = "with" if has_zp else "without"
        known = " or ".join(map(str, types))
        raise ArgumentError("quant_type", f"{known}, Marlin's types {zeros} zero points", str(quant_type))
    if group_size not in MARLIN_SUPPORTED_GROUP_SIZES:
        sizes = ", ".join(map(str, MARLIN_SUPPORTED_GROUP_SIZES))
        raise ArgumentError("group_size", f"one of {sizes}", str(group_size))


def verify_marlin_supports_shape(
    output_size_per_partition: int, input_size_per_partition: int, input_size: int, group_size: int
) -> None:
    """Raise ArgumentError unless Marlin's thread blocks and the groups divide a rank's share of a layer.

    The share is `input_size_per_partition` by `output_size_per_partition`, the layer has `input_size` inputs
    in groups of `group_size`. `AWQMarlinLinearMethod` pads to whole thread blocks, and has no such limit.
    """
    for argument, size, name, step in (
        ("output_size_per_partition", output_size_per_partition, "min_thread_n", GPTQ_MARLIN_MIN_THREAD_N),
        ("input_size_per_partition", input_size_per_partition, "min_thread_k", GPTQ_MARLIN_MIN_THREAD_K),
    ):
        if size % step:
            raise ArgumentError(argument, f"a multiple of {name} = {step}", str(size))
    if 0 < group_size < input_size and input_size_per_partition % group_size:
        raise ArgumentError(
            "input_size_per_partition",
            f"a multiple of group_size = {group_size}, as input_size = {input_size} has several groups",
            str(input_size_per_partition),
        )


def marlin_make_workspace(device: torch.device | str) -> Tensor:
    """Create zeroed int32 locks for one layer on `device`, a few for each of its multiprocessors.

    The kernel leaves them zero. On the CPU there are enough for any chip, as the layer may move to one.
    """
    device = torch.device(device)
    return torch.zeros(count_locks(0, multiprocessors(device)), dtype=torch.int32, device=device)


def marlin_24_make_workspace(size_n: int, device: torch.device | str) -> Tensor:
    """Create zeroed int32 locks for one 2:4 sparse layer of N = `size_n` columns on `device`.

    Its kernel counts blocks of columns. ArgumentError for an invalid `size_n`.
    """
    if type(size_n) is not int or size_n < 1:
        raise ArgumentError("size_n", "at least 1", repr(size_n))
    count = count_locks(size_n, multiprocessors(torch.device(device)), sparse=True)
    return torch.zeros(count, dtype=torch.int32, device=device)


def marlin_make_empty_g_idx(device: torch.device | str) -> nn.Parameter:
    """Create an empty int32 parameter on `device`, for rows in the order of their groups."""
    return nn.Parameter(torch.empty(0, dtype=torch.int32, device=device), requires_grad=False)


def get_scale_perms() -> tuple[list[int], list[int]]:
    """Return the orders of scales: of 64 columns with groups, and of 32 columns with one scale each."""
    columns = torch.arange(64).unsqueeze(0)
    grouped = marlin.SCALES_GROUPED.apply(columns)
    single = marlin.SCALES_PER_COLUMN.apply(columns[:, :32])
    return grouped.flatten().tolist(), single.flatten().tolist()


def marlin_permute_scales(s: Tensor, size_k: int, size_n: int, group_size: int) -> Tensor:
    """Permute scales `s` (G, N), of any dtype, to Marlin's order, with another one for a single group.

    ShapeError if K = `size_k`, N = `size_n` and `group_size` give another shape: the kernel infers the group
    size from the rows, and a wrong order or size would not be noticed. ArgumentError for an invalid group
    size.
    """
    if group_size != -1 and group_size < 1:
        raise ArgumentError("group_size", "-1 or at least 1", str(group_size))
    groups = 1 if group_size == -1 else -(-size_k // group_size)
    _expect("s", s, (groups, size_n), "(G, N)")
    return marlin.scales(groups).apply(s)


def marlin_permute_bias(b: Tensor) -> Tensor:
    """Permute a bias `b` (N,) to the order of scales per column; ShapeError unless N is a multiple of 32."""
    if b.ndim != 1:
        raise ShapeError("b", "(N,)", tuple(b.shape))
    return marlin.BIAS.apply(b)


def pack_cols(q_w: Tensor, num_bits: int, size_k: int, size_n: int) -> Tensor:
    """Pack codes `q_w` (K, N), of any integer dtype, to int32 words (K, N * bits / 32), from the low bits on.

    K is `size_k`, N `size_n`, bits `num_bits`, 4 or 8.
    """
    _check_bits(num_bits)
    _expect("q_w", q_w, (size_k, size_n), "(K, N)")
    _check_columns(size_n, num_bits)
    _check_integers("q_w", q_w)
    return gptq.columns(num_bits).pack(q_w)


def unpack_cols(packed_q_w: Tensor, num_bits: int, size_k: int, size_n: int) -> Tensor:
    """Unpack int32 words `packed_q_w` (K, N * bits / 32) to int32 codes (K, N); the inverse of `pack_cols`.

    K is `size_k`, N `size_n`, bits `num_bits`, 4 or 8.
    """
    _check_bits(num_bits)
    _check_columns(size_n, num_bits)
    _expect("packed_q_w", packed_q_w, (size_k, size_n * num_bits // 32), f"(K, N*{num_bits}/32)")
    return gptq.columns(num_bits).unpack(packed_q_w)


def marlin_zero_points(zp: Tensor, size_k: int, size_n: int, num_bits: int) -> Tensor:
    """Pack zero points `zp` (G, N) in [0, 2**bits), with G = `size_k`, to int32 words (G, N * bits / 32).

    N is `size_n`, bits `num_bits`, 4 or 8.
    """
    _check_bits(num_bits)
    _expect("zp", zp, (size_k, size_n), "(G, N)")
    _check_integers("zp", zp)
    return marlin.zeros(num_bits).pack(zp)


def awq_to_marlin_zero_points(q_zp_packed: Tensor, size_k: int, size_n: int, num_bits: int) -> Tensor:
    """Repack AWQ's words `q_zp_packed` (G, N * bits / 32), with G = `size_k`, to Marlin's.

    N is `size_n`, bits `num_bits`, 4 or 8.
    """
    _check_bits(num_bits)
    _check_columns(size_n, num_bits)
    _expect("q_zp_packed", q_zp_packed, (size_k, size_n * num_bits // 32), f"(G, N*{num_bits}/32)")
    return marlin_zero_points(awq.columns(num_bits).unpack(q_zp_packed), size_k, size_n, num_bits)


def _check_integers(name: str, tensor: Tensor) -> None:
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype == torch.bool:
        raise DtypeError(name, ["an integer dtype"], str(tensor.dtype).removeprefix("torch."))


def _check_bits(num_bits: int) -> None:
    if num_bits not in marlin.BITS:
        raise ArgumentError("num_bits", "4 or 8, as in Marlin's kernels", str(num_bits))


def _check_columns(size_n: int, num_bits: int) -> None:
    if size_n * num_bits % 32:
        raise ArgumentError("size_n", f"a multiple of {32 // num_bits}, the codes of a word", str(size_n))


def _expect(name: str, tensor: Tensor, shape: tuple[int, ...], formula: str) -> None:
    if tuple(tensor.shape) != shape:
        raise ShapeError(name, f"{shape} = {formula}", tuple(tensor.shape))
