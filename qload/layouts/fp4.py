"""Four-bit floats (e2m1), two a byte with the first in the low bits, and scales that are powers of two.

e2m1 is a sign, two bits of exponent and one of mantissa; e8m0 is an exponent alone, and 255 is NaN.
s0e5m3, which only kernels read, is a float16 without its sign and the lowest seven bits of its mantissa.
Source: compressed-tensors 0.20.0, modelopt 0.47.0, torchao 0.18.0, transformers 5.23.0 and vLLM 0.11.0.
"""

import torch
from torch import Tensor

from qload import devices

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = (*_MAGNITUDES, *(-value for value in _MAGNITUDES))  # the value of each code

MANTISSA = 23  # bits of a float32's
DROPPED = 7  # bits of a float16 that s0e5m3 has not
SIGN = -0x8000  # of 16 bits
HALF, NAN = 0x400000, 0x7FC00000  # float32 bits of 2**-127, which is subnormal, and of NaN


def values(device: torch.device) -> Tensor:
    """What each code means, float32 (16,): `E2M1`, made on the device, which nobody waits for.

    Its three bits are the highest of a float16's mantissa and the lowest two of its exponent.
    """
    codes = torch.arange(len(E2M1), device=device, dtype=torch.int16)
    as_half = ((codes << 12) & SIGN | (codes & 7) << 9).view(torch.float16)
    return as_half.float() * 2.0**14


def pack(codes: Tensor) -> Tensor:
    """Codes (..., C) in [0, 16) -> bytes (..., C / 2), as of `NibblePairs`, the first in the low bits.

    ArgumentError for codes that are no integers or do not fit.
    """
    devices.check_integers(codes)
    devices.check_codes(codes, 4)
    low, high = codes.to(torch.uint8).reshape(*codes.shape[:-1], -1, 2).unbind(-1)
    return low | (high << 4)


def e8m0(exponents: Tensor) -> Tensor:
    """uint8 exponents -> 2**(exponent - 127), float32 and exact; 255 -> NaN."""
    bits = exponents.to(torch.int32) << MANTISSA
    bits = bits.masked_fill(exponents == 0, HALF).masked_fill(exponents == 255, NAN)
    return bits.view(torch.float32)


def s0e5m3(values: Tensor) -> Tensor:
    """float16 of at most three bits of mantissa and no sign -> uint8."""
    return (values.view(torch.int16) >> DROPPED).to(torch.uint8)


def from_s0e5m3(stored: Tensor) -> Tensor:
    """uint8 -> the float16 that `s0e5m3` was given, as float32."""
    return (stored.to(torch.int16) << DROPPED).view(torch.float16).float()
