"""Kernel choice for a layer on a given chip, with predicted times."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from qload.errors import NoKernelError
from qload.kernel_formats.panels import PanelsWeight
from qload.kernel_formats.strips import StripsWeight
from qload.kernels import cpu
from qload.kernels.cuda import launch
from qload.kernels.cuda.dispatch import choose, ranked
from qload.kernels.cuda.linear import OPERATORS, call_of, missing_kernel, why_not_declared
from qload.kernels.plans import CPU_MODULE, CUDA_KERNELS, DEQUANTIZED, PLAIN, QUANTIZED, way_of
from qload.native import load
from qload.spec import ActivationScheme, Weight

# Times of layers in strips on one H200, back to back in a CUDA graph, in microseconds: fp16 activations,
# groups of 128, symmetric. docs/lab/decode.md has these tables. Times are interpolated, and never
# extrapolated.
TIMED_CAPABILITY = (9, 0)
TIMED_TOKENS = (1, 8, 16)
TIMED_GROUP_SIZE = 128
BASIS = "interpolated from times of one H200: strips, groups of 128, no zero points, float16 activations"

# (K, N) and the times for TIMED_TOKENS, by kernel, layout and bits.
TIMED_MICROSECONDS: Mapping[tuple[str, str, int], Sequence[tuple[tuple[int, int], tuple[float, ...]]]] = {
    ("decode", "strips", 4): (
        ((4096, 4096), (4.7, 5.2, 6.1)),
        ((4096, 6144), (5.6, 6.1, 7.1)),
        ((14336, 4096), (10.0, 10.6, 11.9)),
        ((8192, 8192), (10.2, 10.9, 12.5)),
        ((4096, 28672), (16.8, 17.4, 20.6)),
        ((28672, 8192), (29.0, 30.4, 35.1)),
        ((8192, 57344), (59.2, 61.5, 71.5)),
    ),
    ("decode", "strips", 8): (
        ((4096, 4096), (6.56, 6.75, 7.99)),
        ((4096, 6144), (8.18, 8.62, 9.50)),
        ((14336, 4096), (16.1, 16.3, 17.2)),
        ((8192, 8192), (17.2, 17.6, 19.1)),
        ((4096, 28672), (29.0, 29.5, 31.3)),
        ((28672, 8192), (57.8, 54.6, 57.9)),
        ((8192, 57344), (108.0, 108.0, 117.0)),
    ),
}


def predict_seconds(
    kernel: str, layout: str, bits: int, capability: tuple[int, int], nbytes: int, tokens: int
) -> float | None:
    """Interpolate the time of a product by the bytes of its codes and the number of tokens.

    None beyond the measured range.
    """
    rows = TIMED_MICROSECONDS.get((kernel, layout, bits))
    if rows is None or capability != TIMED_CAPABILITY:
        return None
    sizes = [K * N * bits // 8 for (K, N), _ in rows]
    times = [time for _, row in rows if (time := interpolate(tokens, TIMED_TOKENS, row)) is not None]
    time = interpolate(nbytes, sizes, times) if len(times) == len(sizes) else None
    return None if time is None else time * 1e-6


def interpolate(x: int, xs: Sequence[int], ys: Sequence[float]) -> float | None:
    """Interpolate linearly between the points (xs, ys), xs in ascending order; None outside of them."""
    if not xs[0] <= x <= xs[-1]:
        return None
    right = bisect_left(xs, x)
    if xs[right] == x:
        return ys[right]
    left = right - 1
    share = (x - xs[left]) / (xs[right] - xs[left])
    return ys[left] + share * (ys[right] - ys[left])


@dataclass(frozen=True)
class KernelChoice:
    """Kernel for one number of tokens.

    Attributes
    ----------
    tokens
        Number of rows of x.
    kernel
        Name of the kernel.
    refused
        For each other kernel, by name, the reason against it.
    seconds
        Predicted time of the product; None: it was not measured.
    basis
        Measurements behind `seconds`; "" without a prediction.
    """

    tokens: int
    kernel: str
    refused: dict[str, str] = field(default_factory=dict)
    seconds: float | None = None
    basis: str = ""

    @property
    def time(self) -> str:
        """The prediction with its basis, or "not measured"."""
        if self.seconds is None:
            return "not measured"
        return f"predicted {self.seconds * 1e6:.3g} us ({self.basis})"


class _CallOnChip:
    """Call of a kernel as on a chip with this capability, in a build of qload with all kernels."""

    def __init__(self, call: Any, capability: tuple[int, int]) -> None:
        self._call, self._capability = call, capability

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)

    def why_not_hopper(self) -> str | None:
        """Return why the chip cannot run kernels for Hopper, or None."""
        return launch.why_not_chip(self._capability)


def kernels_for(
    weight: Weight, dtype: torch.dtype, capability: tuple[int, int] | None, tokens: Sequence[int]
) -> tuple[KernelChoice, ...]:
    """Choose the kernel of a weight for each number of tokens, on a chip; `capability` None: on a CPU."""
    way = way_of(type(weight), weight.activations, "cpu" if capability is None else "cuda")
    if way == CPU_MODULE:
        bits = weight.config.stored_bits if isinstance(weight, PanelsWeight) else None
        return _choose_on_cpu(type(weight), bits, dtype, tokens)
    operator, scheme = OPERATORS.get(type(weight)), weight.activations
    rounds = scheme is not None and capability is not None and why_not_declared(weight, scheme) is None
    if operator is None or (scheme is not None and not rounds):
        return kernels_without_operator(type(weight), scheme, tokens, dtype)
    reason: str | None = "no CUDA device"
    if capability is not None:
        reason = operator.why_not_on(weight, dtype, capability)
    if capability is None or reason:
        slow = QUANTIZED if rounds else DEQUANTIZED
        return tuple(KernelChoice(count, slow, {CUDA_KERNELS: reason or ""}) for count in tokens)
    choices = tuple(_choose_on_chip(weight, dtype, capability, count) for count in tokens)
    return tuple(map(_with_rounded_inputs, choices)) if rounds else choices


def kernels_without_operator(
    weight_type: type[Weight],
    scheme: ActivationScheme | None,
    tokens: Sequence[int],
    dtype: torch.dtype,
    capability: tuple[int, int] | None = (0, 0),
) -> tuple[KernelChoice, ...]:
    """Choose the kernel of a type that no CUDA kernel reads, or of a weight with quantized activations.

    `dtype` is that of the activations; `capability` None: on a CPU.
    """
    way = way_of(weight_type, scheme, "cpu" if capability is None else "cuda")
    if way == CPU_MODULE:
        return _choose_on_cpu(weight_type, None, dtype, tokens)
    refused = {
        PLAIN: {},
        QUANTIZED: {CUDA_KERNELS: f"the config declares quantized inputs: {scheme}"},
    }.get(way, {CUDA_KERNELS: missing_kernel(weight_type)})
    kernel = way if way in (PLAIN, QUANTIZED) else DEQUANTIZED
    return tuple(KernelChoice(count, kernel, refused) for count in tokens)


def _with_rounded_inputs(choice: KernelChoice) -> KernelChoice:
    """Return the choice for inputs that one launch ahead rounds; it has no prediction."""
    if choice.kernel in (DEQUANTIZED, "large"):  # no launch that multiplies sums of tokens by factors
        return KernelChoice(choice.tokens, QUANTIZED, choice.refused)
    return KernelChoice(choice.tokens, f"{QUANTIZED}, then {choice.kernel}", choice.refused)


def _choose_on_cpu(
    weight_type: type[Weight], panel_bits: int | None, dtype: torch.dtype, tokens: Sequence[int]
) -> tuple[KernelChoice, ...]:
    """Choose the CPU module, if this machine has it, where it is faster than torch."""
    module = load("cpu")
    if module.found is None:
        return tuple(KernelChoice(count, DEQUANTIZED, {CPU_MODULE: module.reason}) for count in tokens)
    max_tokens = cpu.most_tokens(weight_type, panel_bits, dtype)
    name = str(dtype).removeprefix("torch.")
    refused = {CPU_MODULE: f"takes at most {max_tokens} tokens of {name}; torch is faster for more"}
    return tuple(
        KernelChoice(count, CPU_MODULE)
        if max_tokens is None or count <= max_tokens
        else KernelChoice(count, DEQUANTIZED, refused)
        for count in tokens
    )


def _choose_on_chip(
    weight: Weight, dtype: torch.dtype, capability: tuple[int, int], tokens: int
) -> KernelChoice:
    """Choose as a call does, with x on the meta device."""
    operator = OPERATORS[type(weight)]
    x = torch.empty(tokens, weight.layer.K, dtype=dtype, device="meta")
    call = _CallOnChip(call_of(x, weight, scheme=weight.activations), capability)
    reasons = {kernel.name: kernel.why_not(call) for kernel in operator.kernels}
    try:
        best = choose(operator.kernels, call, layout=call.layout, capability=capability).name
    except NoKernelError:
        return KernelChoice(tokens, DEQUANTIZED, {name: str(why) for name, why in reasons.items()})
    timed = ranked(call.layout, call.bits, capability, call.bytes, tokens, call.kind)
    refused = {name: why or _why_slower(name, timed) for name, why in reasons.items() if name != best}
    if not _has_timed_groups(weight):
        return KernelChoice(tokens, best, refused)
    seconds = predict_seconds(best, call.layout, call.bits, capability, call.bytes, tokens)
    return KernelChoice(tokens, best, refused, seconds, "" if seconds is None else BASIS)


def _has_timed_groups(weight: Weight) -> bool:
    """Return whether a weight is like the timed ones: strips, groups of 128 in order, no zero points."""
    if not isinstance(weight, StripsWeight):
        return False
    config = weight.config
    return config.group_size == TIMED_GROUP_SIZE and not config.zero_point and not config.act_order


def _why_slower(name: str, timed: Sequence[str]) -> str:
    """Return why a usable kernel is not chosen."""
    return "slower on timed shapes" if name in timed else "not timed on such a chip"
