"""Quantization of a layer's inputs by its scheme: codes, scales, zero points.

    x ~ (codes - zero_points) * scales,   codes = rounded(x / scales + zero_points), half to even, saturating

A scale that is found covers all of x, one token (a row of x as (tokens, K), however many axes it has), or
`size` neighbours of one token. With a the largest absolute input that it covers, m the largest code (448 of
e4m3, 6 of e2m1), t the stored scale of the tensor:

    owner               scale     it is
    compressed-tensors  int       a / ((2**bits - 1) / 2): of 8 bits 127.5, and codes are -128 to 127
    the same            int       asymmetric: (max - min) / (2**bits - 1), and 0 is one of both
    the same            float     a / m, as transformers has it
    the same            e4m3      e4m3(a / m * t), a code of 1 stands for that / t
    modelopt            e4m3      e4m3(a / (m * t)), at least 2**-9; a code of 1 stands for that * t
    compressed-tensors  e8m0      2**floor(log2 a) / 2**floor(log2 m), twice that from 1.75 * 2**n on
    all others          e8m0      2**ceil(log2(a / m)), at which nothing saturates
    fbgemm, modelopt    float     1 / (m / a), and x is multiplied by m / a; a is at most `upper_bound`

Where all inputs are 0 every owner finds another scale, and all get 0. Owners that compute in the type of x
round scales to it; here all is float32, as in their kernels. Source: compressed-tensors 0.20.0, transformers
5.23.0, modelopt 0.47.0 and fbgemm-gpu-genai 1.9.0; the codes are bit-equal to theirs for float32 inputs. With
an x of two axes compressed-tensors' own module takes one scale for all tokens; that is not repeated here.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from qload.spec import ActivationScheme

E4M3 = torch.float8_e4m3fn
MOST = {8: 448.0, 4: 6.0}  # of a float's codes, by their bits: e4m3 and e2m1
LEAST_E4M3 = 2.0**-9
INSTEAD_OF_ZERO = 0.125  # of a scale in e4m3, by compressed-tensors
LEAST_FBGEMM, LEAST_MODELOPT = 1e-12, 2.0**-24  # below which inputs are taken to be none
BIAS, MOST_EXPONENT = 127, 255  # of e8m0
NEXT_POWER = 0.875  # 1.75, of a significand between a half and 1

Maximum = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class QuantizedActivations:
    """Inputs as codes, each stored as a number.

    Attributes
    ----------
    codes
        (..., K): whole numbers, values of e4m3 or of e2m1; float32, or float64 of inputs in it.
    scales
        One for all, (1,); one a token, (..., 1); or one for each `size` neighbours, (..., K / size).
    steps
        What a code of 1 stands for, shaped alike: `scales`, and where they come on top of a stored scale
        the product or quotient of both.
    zero_points
        Shaped alike, whole numbers; None: all are 0.
    """

    codes: Tensor
    scales: Tensor
    steps: Tensor
    zero_points: Tensor | None = None

    def dequantize(self) -> Tensor:
        """Values (..., K) of the codes, in their dtype."""
        return self.counted() * _spread(self.steps, self.codes.shape[-1])

    def counted(self) -> Tensor:
        """(..., K): the codes less their zero points, in their dtype: exact."""
        zeros = self.zero_points
        return self.codes if zeros is None else self.codes - _spread(zeros, self.codes.shape[-1])


def quantize(
    x: Tensor,
    scheme: ActivationScheme,
    scale: Tensor | None = None,
    zero_point: Tensor | None = None,
    maximum: Maximum | None = None,
) -> QuantizedActivations:
    """Quantize x (..., K) as the owner of a supported scheme does.

    `scale`, `zero_point`: those that are stored, () or (1,). `maximum`: makes largest values those of all
    ranks that have a share of the inputs; None: there is no other share.
    """
    dtype, K = torch.promote_types(x.dtype, torch.float32), x.shape[-1]
    stored = None if scale is None else scale.reshape(1).to(dtype)
    zeros, inverse = None, None
    if not scheme.dynamic:
        assert stored is not None
        scales, zeros = stored, None if zero_point is None else zero_point.reshape(1).to(dtype)
        steps = scales
    elif not scheme.symmetric:
        scales, zeros = _asymmetric(x.to(dtype), scheme, maximum)
        steps = scales
    else:
        largest = _largest(x, scheme, maximum)
        scales, steps, inverse = _symmetric(largest, scheme, stored)
    scaled = x / _spread(steps, K) if inverse is None else x * _spread(inverse, K)  # in float32
    scaled = scaled + (0.0 if zeros is None else _spread(zeros, K))  # of -0.0 the code is 0.0
    return QuantizedActivations(rounded(scaled, scheme), scales, steps, zeros)


def rounded(scaled: Tensor, scheme: ActivationScheme) -> Tensor:
    """Round to the nearest codes of a scheme, ties to even; values beyond the range saturate, NaN stays."""
    if scheme.type == "int":
        half = 2 ** (scheme.bits - 1)
        return scaled.clamp(-half, half - 1).round()
    most = MOST[scheme.bits]
    scaled = scaled.clamp(-most, most)
    if scheme.bits == 8:
        return scaled.to(E4M3).to(scaled.dtype)
    size = scaled.abs()
    unit = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return (scaled / unit).round() * unit


def _symmetric(
    largest: Tensor, scheme: ActivationScheme, stored: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Scales, values of code 1, and factors of x; factors None: x is divided by the values of code 1."""
    if scheme.scale_type == "e8m0":
        scales = _powers(largest, scheme)
        return scales, scales, None
    if scheme.scale_type == "e4m3":
        return (*_two_scales(largest, scheme, stored), None)
    if scheme.owner in ("fbgemm", "modelopt"):
        least = largest.clamp(min=LEAST_FBGEMM)
        if scheme.owner == "modelopt":
            least = torch.where(largest <= LEAST_MODELOPT, 1.0, largest)
        inverse = MOST[scheme.bits] / least
        return 1 / inverse, 1 / inverse, inverse
    most = (2**scheme.bits - 1) / 2 if scheme.type == "int" else MOST[scheme.bits]
    scales = _not_zero(largest / most)
    return scales, scales, None


