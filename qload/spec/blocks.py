"""Scales of blocks of outputs and inputs, of outputs, or of fused parts.

A block is (outputs, inputs), with -1 for all inputs; None: one scale for each fused part.
"""

from __future__ import annotations

from collections.abc import Sequence

from qload.devices import StoredRows
from qload.lazy_torch import Tensor, torch
from qload.spec.weight import Layer, expand_parts

Block = tuple[int, int] | None


def part_index(layer: Layer, device: torch.device) -> Tensor | None:
    """Index of the fused part of each output (N,); None for one part."""
    if len(layer.parts) == 1:
        return None
    parts = torch.tensor(layer.parts, device=device)
    return torch.arange(len(layer.parts), device=device).repeat_interleave(parts)


def block_groups(layer: Layer, block: Block, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
    """Row of the scale of each output, None for one each; column of each input, None for one column."""
    if block is None:
        return part_index(layer, device), None
    rows, columns = block
    return (
        torch.arange(layer.N, device=device) // rows if rows > 1 else None,
        torch.arange(layer.K, device=device) // columns if columns > 0 else None,
    )


def block_rows(
    layer: Layer,
    codes: Tensor,
    scales: Tensor,
    block: Block,
    zeros: Tensor | None = None,
    *,
    divide: bool = False,
) -> StoredRows | None:
    """Describe codes of a byte with a matrix of scales, for kernels; None for scales of several parts."""
    if block is None and len(layer.parts) > 1:
        return None
    (N, K), (rows, columns) = (layer.N, layer.K), block or (layer.N, -1)
    n_run, k_run = min(rows, N), min(columns, K) if columns > 0 else K
    return StoredRows(codes, scales, max(n_run, 1), max(k_run, 1), zeros, divide=divide)


def both_scales(scales: Tensor, second: Tensor, parts: Sequence[int], *, divides: bool) -> Tensor:
    """Multiply or divide scales (N, K / 16) by one of each part, `second`: float32, rounded once."""
    column = expand_parts(second, parts)[:, None]
    return scales.float() / column if divides else scales.float() * column
