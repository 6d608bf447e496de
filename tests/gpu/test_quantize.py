"""Inputs quantized in one launch, sums scaled in another: the bits of plain torch on the same device."""

from dataclasses import replace
from math import inf, nan

import pytest
import torch
from torch import Tensor

from qload import native
from qload.kernels import scaled
from qload.kernels.activations import quantize
from qload.kernels.cuda.quantize import NativeInputs, finish, inputs
from qload.kernels.quantized_inputs import MadeInputs
from qload.spec import ActivationScheme
from qload.testing import assert_same_bits

pytestmark = pytest.mark.gpu
SCHEMES = {
    "fp8 tensor": ActivationScheme("float", 8, True, "tensor"),
    "fp8 token": ActivationScheme("float", 8, True, "token"),
    "fp8 group": ActivationScheme("float", 8, True, "group", 128, owner="transformers"),
    "fp8 group of 8": ActivationScheme("float", 8, True, "group", 8),
    "fp8 static": ActivationScheme("float", 8, False, "tensor", scale="input_scale"),
    "fbgemm": ActivationScheme("float", 8, True, "token", owner="fbgemm", upper_bound=2.0),
    "modelopt": ActivationScheme("float", 8, True, "token", owner="modelopt"),
    "mxfp8": ActivationScheme("float", 8, True, "group", 32, scale_type="e8m0"),
    "mxfp8 of modelopt": ActivationScheme("float", 8, True, "group", 32, scale_type="e8m0", owner="modelopt"),
    "fp4 token": ActivationScheme("float", 4, True, "token"),
    "mxfp4": ActivationScheme("float", 4, True, "group", 32, scale_type="e8m0"),
    "mxfp4 of modelopt": ActivationScheme("float", 4, True, "group", 32, scale_type="e8m0", owner="modelopt"),
    "nvfp4": ActivationScheme(
        "float", 4, "local", "tensor_group", 16, scale="input_scale", scale_type="e4m3"
    ),
    "nvfp4 of modelopt": ActivationScheme(
        "float", 4, "local", "tensor_group", 16, scale="input_scale", scale_type="e4m3", owner="modelopt"
    ),
    "int8 token": ActivationScheme("int", 8, True, "token"),
    "int8 tensor": ActivationScheme("int", 8, True, "tensor"),
    "int4 group": ActivationScheme("int", 4, True, "group", 64),
    "int8 asymmetric": ActivationScheme("int", 8, True, "token", symmetric=False),
    "int8 asymmetric tensor": ActivationScheme("int", 8, True, "tensor", symmetric=False),
    "int8 asymmetric group": ActivationScheme("int", 8, True, "group", 256, symmetric=False),
    "int8 static": ActivationScheme("int", 8, False, "tensor", scale="input_scale"),
}
every_scheme = pytest.mark.parametrize("name", SCHEMES)
every_type = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)


