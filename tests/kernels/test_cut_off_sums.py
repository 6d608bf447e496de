"""What tensor cores cut off of sums of e4m3: emulated sums of drawn products, promoted and not."""

import pytest
import torch
from torch import Tensor

from qload.kernels import bounds


def by_tensor_cores(x: Tensor, w: Tensor, promoted: int) -> Tensor:
    """Sums of 32 rows, of addends cut off 13 bits below the largest; float64 adds `promoted` rows."""
    y = x.new_zeros(x.shape[0], w.shape[0])
    for stage in range(0, x.shape[1], promoted):
        total = torch.zeros_like(y)
        for at in range(stage, min(stage + promoted, x.shape[1]), bounds.ADDED_ROWS):
            rows = slice(at, at + bounds.ADDED_ROWS)
            addends = torch.cat([x[:, None, rows] * w[None, :, rows], total[..., None]], -1)
            largest = torch.frexp(addends.abs().amax(-1, keepdim=True)).exponent - 1
            total = (torch.trunc(addends * 2.0 ** (13 - largest)) * 2.0 ** (largest - 13)).sum(-1)
        y += total
    return y


@pytest.mark.parametrize("kind", ["one sign", "both signs", "one large product of a stage"])
def test_promoted_sums_are_within_what_tensor_cores_cut_off(kind: str) -> None:
    make = torch.Generator().manual_seed(0)
    x, w = (torch.rand(rows, 16384, generator=make, dtype=torch.float64) + 0.5 for rows in (3, 5))
    if kind == "both signs":
        w *= torch.randint(0, 2, w.shape, generator=make) * 2 - 1
    elif kind == "one large product of a stage":  # all others are cut off whole
        x, w = torch.full_like(x, 1 - 2.0**-20), torch.ones_like(w)
        x[:, :: bounds.PROMOTED_ROWS] = 2.0**13
    lost, want = bounds.cut_off(x, w), x @ w.T

    off = (by_tensor_cores(x, w, bounds.PROMOTED_ROWS) - want).abs() / lost

    assert bool((off <= 1).all())
    if kind == "one sign":
        assert bool((by_tensor_cores(x, w, 16384) - want).abs().gt(8 * lost).all())
    elif kind == "one large product of a stage":
        assert bool((off > 0.9).all())
