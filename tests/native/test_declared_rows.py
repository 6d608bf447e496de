"""Inputs that are quantized as declared, by the kernels of a CPU that take inputs as they come."""

from typing import Any

import pytest
import torch
from torch import Tensor

from qload import native
from qload.formats import Fp8Config, Fp8Weight
from qload.kernel_formats import repack
from qload.kernels import bounds, cpu, plans, scaled
from qload.spec import ActivationScheme, Layer, Weight
from qload.testing import assert_same_bits
from tests.kernels.activation_cases import FOLDERS, named, read
from tests.native.memory import ISAS

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
FOUND = {
    "token": ActivationScheme("float", 8, True, "token"),
    "group": ActivationScheme("float", 8, True, "group", 32),
}
every_scheme = pytest.mark.parametrize("scheme", FOUND.values(), ids=FOUND)


@pytest.fixture(autouse=True)
def _by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would dequantize a weight fails."""
    monkeypatch.setattr(scaled, "weight_slices", None)
    monkeypatch.setattr(scaled, "_codes_times_codes", None)


def fp8(scheme: ActivationScheme, N: int = 21, K: int = 160) -> Weight:
    numbers = torch.randn(N, K, generator=torch.Generator().manual_seed(N))
    scales = torch.rand(N, 1, generator=torch.Generator().manual_seed(K)) + 0.5
    layer = Layer((N,), K, (N, K), "up", activations=scheme)
    return Fp8Weight(Fp8Config("channel"), numbers.to(torch.float8_e4m3fn), scales, layer=layer)


def inputs(M: int, dtype: torch.dtype, K: int = 160) -> Tensor:
    return (4 * torch.randn(M, K, generator=torch.Generator().manual_seed(M))).to(dtype)


def assert_within(y: Tensor, x: Tensor, weight: Weight, bias: Tensor | None = None) -> None:
    __tracebackhide__ = True
    assert y.dtype == x.dtype
    assert bool((bounds.excess(y, bounds.of_linear(x, weight, bias)) <= 1).all())


@ISAS
@every_scheme
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("M", [1, 4, 17])
def test_fp8_inputs_are_within_what_rounding_costs(
    isa: str, scheme: ActivationScheme, dtype: torch.dtype, M: int
) -> None:
    weight, x, bias = fp8(scheme), inputs(M, dtype), torch.ones(21)
    with native.using(isa):
        assert_within(plans.multiply(x, weight, bias), x, weight, bias)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
@pytest.mark.parametrize("dtype", [None, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("M", [8, 16, 17, 40, 65, 200])
def test_every_scheme_that_tools_declare(M: int, dtype: torch.dtype | None, folder: Any) -> None:
    """As many tokens as each way takes: none rounds a weight to the type that holds codes of inputs."""
    case = read(folder)
    rows = case.x.reshape(-1, case.weight.layer.K)
    x = rows.repeat(-(-M // len(rows)), 1)[:M].to(dtype or rows.dtype)

    assert_within(plans.multiply(x, case.weight, case.bias), x, case.weight, case.bias)


def test_weights_in_panels_take_declared_inputs() -> None:
    case = named("w4a8_int8_token_dynamic_sym")
    weight, x = repack(case.weight, "panels"), case.x.reshape(-1, case.weight.layer.K)

    assert_within(plans.multiply(x, weight), x, weight)


@ISAS
@every_scheme
def test_a_token_that_is_nan_spoils_no_other(isa: str, scheme: ActivationScheme) -> None:
    weight, x = fp8(scheme), inputs(5, torch.float32)
    with native.using(isa):
        want = plans.multiply(x, weight)
        x[2, 7] = torch.nan
        y = plans.multiply(x, weight)

    others = torch.tensor([0, 1, 3, 4])
    assert y[2].isnan().all()
    assert_same_bits(y[others], want[others])


@every_scheme
def test_a_layer_asks_once_what_its_codes_mean(
    scheme: ActivationScheme, monkeypatch: pytest.MonkeyPatch
) -> None:
    linear, asked, own = fp8(scheme).get_linear(), list[Weight](), cpu.rows_of
    monkeypatch.setattr(cpu, "rows_of", lambda weight: asked.append(weight) or own(weight))

    for _ in range(3):
        linear(inputs(2, torch.float32))

    assert len(asked) == 1
