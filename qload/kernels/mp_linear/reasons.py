"""Why a kernel cannot take a layer: the checks that all kernels share, the first no as a sentence."""

from collections.abc import Iterator, Sequence

import torch

from qload.kernels.mp_linear.contract import MPLinearLayerConfig


def why_not(
    c: MPLinearLayerConfig,
    bits: Sequence[int],
    groups: Sequence[int] | None,
    act_types: Sequence[torch.dtype],
) -> str | None:
    """The first reason against a config, or None. `groups` None: of any size."""
    return next(_reasons(c, bits, groups, act_types), None)


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
    if c.is_k_partitioned and not c.has_g_idx and c.group_size > 0 and K % c.group_size:
        yield f"a cut of K = {full_K} at multiples of {K} falls inside groups of {c.group_size}"
    fill = 32 if kind.size_bits == 3 else 32 // kind.size_bits
    for dim, size in (("K", K), ("N", N)):
        if size % fill:
            yield f"needs K and N in multiples of {fill}, the codes of whole words; got {dim} = {size}"


def _zero_points(c: MPLinearLayerConfig) -> Iterator[str]:
    if c.zero_points and c.weight_type.has_bias():
        yield f"{c.weight_type} has a bias already, and the config zero points too"
    if not c.zero_points and not c.weight_type.has_bias():
        yield f"{c.weight_type} has no bias, and the config no zero points: nothing says what a code means"
    if c.zero_points and c.zeros is None:
        yield "zero_points is true and `zeros` is not set: Stored() or StoredMinusOne(), nothing tells which"


def _listed(values: Sequence[object]) -> str:
    *most, last = map(str, values)
    return f"{', '.join(most)} or {last}" if most else last
