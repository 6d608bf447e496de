"""Products that always work: over all formats, within their bound, with gradients, in bounded memory."""

import gc
import logging
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from qload.formats import (
    FORMATS,
    Fp8Config,
    Fp8Weight,
    GPTQConfig,
    GPTQWeight,
    MXFP4ExpertsWeight,
    UnquantizedWeight,
)
from qload.kernels import plans, products
from qload.kernels.products import fits_float16
from qload.layouts import Stored
from qload.spec import Weight
from qload.testing import assert_same_bits, layers
from tests.example_counts import at_most
from tests.format_cases import CONFIGS

MATRICES = [weight_type for weight_type in FORMATS if weight_type is not MXFP4ExpertsWeight]
every_matrix = pytest.mark.parametrize("weight_type", MATRICES, ids=lambda weight_type: weight_type.format)
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
TOKENS = st.sampled_from([0, 1, 8, 64])


def applied(weight: Weight) -> Tensor:
    """(N, K), float64: what a weight does to inputs."""
    factors = weight.input_factors
    w = weight.dequantize() if factors is None else weight.dequantize() * factors.float()
    return w.double()


def assert_product(y: Tensor, x: Tensor, weight: Weight, bias: Tensor | None) -> None:
    """Within what rounding the weight, K sums, the product, the bias and the result can cost."""
    __tracebackhide__ = True
    w, wide = applied(weight), x.double()
    exact, size = wide @ w.T, wide.abs() @ w.abs().T
    if bias is not None:
        exact, size = exact + bias.double(), size + bias.double().abs()
    info, steps = torch.finfo(x.dtype), (x.shape[-1] + 4) * 2.0**-24
    slack = (info.eps / 2 + steps / (1 - steps)) * size + info.tiny
    budget = slack + (size + slack) * info.eps
    assert y.dtype == x.dtype
    beyond = (exact.abs() + budget > info.max) & y.isinf() & (y.sign() == exact.sign())
    assert bool(((y.double() - exact).abs() <= budget).logical_or(beyond).all())


@every_matrix
@every_dtype
@given(data=st.data(), M=TOKENS)
@at_most(8)
def test_every_format_multiplies_every_x(
    weight_type: type[Weight], dtype: torch.dtype, data: Any, M: int
) -> None:
    weight = data.draw(layers(weight_type, CONFIGS[weight_type], most=2)).weight()
    (N, K), make = weight.shape, torch.Generator().manual_seed(M)
    x = torch.randn(K, M, generator=make).to(dtype).T  # rows lie apart
    for bias in (None, torch.randn(N, generator=make).to(dtype), torch.randn(N, generator=make)):
        assert_product(plans.multiply(x, weight, bias), x, weight, bias)


@every_matrix
@given(data=st.data())
@settings(max_examples=3)
def test_gradients_are_those_of_the_product(weight_type: type[Weight], data: Any) -> None:
    weight = data.draw(layers(weight_type, CONFIGS[weight_type], most=2)).weight()
    (N, K), make = weight.shape, torch.Generator().manual_seed(3)
    x = torch.randn(2, 3, K, generator=make).double().requires_grad_()
    bias = torch.randn(N, generator=make).double().requires_grad_()
    times = torch.randn(2, 3, N, generator=make).double().requires_grad_()

    y = plans.multiply(x, weight, bias)
    of_x, of_bias = torch.autograd.grad((y * times).sum(), (x, bias), create_graph=True)
    (again,) = torch.autograd.grad(of_x.square().sum() / 2, times)

    torch.testing.assert_close(of_x, times @ applied(weight))
    torch.testing.assert_close(of_bias, times.sum((0, 1)))
    torch.testing.assert_close(again, of_x @ applied(weight).T)


