"""Scales of four-bit floats for two generations of vLLM's Marlin kernel: their order, range and global scale.

s0e5m3 has no sign, and holds 2**7 times an e4m3fn scale exactly: from 2**-9 to 448 with fp16. With bf16 the
kernel reads values of at least 2 (2**-6 before the factor) and 0. Source: the bytes of vLLM 0.11.0 and
0.33.0, and vLLM's maintainers on scales that bf16 loses (pull requests 34577 and 37502).
"""

from dataclasses import dataclass
from math import frexp

import torch
from torch import Tensor

from qload.kernel_formats.fp4 import Fp4
from qload.layouts import Order, fp4, marlin

EXPONENT_BIAS = {torch.float16: 14, torch.bfloat16: 126}  # by which the kernel reads a code too small
EXPONENT = 127  # of 1 in float32
SHIFT = 7  # of a scale, so that what is normal in e4m3fn has the highest bit of s0e5m3
MAX_RAISE = 17  # powers of two, from the lowest scale of e4m3fn, 2**-9, to below 448
LOWEST, BEYOND = 2.0**-6, 2.0**9  # scales that bf16 reads: from the one up to the other
HIGHEST = 448.0  # of e4m3fn, up to which vLLM 0.33 raises the highest scale of a layer
SIGN, NAN = 0x80, 0x7F  # bytes of e4m3fn
NO_EXPONENT = 0xFF  # NaN of e8m0


@dataclass(frozen=True)
class Generation:
    """A generation of vLLM's Marlin kernel, and how it reads the scales of four-bit floats.

    Attributes
    ----------
    layout
        The id of the order, as `repack` takes it.
    scale_order
        Where the byte of each scale lies.
    paired_groups
        Groups of inputs that share a row of the order.
    global_dtype
        The dtype of NVFP4's global scale; None: that of the activations.
    raises_all
        Whether NVFP4's scales are raised for bfloat16 as far as their range allows, or as far as they need.
    """

    layout: str
    scale_order: Order
    paired_groups: int
    global_dtype: torch.dtype | None
    raises_all: bool


VLLM_0_11 = Generation("marlin_vllm_0_11", marlin.SCALES_OF_A_BYTE_PAIRED, 2, None, raises_all=False)
VLLM_0_33 = Generation("marlin_vllm_0_33", marlin.SCALES_OF_A_BYTE, 1, torch.float32, raises_all=True)


def why_not(meant: Fp4, dtype: torch.dtype, generation: Generation) -> str | None:
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
        or _why_not_raised(meant, dtype, generation)
        or _why_no_global_scale(meant, dtype, generation)
    )


def raised(meant: Fp4, dtype: torch.dtype, generation: Generation) -> int:
    """The power of two by which scales are raised, so that `dtype` reads all that are not 0.

    0 where the second scale is 0: such a global scale tells no power of two, and all weights are 0.
    """
    if dtype != torch.bfloat16 or meant.second is None or not bool(meant.second.count_nonzero()):
        return 0
    span = _span(meant)
    if span is None:
        return 0
    lowest, highest = span
    needed = max(0, 1 - frexp(lowest / LOWEST)[1])
    return max(needed, frexp(HIGHEST / highest)[1] - 1) if generation.raises_all else needed


def global_scale(meant: Fp4, dtype: torch.dtype, raised: int, generation: Generation) -> Tensor | None:
    """The second scale times the factor that the kernel leaves out, rounded once: (1,)."""
    if meant.second is None:
        return None
    exact = lacking(meant.second, meant.names.divides, dtype)[:1] * 2.0**-raised
    return exact.to(generation.global_dtype or dtype)


def unraised(
    scales: Tensor, global_scale: Tensor, second: Tensor, divides: bool, dtype: torch.dtype
) -> Tensor:
    """Return s0e5m3 values (float32) as NVFP4's `scales` were stored.

    The power of two that raised them is missing in the global scale. `dtype`: of the activations.
    """
    ratio = lacking(second, divides, dtype)[:1] / global_scale.double()
    power = ratio.log2().round().nan_to_num(0, 0, 0).clamp(0, MAX_RAISE).long()
    bits = (EXPONENT - SHIFT - power).to(torch.int32) << fp4.MANTISSA  # a power of two, made on the device
    return scales * bits.view(torch.float32)


def lacking(second: Tensor, divides: bool, dtype: torch.dtype) -> Tensor:
    """The second scale of each part times what the kernel lacks, before any scale is raised: float64."""
    wide = second.flatten().double()
    return (wide.reciprocal() if divides else wide) * 2.0 ** (EXPONENT_BIAS[dtype] - SHIFT)


def _span(meant: Fp4) -> tuple[float, float] | None:
    """The lowest and the highest of NVFP4's scales that are not 0; None: all are 0."""
    scales = meant.scales.float()
    held = scales[scales > 0]
    return (float(held.min()), float(held.max())) if held.numel() else None


def _why_not_raised(meant: Fp4, dtype: torch.dtype, generation: Generation) -> str | None:
    span = _span(meant)
    if span is None or span[1] * 2.0 ** raised(meant, dtype, generation) < BEYOND:
        return None
    return (
        f"{meant.full('weight_scale')} goes from {span[0]:g} to {span[1]:g}; with bfloat16 Marlin's kernel "
        f"reads scales from {LOWEST:g} to below {BEYOND:g}, and one power of two does not bring all of them "
        "there: repack for float16 activations"
    )


def _why_no_global_scale(meant: Fp4, dtype: torch.dtype, generation: Generation) -> str | None:
    """A value that costs more than one rounding, or parts that differ."""
    assert meant.second is not None
    second, name = meant.second.flatten(), meant.full(meant.names.second)
    power, rounded_to = raised(meant, dtype, generation), generation.global_dtype or dtype
    exact = lacking(meant.second, meant.names.divides, dtype) * 2.0**-power
    got, unit = exact.to(rounded_to), torch.finfo(rounded_to).eps / 2
    held = torch.isfinite(got) & ((got.double() - exact).abs() <= unit * exact.abs())
    if not bool(held.all()):
        times, short = f"2**{EXPONENT_BIAS[dtype] - SHIFT - power}", str(rounded_to).removeprefix("torch.")
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
