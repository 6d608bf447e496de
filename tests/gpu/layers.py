"""Small layers of every kind for kernels to multiply, in Marlin's order and in strips, on the device."""

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import pytest
import torch
from torch import Tensor

from qload.formats import GPTQConfig, GPTQWeight
from qload.kernel_formats import GPTQMarlinWeight, StripsWeight, repack
from qload.kernel_formats.strips import COLUMNS
from qload.kernels.cuda import marlin, strips
from qload.kernels.cuda.marlin import MarlinCall
from qload.layouts import Stored, gptq
from qload.loader import ConfiguredFormat, FormatLoader
from qload.parallel import Rank
from qload.spec import Weight
from qload.storage import MemoryStorage
from qload.weights import Weights

Zeros = bool | Literal["offsets", "centered offsets"]  # zero points, or offsets of strips
DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])


def layer(
    K: int,
    N: int,
    group: int,
    zeros: Zeros = False,
    act_order: bool = False,
    dtype: torch.dtype = torch.float16,
    *,
    exact: bool = False,
    bits: int = 4,
    share: int = 1,
    layout: str = "marlin",
) -> GPTQMarlinWeight:
    """Random codes. `exact`: scales that are powers of two. `share`: one of so many ranks has these K rows.

    Of an act order a share has rows of groups that others have rows of too.
    """
    if isinstance(zeros, str):
        symmetric = layer(
            K, N, group, False, act_order, dtype, exact=exact, bits=bits, share=share, layout=layout
        )
        return with_offsets(symmetric, zeros == "centered offsets", exact)
    make, whole = torch.Generator().manual_seed(K + N), K * share
    groups = 1 if group == -1 else -(-whole // group)
    codes = torch.randint(2**bits, (whole, N), generator=make)
    points = torch.randint(2**bits, (groups, N), generator=make)
    stored = points if zeros else torch.full_like(points, 2 ** (bits - 1))
    scales = 2.0 ** torch.randint(-3, 0, (groups, N), generator=make)
    if not exact:
        scales = torch.rand(groups, N, generator=make) * 0.02 + 0.001
    g_idx = torch.arange(whole) // (whole if group == -1 else group)
    if act_order:
        g_idx = g_idx[torch.randperm(whole, generator=make)]
    config = GPTQConfig(bits, group, zeros=Stored())
    weight = GPTQWeight(
        config=config,
        qweight=gptq.rows(bits).pack(codes),
        qzeros=Stored().write(stored, gptq.columns(bits)),
        scales=scales.to(dtype),
        g_idx=g_idx.to(torch.int32),
    )
    storage = MemoryStorage({f"layer.{name}": tensor for name, tensor in weight.fields().items()})
    loader = FormatLoader(ConfiguredFormat(GPTQWeight, config))
    held = Weights(storage, loader=loader, process_group=Rank(0, share)).get_weights_row("layer")
    made = repack(held, layout)
    assert isinstance(made, GPTQMarlinWeight)
    assert (made.config.zero_point, made.config.is_k_full) == (zeros, share == 1)
    return made.to("cuda")


def with_offsets(weight: GPTQMarlinWeight, centered: bool, exact: bool) -> StripsWeight:
    """Add random offsets to symmetric strips: of `exact` ones the sums of bfloat16 weights are exact.

    `centered`: all zero points are the middle code, else 0.
    """
    assert isinstance(weight, StripsWeight)
    bits, scales = weight.config.bits, weight.plain_scales()
    make, zero = torch.Generator().manual_seed(scales.numel()), 2 ** (bits - 1) if centered else 0
    steps = torch.randint(2**bits, scales.shape, generator=make).float() - zero
    if not exact:
        steps -= torch.rand(scales.shape, generator=make) * 2**bits
    offsets = (scales * steps.to(scales.device)).to(scales.dtype)
    config = replace(weight.config, offset="weight", zero=zero)
    return replace(weight, config=config, offsets=COLUMNS.apply(offsets))


def far_apart(weight: GPTQMarlinWeight, *, exact: bool, in_rows: bool = False) -> GPTQMarlinWeight:
    """The same codes by scales of a column that are further apart than fp16 has normal numbers for them all.

    `exact`: powers of two, negative ones and zeros among them, whose sums are exact. `in_rows`: all columns
    of one group of rows are near each other.
    """
    make, shape = torch.Generator().manual_seed(weight.scales.numel()), weight.scales.shape
    sizes = (shape[0], 1) if in_rows else shape
    if exact:
        signs = torch.tensor([-1.0, 0.0, 1.0, 1.0])[torch.randint(4, shape, generator=make)]
        scales = 2.0 ** torch.randint(-6, 1, sizes, generator=make) * signs
    else:
        near = 1 + torch.rand(shape, generator=make)
        scales = torch.exp(torch.randn(sizes, generator=make) * 3 - 5).clamp(2e-4, 0.5) * near
    return replace(weight, scales=scales.to(weight.scales))


def call(x: Tensor, weight: GPTQMarlinWeight) -> MarlinCall:
    """What a kernel gets of x and a weight."""
    if isinstance(weight, StripsWeight):
        return strips.StripsCall(*strips.arguments(x, weight))
    return MarlinCall(*marlin.arguments(x, weight))


def divided(
    run: Callable[..., Tensor], weight: GPTQMarlinWeight, columns: int, split: int
) -> Callable[[Tensor], Tensor]:
    """A kernel with a division of the layer that it does not choose."""
    return lambda x: run(call(x, weight), columns, split)


def inputs(M: int, weight: Weight, dtype: torch.dtype) -> Tensor:
    """Random x (M, K)."""
    make = torch.Generator(device="cuda").manual_seed(M)
    return torch.randn(M, weight.layer.K, device="cuda", generator=make).to(dtype)