def _asymmetric(x: Tensor, scheme: ActivationScheme, maximum: Maximum | None) -> tuple[Tensor, Tensor]:
    """Scales and zero points of whole numbers: the range of x with 0 in it, from the least code on."""
    extremes = torch.stack([-x, x])
    below, above = _over_ranks(_covered(extremes, scheme, (2,)).clamp(min=0), maximum).unbind(0)
    least = -(2 ** (scheme.bits - 1))
    scales = (above + below) / (2**scheme.bits - 1)
    zeros = (least + below / scales).clamp(least, -least - 1).round()
    return _not_zero(scales), torch.where(scales == 0, 0.0, zeros)


def _largest(x: Tensor, scheme: ActivationScheme, maximum: Maximum | None) -> Tensor:
    """Largest absolute input per scale, in float32 or float64."""
    largest = _covered(x.abs(), scheme).to(torch.promote_types(x.dtype, torch.float32))
    largest = _over_ranks(largest, maximum)
    return largest if scheme.upper_bound is None else largest.clamp(max=scheme.upper_bound)


def _covered(x: Tensor, scheme: ActivationScheme, lead: tuple[int, ...] = ()) -> Tensor:
    """Largest input per scale; axes in `lead` precede those of the inputs."""
    if scheme.size is not None:
        return x.reshape(*x.shape[:-1], x.shape[-1] // scheme.size, scheme.size).amax(-1)
    if scheme.strategy == "token":
        return x.amax(-1, keepdim=True)
    return x.reshape(*lead, -1).amax(-1, keepdim=True) if x.numel() else x.new_zeros(*lead, 1)


def _over_ranks(largest: Tensor, maximum: Maximum | None) -> Tensor:
    return largest if maximum is None else maximum(largest)


def _not_zero(scales: Tensor) -> Tensor:
    return torch.where(scales == 0, torch.finfo(scales.dtype).eps, scales)


def _two_scales(largest: Tensor, scheme: ActivationScheme, stored: Tensor | None) -> tuple[Tensor, Tensor]:
    """Scales in e4m3 on top of a stored scale, and the products of both."""
    most, limit = MOST[scheme.bits], MOST[8]
    if scheme.owner == "modelopt":
        assert stored is not None
        scales = largest / (most * stored)
        scales = torch.where(scales == 0, 1.0, scales).clamp(LEAST_E4M3, limit)
        scales = scales.to(E4M3).to(largest.dtype)
        return scales, scales * stored
    divisor = largest.new_ones(1) if stored is None else stored
    scales = (divisor * (largest / most)).clamp(max=limit).to(E4M3).to(largest.dtype)
    scales = torch.where(scales == 0, INSTEAD_OF_ZERO, scales)
    return scales, scales / divisor


def _powers(largest: Tensor, scheme: ActivationScheme) -> Tensor:
    """Powers of two as scales: the nearest for compressed-tensors, for all others rounded up."""
    most = MOST[scheme.bits]
    if scheme.owner == "compressed-tensors":
        significand, exponents = torch.frexp(largest)
        exponents = exponents - 1 + (significand >= NEXT_POWER).to(exponents.dtype)
        exponents = exponents - math.floor(math.log2(most))
        exponents = torch.where(largest == 0, -BIAS, exponents)
    else:
        exponents = torch.where(largest == 0, -BIAS, (largest / most).log2().ceil())
    scales = torch.exp2(exponents.clamp(-BIAS, MOST_EXPONENT - BIAS).to(largest.dtype))
    return torch.where(largest.isfinite(), scales, largest)


def _spread(scales: Tensor, K: int) -> Tensor:
    """Scales of groups, one for each of the K inputs; others as they are."""
    groups = scales.shape[-1]
    return scales if groups == 1 else scales.repeat_interleave(K // groups, -1)
