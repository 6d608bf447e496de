"""Quantized inputs and scaled sums of the CUDA module, with its routines by hand on CPU tensors."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from qload.errors import ArgumentError
from qload.kernels import scaled
from qload.kernels.activations import quantize
from qload.kernels.cuda import quantize as routines
from qload.kernels.cuda.quantize import NativeInputs, finding, finish, inputs
from qload.kernels.quantized_inputs import MadeInputs
from qload.spec import ActivationScheme
from qload.testing import assert_same_bits
from tests.gpu.test_quantize import SCHEMES
from tests.kernels.cuda_layers import AMPERE, installed
from tests.kernels.cuda_quantize import HandOfInputs, OnDevice

pytestmark = pytest.mark.usefixtures("seen_texts")

HALF, BF16, FLOAT = torch.float16, torch.bfloat16, torch.float32
DTYPES = pytest.mark.parametrize("dtype", [HALF, BF16, FLOAT], ids=str)


@pytest.fixture(autouse=True)
def hand(monkeypatch: pytest.MonkeyPatch) -> HandOfInputs:
    made = installed(HandOfInputs(AMPERE), monkeypatch)
    monkeypatch.setattr(routines, "module_for", lambda *tensors: made)
    return made


def on_device(tensor: Tensor) -> Tensor:
    return tensor.as_subclass(OnDevice)


def taken(x: Tensor, scheme: ActivationScheme) -> tuple[NativeInputs, MadeInputs]:
    """The inputs of the module, and the same by plain torch."""
    scale = torch.tensor(0.125) if scheme.scale else None
    found = inputs(on_device(x), scheme, scale, None)
    assert found is not None
    return found, MadeInputs(quantize(x, scheme, scale))


@pytest.mark.parametrize("name", SCHEMES)
@DTYPES
@pytest.mark.parametrize("M", [1, 5])
def test_the_module_is_asked_for_the_codes_of_a_scheme(name: str, dtype: torch.dtype, M: int) -> None:
    scheme = SCHEMES[name]
    x = torch.randn(M, 272, generator=torch.Generator().manual_seed(M)).to(dtype)[:, :256]
    got, want = taken(x, scheme)
    kind = torch.int8 if scheme.type == "int" else torch.float8_e4m3fn

    assert (got.has_zeros, got.one_step, got.wide) == (
        want.has_zeros,
        want.one_step or scheme.size == 256,
        False,
    )
    for rows in (0, M + 3):
        codes = got.codes(kind, rows)
        assert_same_bits(codes.view(torch.uint8), want.codes(kind, rows).view(torch.uint8))
        assert_same_bits(got.steps, want.steps)
        if want.zero_points is not None:
            assert got.zero_points is not None
            assert_same_bits(got.zero_points, want.zero_points)
    for made in (HALF, BF16, FLOAT):
        assert_same_bits(got.counted(made), want.counted(made))
        for here, there in zip(got.meant(made), want.meant(made), strict=True):
            assert_same_bits(here, there)


def test_a_stored_zero_point_is_read() -> None:
    scheme = replace(SCHEMES["int8 static"], symmetric=False, zero_point="input_zero_point")
    x, scale, zero = torch.randn(3, 64), torch.tensor([0.05]), torch.tensor(7, dtype=torch.int8)

    got = inputs(on_device(x), scheme, scale, zero)

    assert got is not None
    assert got.has_zeros
    assert_same_bits(got.codes(torch.int8), MadeInputs(quantize(x, scheme, scale, zero)).codes(torch.int8))
    assert not inputs(on_device(x), SCHEMES["int8 token"], scale, zero).has_zeros  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("changed", "number"),
    [
        ({}, 0),
        ({"owner": "transformers"}, 0),
        ({"owner": "fbgemm"}, 1),
        ({"owner": "modelopt"}, 2),
        ({"owner": "fbgemm", "type": "int"}, None),
        ({"owner": "modelopt", "type": "int"}, None),
        ({"scale_type": "e8m0"}, 3),
        ({"scale_type": "e8m0", "owner": "transformers"}, 4),
        ({"scale_type": "e8m0", "owner": "modelopt"}, 4),
        ({"type": "int", "symmetric": False}, 5),
        ({"dynamic": False, "scale": "input_scale"}, 6),
        ({"dynamic": "local", "scale": "input_scale"}, None),
        ({"scale_type": "e4m3"}, 7),
        ({"scale_type": "e4m3", "owner": "modelopt"}, 8),
        ({"scale_type": "e4m3", "type": "int"}, None),
        ({"bits": 4}, 0),
        ({"bits": 4, "type": "int"}, 0),
    ],
    ids=str,
)
def test_rules_by_their_numbers(changed: Any, number: int | None) -> None:
    assert finding(replace(SCHEMES["fp8 token"], **changed)) == number


X = torch.randn(4, 256)
TOKEN, GROUP = SCHEMES["fp8 token"], SCHEMES["fp8 group"]


@pytest.mark.parametrize(
    ("x", "scheme", "is_taken"),
    [
        (X, TOKEN, True),
        (X[:1, :8], TOKEN, True),
        (X[:, :250], TOKEN, False),
        (X[:, 1:249], TOKEN, False),
        (X[:, ::2], TOKEN, False),
        (torch.randn(4, 258)[:, :256], TOKEN, False),
        (X.double(), TOKEN, False),
        (X[:0], TOKEN, False),
        (X[:, :192], GROUP, False),
        (X[:, :128], GROUP, True),
        (X, replace(GROUP, group_size=8), True),
        (X, replace(GROUP, group_size=24), False),
        (torch.randn(4, 24), replace(GROUP, group_size=24), True),
        (X, replace(TOKEN, bits=4), True),
        (X, replace(TOKEN, scale_type="e4m3", type="int"), False),
    ],
)
def test_inputs_that_the_module_takes(x: Tensor, scheme: ActivationScheme, is_taken: bool) -> None:
    assert (inputs(on_device(x), scheme, None, None) is not None) == is_taken
    assert inputs(x, scheme, None, None) is None


def test_a_module_for_other_chips_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routines, "module_for", lambda *tensors: None)

    assert inputs(on_device(X), TOKEN, None, None) is None
    assert not finish(X, torch.ones(1), None, None, None, on_device(torch.empty(4, 256)))


def test_rows_that_do_not_fit_are_refused(hand: HandOfInputs) -> None:
    found = NativeInputs(on_device(torch.randn(4, 260)[:, :256]), TOKEN, hand, (None, None))  # type: ignore[arg-type]

    with pytest.raises(ArgumentError) as error:
        found.counted(FLOAT)
    wanted = "x", "rows of a multiple of 8 inputs, from 16 bytes on", "(260, 1)"
    assert (error.value.argument, error.value.expected, error.value.got) == wanted


@DTYPES
@pytest.mark.parametrize("biased", [None, HALF, FLOAT], ids=str)
@pytest.mark.parametrize("whole", [True, False], ids=["int32", "float32"])
@pytest.mark.parametrize("one", [True, False], ids=["one factor", "each its own"])
@pytest.mark.parametrize("plain", [True, False], ids=["rows alone", "rows and columns"])
def test_sums_become_results(dtype: torch.dtype, biased: Any, whole: bool, one: bool, plain: bool) -> None:
    M, N, make = 5, 12, torch.Generator().manual_seed(3)
    numbers = torch.randint(-100, 100, (M + 1, N), generator=make)
    found = numbers.to(torch.int32) if whole else numbers[:M].float()
    row = 2.0 ** torch.randint(-3, 3, (1,) if one else (M, 1), generator=make)
    column = None if plain else (2.0 ** torch.randint(-3, 3, (1 if one else N,), generator=make)).expand(N)
    zeros = torch.randint(-9, 9, row.shape, generator=make).float() if whole else None
    bias = None if biased is None else torch.arange(N).to(biased)
    wide, want = torch.full((M, N + 4), 77.0, dtype=dtype), torch.empty(M, N, dtype=dtype)
    scaled._finish(scaled.Sums(slice(0, N), found.clone(), row, column, zeros), bias, want)

    assert finish(found, row, column, zeros, bias, on_device(wide)[:, :N])

    assert_same_bits(wide[:, :N].contiguous(), want)
    assert bool((wide[:, N:] == 77).all())


SUMS: dict[str, Any] = {
    "found": torch.zeros(3, 8), "row": torch.ones(3, 1), "column": torch.ones(8), "zeros": None,
    "bias": torch.ones(8), "y": torch.zeros(3, 8),
}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "is_taken"),
    [
        ({}, True),
        ({"row": torch.ones(1), "column": torch.ones(1), "bias": None}, True),
        ({"column": torch.ones(1).expand(8)}, True),
        ({"found": torch.zeros(3, 6), "column": torch.ones(6), "bias": None, "y": torch.zeros(3, 6)}, False),
        ({"found": torch.zeros(3, 8).double()}, False),
        ({"found": torch.zeros(8, 3).T}, False),
        ({"row": torch.ones(3, 1).double()}, False),
        ({"row": torch.ones(2, 1)}, False),
        ({"row": torch.ones(6, 1)[::2]}, False),
        ({"column": torch.ones(3)}, False),
        ({"column": torch.ones(16)[::2]}, False),
        ({"zeros": torch.ones(2, 1)}, False),
        ({"bias": torch.ones(8).double()}, False),
        ({"bias": torch.ones(16)[::2]}, False),
        ({"y": torch.zeros(3, 8).double()}, False),
        ({"y": torch.zeros(8, 3).T}, False),
    ],
)
def test_sums_that_the_module_takes(changed: Any, is_taken: bool) -> None:
    call = {**SUMS, **changed}

    assert finish(**{**call, "y": on_device(call["y"])}) == is_taken
    assert not finish(**call)
