"""GPTQ as the layout through which all others are reached: it can say every group, zero point and order."""

from dataclasses import replace

import torch
from torch import Tensor

from qload.errors import RepackError
from qload.formats import GPTQConfig, GPTQWeight
from qload.layouts import Stored, ZeroPoints, gptq
from qload.spec import Codes, Layer


def from_codes(
    codes: Codes,
    scales: Tensor,
    layer: Layer,
    config: GPTQConfig | None = None,
    *,
    index: torch.dtype = torch.int32,
) -> GPTQWeight:
    """Codes in words along K, and scales (G, N) in their own dtype, as a GPTQ weight.

    `config`: of the GPTQ weight it once was; without it groups in order and stored zero points.
    """
    assert codes.zeros is not None  # every format that is repacked has them, and groups
    assert codes.k_group is not None
    K, groups, fill = codes.codes.shape[1], scales.shape[0], 32 // codes.bits if codes.bits != 3 else 32
    if K % fill:
        raise RepackError(layer.name or "weight", "gptq", f"K = {K} is not a multiple of {fill}: short words")
    if config is None:
        config = config_of(codes.bits, groups, codes.k_group)
    return GPTQWeight(
        config=config,
        qweight=gptq.rows(codes.bits).pack(codes.codes.T),
        qzeros=config.zeros.write(codes.zeros.T, gptq.columns(codes.bits)),
        scales=scales.contiguous(),
        g_idx=codes.k_group.to(index),
        layer=layer,
    )


def with_zeros(weight: GPTQWeight, zeros: ZeroPoints) -> GPTQWeight:
    """The same weight, its zero points in another convention, or RepackError where it cannot say them."""
    if weight.config.zeros == zeros:
        return weight
    logical = zero_points(weight)
    lowest, highest = zeros.span(weight.config.bits)
    for value, wrong in ((int(logical.max()), f"above {highest}"), (int(logical.min()), f"below {lowest}")):
        if value > highest or value < lowest:
            raise RepackError("gptq", f"zero points {zeros.name}", f"a zero point of {value} is {wrong}")
    words = zeros.write(logical, gptq.columns(weight.config.bits))
    return replace(weight, config=replace(weight.config, zeros=zeros), qzeros=words)


def zero_points(weight: GPTQWeight) -> Tensor:
    """Zero points (G, N) as they are meant."""
    return weight.config.zeros.read(weight.qzeros, gptq.columns(weight.config.bits))


def is_symmetric(weight: GPTQWeight) -> bool:
    """Whether every zero point is 2**(bits - 1), so that a kernel need not read them."""
    return bool((zero_points(weight) == 2 ** (weight.config.bits - 1)).all())


def in_order(weight: GPTQWeight) -> bool:
    """Whether rows and groups follow each other, groups of one size but the last."""
    config, (_, K) = weight.config, weight.shape
    groups = weight.scales.shape[0]
    if groups == 1:
        return True
    here = config.in_order(K, weight.device)
    return config.groups(K) == groups and bool((weight.g_idx == here).all())


def config_of(bits: int, groups: int, k_group: Tensor, zeros: ZeroPoints | None = None) -> GPTQConfig:
    """The config of groups whose size is that of the largest, or of one group for all."""
    size = int(torch.bincount(k_group.long()).max()) if groups > 1 else -1
    config = GPTQConfig(bits, size, zeros or Stored())
    ordered = groups > 1 and bool((k_group == config.in_order(k_group.numel(), k_group.device)).all())
    return replace(config, positional=ordered)
