"""Few tokens times EETQ's codes as they are stored: no code is moved."""

import pytest
import torch
from torch import Tensor

from qload import native
from qload.formats import EETQConfig, EETQWeight
from qload.kernels import cpu
from qload.kernels.cpu import PAIRS
from qload.layouts import eetq
from qload.testing import assert_same_bits
from tests.native.memory import ISAS

N, K = 128, 192


def weight() -> EETQWeight:
    make = torch.Generator().manual_seed(0)
    stored = torch.randint(-128, 128, (K, N), generator=make, dtype=torch.int8)
    return EETQWeight(config=EETQConfig(), weight=stored, weight_scales=2.0 ** (torch.arange(N) % 5).half())


@pytest.fixture(autouse=True)
def unmoved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes that are put in rows are an error."""

    def refuse(stored: Tensor) -> Tensor:
        raise AssertionError(f"{tuple(stored.shape)} codes were moved")

    monkeypatch.setattr(eetq, "unpack", refuse)
    monkeypatch.setattr(cpu, "ranked", lambda *call: (PAIRS,))


@ISAS
@pytest.mark.parametrize("M", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_sums_of_integers_are_exact(
    isa: str, M: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, x = weight(), torch.randint(-2, 3, (M, K), generator=torch.Generator().manual_seed(M)).to(dtype)
    bias = torch.arange(N).float()
    with native.using(isa, 2):
        y = held.get_linear(bias)(x)

    monkeypatch.undo()
    assert_same_bits(y, (x.double() @ held.dequantize().double().T + bias).to(dtype))


@ISAS
def test_every_weight_is_read_back(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    held = weight()

    def multiply(x: Tensor) -> Tensor:
        with native.using(isa, 1):
            return torch.cat([held.get_linear()(each) for each in x.split(4)])

    one_hot = multiply(torch.eye(K))
    monkeypatch.undo()
    assert_same_bits(one_hot, held.dequantize().T.contiguous())


def test_what_is_not_finite_stays_with_its_token() -> None:
    held, x = weight(), torch.ones(3, K)
    whole = held.get_linear()(x)
    x[1, 70] = torch.nan
    y = held.get_linear()(x)

    assert y[1].isnan().all()
    assert_same_bits(y[::2], whole[::2])
