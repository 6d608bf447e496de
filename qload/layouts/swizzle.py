"""Block scales in the order of tensor cores: tiles of 128 outputs and 4 groups, 512 bytes each.

A matrix of scales (N, G), padded with zeros to whole tiles, is stored as (N/128, G/4, 32, 4, 4), where output
32 * j + i of a tile is at [i, j]. The stored shape is (N/4, 4 * G) of the padded sizes. Source: `to_blocked`
of torchao 0.18.0, bit-equal to it.
"""

from __future__ import annotations

from typing import Any

from qload.lazy_torch import Tensor, torch

OUTPUTS, GROUPS, ROWS = 128, 4, 32


def scale_axes(group: int) -> dict[str, Any]:
    """Axes of scales of `group` inputs: `text` of the stored tensor, `view` in whole tiles, for cuts."""
    per_row = OUTPUTS // ROWS
    stored = f"N@{OUTPUTS}^/{per_row} K/{group}@{GROUPS}^*{per_row}"
    return {"text": stored, "view": f"N/{OUTPUTS}^ K/{group}/{GROUPS}^ {OUTPUTS * GROUPS}"}


def unswizzle_scales(stored: Tensor, N: int, groups: int) -> Tensor:
    """Convert a stored tensor to scales (N, `groups`) in plain order."""
    plain: Tensor = plain_scales(stored.view(torch.uint8), N, groups)
    return plain.contiguous().view(stored.dtype)


def plain_scales(stored: Any, N: int, groups: int) -> Any:
    """Convert a stored tensor or array of bytes to scales (N, `groups`) in plain order."""
    tiles = stored.reshape(-(-N // OUTPUTS), -(-groups // GROUPS), ROWS, OUTPUTS // ROWS, GROUPS)
    return tiles.swapaxes(1, 3).reshape(OUTPUTS * tiles.shape[0], GROUPS * tiles.shape[1])[:N, :groups]


def swizzle_scales(scales: Tensor) -> Tensor:
    """Convert plain scales (N, groups) of one byte each to this order, padded with zeros."""
    N, groups = scales.shape
    rows, columns = -(-N // OUTPUTS) * OUTPUTS, -(-groups // GROUPS) * GROUPS
    padded = torch.nn.functional.pad(scales.view(torch.uint8), (0, columns - groups, 0, rows - N))
    return tiled(padded).reshape(rows // (OUTPUTS // ROWS), columns * (OUTPUTS // ROWS)).view(scales.dtype)


def tiled(scales: Tensor) -> Tensor:
    """Divide plain scales (N, G) of whole tiles, of any type, into tiles (N/128, G/4, 32, 4, 4)."""
    blocks = scales.reshape(-1, OUTPUTS // ROWS, ROWS, scales.shape[1] // GROUPS, GROUPS)
    return blocks.permute(0, 3, 2, 1, 4)


def find_padding(stored: Tensor, N: int, groups: int) -> str | None:
    """Return why `swizzle_scales` cannot restore a stored tensor, whose padding is not 0, or None."""
    restored = swizzle_scales(unswizzle_scales(stored, N, groups))
    if torch.equal(restored.view(torch.uint8), stored.view(torch.uint8)):
        return None
    return "the padding of its swizzled scales is not 0, and would be lost"
