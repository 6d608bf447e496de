"""Which scales of four-bit floats Marlin's kernel reads as they are, and what becomes of the second one.

s0e5m3 has no sign, and holds 2**7 times an e4m3fn scale exactly: from 2**-9 to 448 with fp16. With bf16 the
kernel reads what is at least 2 (2**-6 before the factor) and 0. Source: vLLM 0.11.0's bytes, and its
maintainers on scales that bf16 loses (pull requests 34577 and 37502).
"""

from math import frexp

import torch
from torch import Tensor

from qload.kernel_formats.fp4 import Fp4
from qload.layouts import fp4

EXPONENT_BIAS = {torch.float16: 14, torch.bfloat16: 126}  # by which the kernel reads a code too small
EXPONENT = 127  # of 1 in float32
SHIFT = 7  # of a scale, so that what is normal in e4m3fn has the highest bit of s0e5m3
MOST_RAISED = 3  # from the lowest scale of e4m3fn, 2**-9, to 2**-6
LOWEST, BEYOND = 2.0**-6, 2.0**9  # scales that bf16 reads: from the one up to the other
SIGN, NAN = 0x80, 0x7F  # bytes of e4m3fn
NO_EXPONENT = 0xFF  # NaN of e8m0


def why_not(meant: Fp4, dtype: torch.dtype) -> str | None:
    """Why Marlin's kernel cannot read a layer with activations of `dtype`, or None.

    Codes are not looked at, so that all ranks can be asked of the whole layer.
    """
    scales = meant.scales.view(torch.uint8)
    if meant.second is None:
        if dtype != torch.bfloat16:
            return "Marlin's kernel reads scales that are powers of two with bfloat16 alone, got float16"
        return _found(meant, scales == NO_EXPONENT, "NaN")
    return (
        _found(meant, (scales & NAN) == NAN, "NaN")
        or _found(meant, scales >= SIGN, "negative, and Marlin's have no sign")
        or _why_not_raised(meant, dtype)
        or _why_no_global_scale(meant, dtype)
    )


def raised(meant: Fp4, dtype: torch.dtype) -> int:
    """By which power of two scales are to be raised, so that `dtype` reads all that are not 0.

    0 where the second scale is 0, which tells no power of two, and makes all weights 0.
    """
    if dtype != torch.bfloat16 or meant.second is None or not bool(meant.second.count_nonzero()):
        return 0
    lowest, _ = _span(meant)
    return max(0, 1 - frexp(lowest / LOWEST)[1])


def global_scale(meant: Fp4, dtype: torch.dtype, raised: int) -> Tensor | None:
    """The second scale as the kernel multiplies by it, rounded once to `dtype`: (1,)."""
    if meant.second is None:
        return None
    return (lacking(meant.second, meant.names.divides, dtype)[:1] * 2.0**-raised).to(dtype)


def unraised(scales: Tensor, global_scale: Tensor, second: Tensor, divides: bool) -> Tensor:
    """s0e5m3 values (float32) as NVFP4's `scales` were stored: what raised them the global scale lacks."""
    ratio = lacking(second, divides, global_scale.dtype)[:1] / global_scale.double()
    power = ratio.log2().round().nan_to_num(0, 0, 0).clamp(0, MOST_RAISED).long()
    bits = (EXPONENT - SHIFT - power).to(torch.int32) << fp4.MANTISSA  # a power of two, made on the device
    return scales * bits.view(torch.float32)


def lacking(second: Tensor, divides: bool, dtype: torch.dtype) -> Tensor:
    """The second scale of each part times what the kernel lacks, before any scale is raised: float64."""
    wide = second.flatten().double()
    return (wide.reciprocal() if divides else wide) * 2.0 ** (EXPONENT_BIAS[dtype] - SHIFT)


def _span(meant: Fp4) -> tuple[float, float]:
    """The lowest and the highest of NVFP4's scales that are not 0; of none, one that fits."""
    scales = meant.scales.float() if meant.second is not None else meant.scales.new_zeros(0)
    held = scales[scales > 0]
    return (float(held.min()), float(held.max())) if held.numel() else (LOWEST, LOWEST)


def _why_not_raised(meant: Fp4, dtype: torch.dtype) -> str | None:
    lowest, highest = _span(meant)
    if highest * 2.0 ** raised(meant, dtype) < BEYOND:
        return None
    return (
        f"{meant.full('weight_scale')} goes from {lowest:g} to {highest:g}; with bfloat16 Marlin's kernel "
        f"reads scales from {LOWEST:g} to below {BEYOND:g}, and one power of two does not bring all of them "
        "there: repack for float16 activations"
    )


def _why_no_global_scale(meant: Fp4, dtype: torch.dtype) -> str | None:
    """A value that costs more than one rounding, or parts that differ."""
    assert meant.second is not None
    second, name, power = meant.second.flatten(), meant.full(meant.names.second), raised(meant, dtype)
    exact = lacking(meant.second, meant.names.divides, dtype) * 2.0**-power
    got, unit = exact.to(dtype), torch.finfo(dtype).eps / 2
    held = torch.isfinite(got) & ((got.double() - exact).abs() <= unit * exact.abs())
    if not bool(held.all()):
        times, short = f"2**{EXPONENT_BIAS[dtype] - SHIFT - power}", str(dtype).removeprefix("torch.")
        what = f"1 / {name}" if meant.names.divides else name
        return f"{what} of {float(second[~held][0]):g} times {times} overflows or loses bits as {short}"
    if bool((second != second[:1]).any()):
        told = ", ".join(f"{value:g}" for value in second.tolist())
        return f"{name} differs between fused parts ({told}), and Marlin's kernel reads one for all"
    return None


def _found(meant: Fp4, wrong: Tensor, what: str) -> str | None:
    """How many scales are wrong, and the first of them."""
    places = wrong.nonzero()
    if not places.numel():
        return None
    n, group = places[0].tolist()
    count, name = f"{places.shape[0]} of {wrong.numel()}", meant.full("weight_scale")
    value = float(meant.scales[n, group].float())
    return f"{count} scales of {name} are {what}: the first, of output {n} and group {group}, is {value:g}"
