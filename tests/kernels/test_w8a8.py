"""Limit of inputs that are multiplied as codes; other reasons are in test_reasons."""

from qload.kernels.cuda import w8a8
from tests.kernels.test_rounded_inputs import SCHEMES


def test_int32_holds_the_sums_of_the_most_inputs_and_of_no_more() -> None:
    scheme, most = SCHEMES["int8 token"], w8a8.MAX_INPUTS

    assert w8a8.why_not_scheme(w8a8.INT8, scheme, most) is None
    assert f"K = {most + 1}" in str(w8a8.why_not_scheme(w8a8.INT8, scheme, most + 1))
    assert 128 * 128 * most < 2**31 <= 128 * 128 * (most + 1)
