"""Scalar types have the ids that compiled kernels are told, and mean what their names say."""

import pytest
import torch

from qload.kernels import ScalarType, scalar_types

IDS = {
    "uint4": 0x4000000000400,
    "uint8": 0x4000000000800,
    "uint4b8": 0x4000000100400,
    "uint8b128": 0x4000001000800,
    "uint2b2": 0x4000000040200,
    "uint3b4": 0x4000000080300,
    "int4": 0x4000000010300,
    "int8": 0x4000000010700,
    "float8_e4m3fn": 0xA000000010304,
    "float8_e8m0fnu": 0xA000000000008,
    "float4_e2m1f": 0x2000000010102,
    "float16": 0x4000000010A05,
    "bfloat16": 0x4000000010708,
}


@pytest.mark.parametrize(("name", "number"), IDS.items())
def test_the_id_is_the_engines(name: str, number: int) -> None:
    assert getattr(scalar_types, name).id == number


@pytest.mark.parametrize(
    ("name", "bits", "low", "high"),
    [
        ("uint4", 4, 0, 15),
        ("uint4b8", 4, -8, 7),
        ("uint8b128", 8, -128, 127),
        ("uint2b2", 2, -2, 1),
        ("uint3b4", 3, -4, 3),
        ("int4", 4, -8, 7),
        ("float4_e2m1f", 4, -6.0, 6.0),
        ("float6_e3m2f", 6, -28.0, 28.0),
        ("float6_e2m3f", 6, -7.5, 7.5),
        ("float8_e8m0fnu", 8, 2.0**-127, 2.0**127),
    ],
)
def test_a_type_reaches_as_far_as_its_codes(name: str, bits: int, low: float, high: float) -> None:
    kind = getattr(scalar_types, name)

    assert (kind.size_bits, kind.min(), kind.max()) == (bits, low, high)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("float16", torch.float16),
        ("bfloat16", torch.bfloat16),
        ("float8_e4m3fn", torch.float8_e4m3fn),
        ("float8_e5m2", torch.float8_e5m2),
    ],
)
def test_a_float_reaches_as_far_as_torchs(name: str, dtype: torch.dtype) -> None:
    kind, known = getattr(scalar_types, name), torch.finfo(dtype)

    assert (kind.min(), kind.max(), kind.size_bits) == (known.min, known.max, known.bits)


def test_the_predicates_tell_what_the_original_gets_wrong() -> None:
    """There an enumeration is compared with a number, so that no type ever has NaN."""
    assert scalar_types.float16.is_ieee_754()
    assert scalar_types.float8_e4m3fn.has_nans()
    assert not scalar_types.float8_e4m3fn.is_ieee_754()
    assert not scalar_types.float8_e4m3fn.has_infs()
    assert not scalar_types.float4_e2m1f.has_nans()
    assert not scalar_types.uint4.has_nans()


def test_a_bias_is_part_of_the_type() -> None:
    assert scalar_types.uint4b8.has_bias()
    assert (scalar_types.int4.is_signed(), scalar_types.uint4b8.is_signed()) == (True, False)
    assert (scalar_types.float8_e4m3fn.is_signed(), scalar_types.float8_e8m0fnu.is_signed()) == (True, False)
    assert not scalar_types.uint4.has_bias()
    assert [str(kind) for kind in (scalar_types.uint4b8, scalar_types.int8)] == ["uint4b8", "int8"]
    assert ScalarType(0, 4, signed=False, bias=8) == scalar_types.uint4b8
