"""Which quantized inputs are multiplied as codes, and the reasons of the others."""

from dataclasses import replace

import pytest

from qload.kernels.cuda import w8a8
from qload.spec import ActivationScheme
from tests.kernels.test_rounded_inputs import SCHEMES

E5M2 = 0x708


@pytest.mark.parametrize(
    ("code", "name"),
    [
        (w8a8.E4M3, "fp8 token"),
        (w8a8.E4M3, "fp8 tensor"),
        (w8a8.E4M3, "fp8 static"),
        (w8a8.INT8, "int8 token"),
    ],
)
def test_codes_of_one_type_with_a_scale_a_token_are_multiplied(code: int, name: str) -> None:
    assert w8a8.why_not_scheme(code, SCHEMES[name], 256) is None


@pytest.mark.parametrize(
    ("code", "scheme", "reason"),
    [
        (w8a8.E4M3, None, "not quantized"),
        (w8a8.E4M3, SCHEMES["int8 token"], "no codes of the type"),
        (w8a8.INT8, SCHEMES["fp8 token"], "no codes of the type"),
        (E5M2, SCHEMES["fp8 token"], "no codes of the type"),
        (w8a8.INT8, SCHEMES["int8 asymmetric"], "no codes of the type"),
        (w8a8.E4M3, replace(SCHEMES["fp8 token"], bits=4), "no codes of the type"),
        (w8a8.E4M3, replace(SCHEMES["fp8 static"], zero_point="input_zero_point"), "no codes of the type"),
        (w8a8.E4M3, SCHEMES["fp8 group"], "groups of 128"),
        (w8a8.INT8, replace(SCHEMES["fp8 static"], type="int"), "stands for NaN"),
    ],
)
def test_others_have_a_reason(code: int, scheme: ActivationScheme | None, reason: str) -> None:
    assert reason in str(w8a8.why_not_scheme(code, scheme, 256))


def test_int32_holds_the_sums_of_the_most_inputs_and_of_no_more() -> None:
    scheme, most = SCHEMES["int8 token"], w8a8.MAX_INPUTS

    assert w8a8.why_not_scheme(w8a8.INT8, scheme, most) is None
    assert f"K = {most + 1}" in str(w8a8.why_not_scheme(w8a8.INT8, scheme, most + 1))
    assert 128 * 128 * most < 2**31 <= 128 * 128 * (most + 1)