def gptq(K: int, N: int, scale: float = 0.01, dtype: torch.dtype = torch.float16) -> GPTQWeight:
    make = torch.Generator().manual_seed(K + N)
    return GPTQWeight(
        config=GPTQConfig(4, 128, zeros=Stored()),
        qweight=torch.randint(-(2**31), 2**31, (K // 8, N), generator=make, dtype=torch.int32),
        qzeros=torch.full((K // 128, N // 8), -0x77777778, dtype=torch.int32),
        scales=torch.full((K // 128, N), scale, dtype=dtype),
        g_idx=(torch.arange(K) // 128).to(torch.int32),
    )


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor that an operator makes."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for each in tree_leaves(made):
            if isinstance(each, Tensor):
                self.bytes = max(self.bytes, each.untyped_storage().nbytes())
        return made


@every_dtype
@pytest.mark.parametrize("wanted", [False, True], ids=["forward", "with gradients"])
def test_no_tensor_is_larger_than_a_slice(
    dtype: torch.dtype, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "CPU_SLICE_BYTES", 1 << 19)
    weight = gptq(512, 4096)
    x = torch.ones(2, 512, dtype=dtype, requires_grad=wanted)
    fits_float16(weight, dtype)  # is found out once, in slices as well

    with Largest() as seen:
        y = plans.multiply(x, weight)
        if wanted:
            y.sum().backward()  # type: ignore[no-untyped-call]

    held = max(tensor.nbytes for tensor in weight.fields().values())
    assert seen.bytes <= max(1 << 20, held) < 2 * weight.layer.N * weight.layer.K
    assert_product(y, x.detach(), weight, None)


@pytest.mark.parametrize("scale", [2.0**15, 2.0**-40], ids=["beyond float16", "below float16"])
def test_what_float16_does_not_carry_is_multiplied_in_float32(
    scale: float, caplog: pytest.LogCaptureFixture
) -> None:
    weight = gptq(128, 64, scale, torch.bfloat16)
    x = torch.full((3, 128), 2.0**-12 if scale > 1 else 2.0**12).half()
    x[:, ::2] = 0

    with caplog.at_level(logging.INFO, "qload"):
        got = [plans.multiply(x, weight) for _ in range(3)]

    w = weight.dequantize().double()
    torch.testing.assert_close(got[0].double(), (x.double() @ w.T), rtol=2.0**-10, atol=2.0**-24)
    assert bool(got[0].isfinite().all())
    assert bool(got[0].any())
    told = [each.getMessage() for each in caplog.records if each.levelno == logging.INFO]
    assert told == [  # besides the warning that advises panels, once in a process
        "GPTQWeight: float16 does not carry its values, it is multiplied in float32"
    ]
    assert fits_float16(weight, torch.bfloat16)
    assert not fits_float16(weight, torch.float16)


def test_a_weight_that_is_written_to_is_looked_at_again() -> None:
    weight = gptq(128, 64)
    assert fits_float16(weight, torch.float16)

    weight.scales.fill_(60000.0)
    assert not fits_float16(weight, torch.float16)
    assert not fits_float16(weight.holding(weight.fields()), torch.float16)

    weight.scales.fill_(0.5)
    assert fits_float16(weight, torch.float16)


def test_a_weight_is_looked_at_once_through_whatever_tensors_it_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Weight] = []
    own = GPTQWeight.dequantize

    def counts(self: GPTQWeight, *arguments: Any, **named: Any) -> Tensor:
        seen.append(self)
        return own(self, *arguments, **named)

    monkeypatch.setattr(GPTQWeight, "dequantize", counts)
    weight = gptq(128, 64)

    for _ in range(3):
        twin = weight.holding({name: tensor.detach() for name, tensor in weight.fields().items()})
        assert fits_float16(twin, torch.float16)
        gc.collect()

    assert len(seen) == 1


def test_nan_and_infinity_of_a_weight_reach_the_result_of_their_output_alone() -> None:
    codes = torch.full((4, 16), 0x38, dtype=torch.uint8)
    codes[1, 2] = 0x7F  # NaN
    weight = Fp8Weight(
        config=Fp8Config(), weight=codes.view(torch.float8_e4m3fn), weight_scale=torch.ones(4, 1)
    )

    y = plans.multiply(torch.ones(1, 16).half(), weight)

    assert y.isnan().tolist() == [[False, True, False, False]]
    assert y[0, 0] == 16


@every_dtype
def test_a_plain_layer_is_torchs_own_linear(dtype: torch.dtype) -> None:
    make = torch.Generator().manual_seed(0)
    weight = UnquantizedWeight(weight=torch.randn(33, 64, generator=make).to(dtype))
    x, bias = torch.randn(5, 64, generator=make).to(dtype), torch.randn(33, generator=make).to(dtype)

    with Largest() as seen:
        got = plans.multiply(x, weight, bias)

    assert_same_bits(got, torch.nn.functional.linear(x, weight.weight, bias))
    assert seen.bytes <= weight.weight.nbytes


def test_a_plain_layer_of_another_dtype_is_rounded_to_that_of_x() -> None:
    weight = UnquantizedWeight(weight=torch.full((8, 16), 1 + 2.0**-10))
    x = torch.eye(16).bfloat16()

    assert_same_bits(plans.multiply(x, weight), torch.ones(16, 8).bfloat16())
