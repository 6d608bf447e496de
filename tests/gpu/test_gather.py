"""Inputs that are put in order ahead of a kernel: bit for bit, and the same sums as when a kernel does it."""

import pytest
import torch
from torch import Tensor

from qload.kernels.cuda import exllama, marlin, strips
from qload.kernels.cuda.launch import gathered
from qload.testing import assert_same_bits, assert_sums_exactly, assert_within_bound
from tests.gpu import exllama_layers
from tests.gpu.layers import DTYPES, layer
from tests.gpu.layers import inputs as drawn

pytestmark = pytest.mark.gpu
SIZES = [(8, 8), (96, 128), (104, 128), (1000, 1024), (4096, 4096), (30000, 30080), (120000, 120064)]


def want(x: Tensor, perm: Tensor) -> Tensor:
    missing = perm.shape[0] - x.shape[1]
    return torch.nn.functional.pad(x, (0, missing)).index_select(1, perm)


@DTYPES
@pytest.mark.parametrize("staged", [False, True], ids=["as it lies", "staged"])
@pytest.mark.parametrize("M", [1, 3, 33])
@pytest.mark.parametrize(("K", "rows"), SIZES)
def test_inputs_in_another_order_have_the_same_bits(
    K: int, rows: int, M: int, staged: bool, dtype: torch.dtype
) -> None:
    make = torch.Generator(device="cuda").manual_seed(K)
    bits = torch.randint(-(2**15), 2**15, (M, K), generator=make, device="cuda").to(torch.int16)
    perm = torch.randperm(rows, generator=make, device="cuda").to(torch.int32)

    got = gathered(bits.view(dtype), perm, staged=staged)

    assert_same_bits(got.view(torch.int16), want(bits, perm))


@pytest.mark.parametrize("staged", [False, True], ids=["as it lies", "staged"])
def test_only_the_rows_of_a_token_are_read_and_only_y_is_written(staged: bool) -> None:
    memory = torch.full((6 * 104 + 1,), 7.0, device="cuda").half()
    x = memory[1:].view(6, 104)[1:5]  # not at a multiple of 16 bytes
    x.copy_(torch.arange(4 * 104, device="cuda").view(4, 104))
    perm = torch.randperm(128, device="cuda").to(torch.int32)

    assert_same_bits(gathered(x, perm, staged=staged), want(x, perm))


def test_so_many_tokens_that_a_grid_does_not_hold_them() -> None:
    x = torch.arange(70000 * 8, device="cuda").view(70000, 8).to(torch.int16)
    perm = torch.arange(7, -1, -1, device="cuda", dtype=torch.int32)

    assert_same_bits(gathered(x.view(torch.float16), perm).view(torch.int16), x.flip(1))


@pytest.mark.parametrize("layout", ["marlin", "strips", "exllama"])
@pytest.mark.parametrize("M", [1, 2, 9, 16, 33, 300])
def test_act_order_is_the_layer_in_order_of_inputs_in_order(
    layout: str, M: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {"exact": True, "act_order": True}
    run = {"marlin": marlin, "strips": strips, "exllama": exllama}[layout].linear
    if layout == "exllama":
        weight = exllama_layers.layer(1120, 224, 128, 4, **own)
    else:
        weight = layer(1024, 320, 128, True, **own, layout=layout)  # type: ignore[assignment]
    for least in (1, 1 << 30):  # ExLlama's puts it in order itself too
        monkeypatch.setattr(exllama, "GATHERED", least)
        assert_sums_exactly(lambda x: run(x, weight), weight, torch.float16, M=M)


@DTYPES
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("M", [65, 300, 1100])
def test_3_bits_of_many_tokens_are_rounded_once_and_multiplied(
    M: int, act_order: bool, dtype: torch.dtype
) -> None:
    weight = exllama_layers.layer(1120, 2208, 96, 3, dtype, act_order=act_order)
    x = drawn(M, weight, dtype)
    call = exllama_layers.call(x, weight)
    order = slice(None) if weight.q_perm is None else weight.q_perm.long()

    assert_same_bits(exllama._rounded(call, slice(0, 2208)), weight.dequantize(dtype)[:, order])
    assert_same_bits(exllama.large(call, 1), exllama.large(call, 1))
    for scratch in (1, 1 << 28):  # in slices of 1024 columns, and in one piece
        assert_within_bound(
            lambda x, scratch=scratch: exllama.large(exllama_layers.call(x, weight), scratch), weight, x
        )
