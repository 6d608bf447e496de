"""AWQ <-> GPTQ: the same codes packed along the other axis, groups written out or left implied."""

import torch

from qload.errors import RepackError
from qload.formats import AWQConfig, AWQWeight, GPTQConfig, GPTQWeight
from qload.layouts import Stored, ZeroPoints, awq, gptq

BITS = 4
CODES_PER_WORD = 8


def to_gptq(weight: AWQWeight, zeros: ZeroPoints) -> GPTQWeight:
    """Exact for every zero point, in a convention that can say it; needs K in multiples of 8."""
    codes, (_, K) = weight.codes(), weight.shape
    if K % CODES_PER_WORD:
        raise RepackError(
            "awq", "gptq", f"K = {K} is not a multiple of {CODES_PER_WORD}, the codes of a word"
        )
    assert codes.zeros is not None  # an AWQ weight has them, and groups
    assert codes.k_group is not None
    groups = weight.scales.shape[0]
    return GPTQWeight(
        config=GPTQConfig(BITS, weight.config.group_size, zeros, positional=groups > 1),
        qweight=gptq.rows(BITS).pack(codes.codes.T),
        qzeros=zeros.write(codes.zeros.T, gptq.columns(BITS)),
        scales=weight.scales,
        g_idx=codes.k_group.to(torch.int32),
        layer=weight.layer,
    )


def from_gptq(weight: GPTQWeight) -> AWQWeight:
    """Exact, or refused: AWQ has 4 bits, groups of one size in order, and zero points up to 15."""
    codes, (_, K) = weight.codes(), weight.shape
    groups = weight.scales.shape[0]
    reason = _why_not(weight, K, groups)
    if reason:
        raise RepackError("gptq", "awq", reason)
    assert codes.zeros is not None  # a GPTQ weight has them
    packing = awq.columns(BITS)
    return AWQWeight(
        config=AWQConfig(-1 if groups == 1 else K // groups),
        qweight=packing.pack(codes.codes.T),
        qzeros=Stored().write(codes.zeros.T, packing),
        scales=weight.scales,
        layer=weight.layer,
    )


def _why_not(weight: GPTQWeight, K: int, groups: int) -> str | None:
    if weight.config.bits != BITS:
        return f"awq has {BITS} bits, got {weight.config.bits}"
    if K % groups:
        return f"K = {K} does not divide into {groups} groups of one size"
    in_order = torch.arange(K, device=weight.device) // (K // groups)
    if not bool((weight.g_idx == in_order).all()):
        return "the groups are not in order along K (act order), and awq has no g_idx"
    zeros = weight.config.zeros.read(weight.qzeros, gptq.columns(BITS))
    if int(zeros.max()) >= 2**BITS:
        return f"a zero point of {int(zeros.max())} does not fit {BITS} bits"
    return None