def tokens(M: int, K: int, dtype: torch.dtype) -> Tensor:
    """Of very different sizes; a token of zeros, one of tiny numbers, powers of two and their neighbours."""
    make = torch.Generator().manual_seed(M + K)
    x = torch.randn(M, K, generator=make) * 2.0 ** torch.randint(-12, 8, (M, 1), generator=make)
    x[M // 2] = 0
    x[M // 3] = torch.finfo(dtype).smallest_normal * torch.randint(-3, 4, (K,), generator=make)
    powers = 2.0 ** (torch.arange(K) // 32 % 12 - 6)
    x[-1] = powers * (1 + torch.randint(-1, 2, (K,), generator=make) * torch.finfo(dtype).eps)
    return x.to("cuda", dtype)


def stored(scheme: ActivationScheme) -> Tensor | None:
    return torch.tensor([0.0173], device="cuda") if scheme.scale else None


def taken(x: Tensor, scheme: ActivationScheme) -> tuple[NativeInputs, MadeInputs]:
    scale = stored(scheme)
    found = inputs(x, scheme, scale, None)
    assert found is not None
    with native.reference():
        return found, MadeInputs(quantize(x, scheme, scale))


@every_scheme
@every_type
@pytest.mark.parametrize(("M", "K"), [(1, 256), (7, 1024), (300, 4352), (33, 8192)])
def test_codes_and_what_they_become(name: str, dtype: torch.dtype, M: int, K: int) -> None:
    scheme, x = SCHEMES[name], tokens(M, K, dtype)
    got, want = taken(x, scheme)
    kind = torch.int8 if scheme.type == "int" else torch.float8_e4m3fn

    assert_same_bits(got.codes(kind).view(torch.uint8), want.codes(kind).view(torch.uint8))
    assert_same_bits(got.steps, want.steps.reshape(got.steps.shape))
    assert (got.has_zeros, got.one_step) == (want.has_zeros, want.one_step)
    if want.zero_points is not None:
        assert got.zero_points is not None
        assert_same_bits(got.zero_points, want.zero_points.reshape(got.zero_points.shape))
    for made in (torch.float16, torch.bfloat16, torch.float32):
        assert_same_bits(got.counted(made), want.counted(made))
        if not want.one_step:
            for here, there in zip(got.meant(made), want.meant(made), strict=True):
                assert_same_bits(here, there)


@every_scheme
@pytest.mark.parametrize("value", [nan, inf, -inf])
def test_what_is_not_finite_spoils_what_it_spoils_in_torch(name: str, value: float) -> None:
    scheme, x = SCHEMES[name], tokens(5, 512, torch.float32)
    x[2, 77] = value
    got, want = taken(x, scheme)

    here, there = got.counted(torch.float32), want.counted(torch.float32)
    here, there = here * 1.0, there * 1.0

    assert torch.equal(here.isnan(), there.isnan())
    assert_same_bits(here.nan_to_num(), there.nan_to_num())
    assert torch.equal(got.steps.isnan(), want.steps.reshape(got.steps.shape).isnan())
    assert_same_bits(got.steps.nan_to_num(), want.steps.reshape(got.steps.shape).nan_to_num())


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("M", [1, 15, 16, 31, 32, 40])
def test_tokens_are_padded(M: int, symmetric: bool) -> None:
    scheme = replace(SCHEMES["int8 token"], symmetric=symmetric)
    got, want = taken(tokens(M, 256, torch.float16), scheme)

    assert_same_bits(got.codes(torch.int8, 48), want.codes(torch.int8, 48))


def test_who_is_not_taken() -> None:
    x, token, group = torch.randn(4, 256, device="cuda"), SCHEMES["fp8 token"], SCHEMES["fp8 group"]

    assert inputs(x, token, None, None) is not None
    assert inputs(x[:, :250], token, None, None) is None  # no multiple of eight
    assert inputs(x[:, 1:249], token, None, None) is None  # between two loads
    assert inputs(x[:, ::2], token, None, None) is None
    assert inputs(x.double(), token, None, None) is None
    assert inputs(x[:0], token, None, None) is None
    assert inputs(x[:, :192], group, None, None) is None
    assert inputs(x, replace(group, group_size=24), None, None) is None
    assert inputs(x.cpu(), token, None, None) is None
    with native.reference():
        assert inputs(x, token, None, None) is None


@every_type
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("one", [True, False])
def test_sums_become_results(dtype: torch.dtype, biased: bool, whole: bool, one: bool) -> None:
    M, N = 37, 1028
    make = torch.Generator(device="cuda").manual_seed(3)
    numbers = torch.randint(-(1 << 28), 1 << 28, (M + 1, N), generator=make, device="cuda")
    found = numbers.to(torch.int32) if whole else numbers[:M].float()
    row = (
        torch.rand(1 if one else (M, 1), generator=make, device="cuda").reshape((1,) if one else (M, 1))
        * 1e-6
    )
    column = torch.rand(1 if one else N, generator=make, device="cuda").expand(N)
    zeros = torch.randint(-128, 128, row.shape, generator=make, device="cuda").float() if whole else None
    bias = torch.randn(N, generator=make, device="cuda").to(dtype) if biased else None
    wide = torch.full((M, N + 8), 77.0, device="cuda", dtype=dtype)
    each = scaled.Sums(slice(0, N), found.clone(), row, column, zeros)
    want = torch.empty(M, N, device="cuda", dtype=dtype)
    scaled._finish(each, bias, want)

    assert finish(found, row, column, zeros, bias, wide[:, :N])

    assert_same_bits(wide[:, :N], want)
    assert bool((wide[:, N:] == 77).all())


def test_sums_that_the_module_leaves_to_torch() -> None:
    found, one = torch.randn(3, 8, device="cuda"), torch.ones(1, device="cuda")
    y = torch.empty(3, 8, device="cuda")

    assert finish(found, one, None, None, None, y)
    assert not finish(found[:, :6].contiguous(), one, None, None, None, y[:, :6].contiguous())
    assert not finish(found.double(), one, None, None, None, y)
    assert not finish(found, one.double(), None, None, None, y)
    assert not finish(found, one, None, None, None, y.double())
    assert not finish(found.T.contiguous().T, one, None, None, None, y)
