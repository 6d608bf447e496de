"""What the bench takes for a right result, before it shows a time."""

import pytest
import torch
from torch import Tensor

from tests.bench.linear import right, wrong


def layer(K: int) -> tuple[Tensor, Tensor, Tensor]:
    """x (M, K), a weight as it is rounded, and the product, rounded once."""
    make = torch.Generator().manual_seed(K)
    x, codes = torch.randn(16, K, generator=make), torch.randint(16, (256, K), generator=make) - 8
    scales = torch.rand(256, K // 128, generator=make).half().float() * 0.02
    w = (codes * scales.repeat_interleave(128, 1)).half()
    x = x.half()
    return x, w, (x.double() @ w.double().T).half()


@pytest.mark.parametrize("K", [4096, 28672])
def test_a_right_result_passes(K: int) -> None:
    x, w, y = layer(K)

    assert right(y, x, w)
    assert not wrong((x.float() @ w.float().T).half(), x, w)


@pytest.mark.parametrize("K", [4096, 8192, 28672])
@pytest.mark.parametrize("fault", ["last row", "last rows", "zero point of a group", "nan", "one token"])
def test_what_a_kernel_may_lose_does_not(K: int, fault: str) -> None:
    x, w, _ = layer(K)
    w_wrong, x_wrong = w.clone(), x.clone()
    if fault in ("last row", "last rows"):
        w_wrong[:, -16 if fault == "last rows" else -1 :] = 0
    if fault == "zero point of a group":
        w_wrong[:, -128:] += 0.01
    if fault == "one token":
        x_wrong[7] = x[6]
    y = (x_wrong.double() @ w_wrong.double().T).half()
    if fault == "nan":
        y[3, 5] = torch.nan

    assert not right(y, x, w)
