"""Why a kernel cannot take a layer: the checks that all kernels share, the first no as a sentence."""

from collections.abc import Iterator, Sequence
from typing import Any, get_args

import torch

from qload.formats.awq import BITS as AWQ_BITS
from qload.kernels.mp_linear.contract import MPLinearLayerConfig, PackedOrder
from qload.kernels.scalar_type import ScalarType
from qload.layouts import ZeroPoints


def why_not(
    c: MPLinearLayerConfig,
    bits: Sequence[int],
    groups: Sequence[int] | None,
    act_types: Sequence[torch.dtype],
) -> str | None:
    """The first reason against a config, or None. `groups` None: of any size."""
    return malformed(c) or next(_reasons(c, bits, groups, act_types), None)


def rows_missing(c: MPLinearLayerConfig) -> str | None:
    """Why a kernel that counts groups by their size cannot multiply a share of an act order, or None."""
    if not (c.has_g_idx and c.is_k_partitioned):
        return None
    here, full = c.partition_weight_shape[0], c.full_weight_shape[0]
    return f"act order needs all rows of every group, and this rank has {here} of {full}"


def malformed(c: Any) -> str | None:
    """What in a config is of another type than it is declared to be, or None."""
    if not isinstance(c, MPLinearLayerConfig):
        return f"the config has to be an MPLinearLayerConfig, got {c!r}"
    dtype = "a torch.dtype"
    checks: list[tuple[str, bool, str]] = [
        *((name, _is_shape(getattr(c, name)), "(K, N)") for name in _SHAPES),
        ("weight_type", isinstance(c.weight_type, ScalarType), "a ScalarType"),
        ("act_type", isinstance(c.act_type, torch.dtype), dtype),
        ("out_type", isinstance(c.out_type, torch.dtype | None), f"{dtype} or None"),
        ("scale_type", isinstance(c.scale_type, torch.dtype | None), f"{dtype} or None"),
        ("group_size", type(c.group_size) is int, "a whole number"),
        ("zero_points", type(c.zero_points) is bool, "true or false"),
        ("has_g_idx", type(c.has_g_idx) is bool, "true or false"),
        ("zeros", isinstance(c.zeros, ZeroPoints | None), "Stored(), StoredMinusOne() or None"),
        ("order", c.order in get_args(PackedOrder), " or ".join(map(repr, get_args(PackedOrder)))),
    ]
    wrong = next(((name, wanted) for name, well, wanted in checks if not well), None)
    return wrong and f"{wrong[0]} has to be {wrong[1]}, got {getattr(c, wrong[0])!r}"


_SHAPES = ("full_weight_shape", "partition_weight_shape")


def _is_shape(value: object) -> bool:
    return isinstance(value, Sequence) and len(value) == 2 and all(type(size) is int for size in value)


def _reasons(
    c: MPLinearLayerConfig,
    bits: Sequence[int],
    groups: Sequence[int] | None,
    act_types: Sequence[torch.dtype],
) -> Iterator[str]:
    (K, N), (full_K, full_N), kind = c.partition_weight_shape, c.full_weight_shape, c.weight_type
    if min(K, N) < 1 or full_K < K or full_N < N:
        yield f"a share (K, N) = ({K}, {N}) of ({full_K}, {full_N}) is none"
    if not kind.is_integer() or kind.signed or kind.size_bits not in bits:
        yield f"reads unsigned codes of {_listed(bits)} bits, got {kind}"
        return  # nothing below means anything for another type
    if not 0 <= kind.bias < 2**kind.size_bits:
        yield f"a bias is a code, 0 <= bias < {2**kind.size_bits}, got {kind.bias}"
    if c.act_type not in act_types:
        yield f"multiplies {_listed(act_types)}, got {c.act_type}".replace("torch.", "")
    if c.out_type not in (None, c.act_type):
        yield f"writes the dtype it reads, {c.act_type}, got {c.out_type}".replace("torch.", "")
    yield from _zero_points(c)
    if c.group_size < 1 and c.group_size != -1:
        yield f"a group size is -1 or at least 1, got {c.group_size}"
        return
    if groups is not None and c.groups > 1 and c.group_size not in groups:
        yield f"reads groups of {_listed([g for g in groups if g > 0])} or one group, got {c.group_size}"
    if c.is_k_partitioned and not c.has_g_idx and not c.is_one_group and K % c.group_size:
        yield f"a cut of K = {full_K} at multiples of {K} falls inside groups of {c.group_size}"
    yield from _words(c)


def _zero_points(c: MPLinearLayerConfig) -> Iterator[str]:
    if c.zero_points and c.weight_type.has_bias():
        yield f"{c.weight_type} has a bias already, and the config zero points too"
    if not c.zero_points and not c.weight_type.has_bias():
        yield f"{c.weight_type} has no bias, and the config no zero points: nothing says what a code means"
    if c.zero_points and c.zeros is None:
        yield "zero_points is true and `zeros` is not set: Stored() or StoredMinusOne(), nothing tells which"


def _words(c: MPLinearLayerConfig) -> Iterator[str]:
    bits = c.weight_type.size_bits
    if c.order == "awq" and bits not in AWQ_BITS:
        yield f"AWQ's order is one of {_listed(AWQ_BITS)} bits, got {bits}"
    fill = 32 if bits == 3 else 32 // bits
    for dim, size in zip(("K", "N"), c.partition_weight_shape, strict=True):
        if size % fill:
            yield f"needs K and N in multiples of {fill}, the codes of whole words; got {dim} = {size}"


def _listed(values: Sequence[object]) -> str:
    *most, last = map(str, values)
    return f"{', '.join(most)} or {last}" if most else last
