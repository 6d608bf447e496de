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
from qload.kernels.cuda.choice import choose, ranked
from qload.kernels.cuda.linear import OPERATORS, call_of, unread
from qload.spec import ActivationScheme, Weight

CAPABILITY = (9, 0)
TOKENS = (1, 8, 16)
GROUP = 128
BASIS = "between times of one H200: strips, groups of 128, no zero points, float16 activations"

# By kernel, layout and bits: (K, N) and the time for each of TOKENS.
TIMED: Mapping[tuple[str, str, int], Sequence[tuple[tuple[int, int], tuple[float, ...]]]] = {
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


def predicted(
    kernel: str, layout: str, bits: int, capability: tuple[int, int], nbytes: int, tokens: int
) -> float | None:
    """Seconds for codes of so many bytes and so many tokens, between those that were timed; else None."""
    rows = TIMED.get((kernel, layout, bits))
    if rows is None or capability != CAPABILITY:
        return None
    sizes = [K * N * bits // 8 for (K, N), _ in rows]
    times = [interpolate(tokens, TOKENS, row) for _, row in rows]
    known = [time for time in times if time is not None]
    found = interpolate(nbytes, sizes, known) if len(known) == len(sizes) else None
    return None if found is None else found * 1e-6


def interpolate(at: int, places: Sequence[int], values: Sequence[float]) -> float | None:
    """The value at a place, on the line between the two that are known beside it; None beyond the ends."""
    if not places[0] <= at <= places[-1]:
        return None
    right = bisect_left(places, at)
    if places[right] == at:
        return values[right]
    left = right - 1
    share = (at - places[left]) / (places[right] - places[left])
    return values[left] + share * (values[right] - values[left])


PLAIN, DEQUANTIZED, SCALED = "torch's product", "dequantize, then torch's product", "quantized inputs"
CPU = "the CPU module"
OURS = "CUDA kernels"


@dataclass(frozen=True)
class KernelChoice:
    """What multiplies so many tokens.

    Attributes
    ----------
    tokens
        Rows of x.
    kernel
        By name.
    refused
        Why each other one does not, by name.
    seconds
        Predicted time of the product; None: it was not measured.
    basis
        The measurements behind `seconds`; "" without a prediction.
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


class _CallThere:
    """A call as if x lay on a chip of a capability, with a build of qload that has all its kernels."""

    def __init__(self, call: Any, capability: tuple[int, int]) -> None:
        self._call, self._capability = call, capability

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)

    def why_not_hopper(self) -> str | None:
        """Why no kernel of Hopper's own instructions runs there, or None."""
        return launch.why_not_chip(self._capability)


def kernels_for(
    weight: Weight, dtype: torch.dtype, capability: tuple[int, int] | None, tokens: Sequence[int]
) -> tuple[KernelChoice, ...]:
    """What multiplies each number of tokens with a weight, as it would lie on a chip; None: on a CPU."""
    operator = OPERATORS.get(type(weight))
    if weight.activations is None and capability is None and isinstance(weight, cpu.TYPES):
        bits = weight.config.stored_bits if isinstance(weight, PanelsWeight) else None
        return _on_cpu(cpu.most_tokens(type(weight), bits, dtype), dtype, tokens)
    if weight.activations is not None or operator is None:
        return without_kernel(type(weight), weight.activations, tokens, dtype)
    reason = "there is no CUDA device"
    if capability is not None:
        reason = operator.why_not_on(weight, dtype, capability) or ""
    if capability is None or reason:
        return tuple(KernelChoice(each, DEQUANTIZED, {OURS: reason}) for each in tokens)
    return tuple(_chosen(weight, dtype, capability, each) for each in tokens)


def without_kernel(
    weight_type: type[Weight],
    scheme: ActivationScheme | None,
    tokens: Sequence[int],
    dtype: torch.dtype,
    capability: tuple[int, int] | None = (0, 0),
) -> tuple[KernelChoice, ...]:
    """What multiplies weights of a type that no CUDA kernel reads, or whose inputs are to be quantized.

    `dtype`: of the activations; `capability`: of the chip; None: on a CPU.
    """
    if scheme is not None:
        refused = {OURS: f"the config asks for inputs that are quantized: {scheme}"}
        return tuple(KernelChoice(each, SCALED, refused) for each in tokens)
    if weight_type.plain:
        return tuple(KernelChoice(each, PLAIN) for each in tokens)
    if capability is None and issubclass(weight_type, cpu.TYPES):
        return _on_cpu(cpu.most_tokens(weight_type, None, dtype), dtype, tokens)
    return tuple(KernelChoice(each, DEQUANTIZED, {OURS: unread(weight_type)}) for each in tokens)


def _on_cpu(most: int | None, dtype: torch.dtype, tokens: Sequence[int]) -> tuple[KernelChoice, ...]:
    """By the CPU module up to `most` tokens; None: any number."""
    name = str(dtype).removeprefix("torch.")
    refused = {CPU: f"takes {most} tokens of {name} at the most: torch multiplies more of them faster here"}
    return tuple(
        KernelChoice(each, CPU) if most is None or each <= most else KernelChoice(each, DEQUANTIZED, refused)
        for each in tokens
    )


def _chosen(weight: Weight, dtype: torch.dtype, capability: tuple[int, int], tokens: int) -> KernelChoice:
    """By the choice that a call makes, of x without memory."""
    operator = OPERATORS[type(weight)]
    x = torch.empty(tokens, weight.layer.K, dtype=dtype, device="meta")
    call = _CallThere(call_of(x, weight), capability)
    why_not = {kernel.name: kernel.why_not(call) for kernel in operator.kernels}
    try:
        best = choose(operator.kernels, call, layout=call.layout, capability=capability).name
    except NoKernelError:
        return KernelChoice(tokens, DEQUANTIZED, {name: str(why) for name, why in why_not.items()})
    timed = ranked(call.layout, call.bits, capability, call.bytes, tokens, call.kind)
    refused = {name: why or _behind(name, timed) for name, why in why_not.items() if name != best}
    if not _was_timed(weight):
        return KernelChoice(tokens, best, refused)
    seconds = predicted(best, call.layout, call.bits, capability, call.bytes, tokens)
    return KernelChoice(tokens, best, refused, seconds, "" if seconds is None else BASIS)


def _was_timed(weight: Weight) -> bool:
    """Whether a weight has what those had that were timed: groups of 128, in order, without zero points."""
    if not isinstance(weight, StripsWeight):
        return False
    config = weight.config
    return config.group_size == GROUP and not config.zero_point and not config.act_order


def _behind(name: str, timed: Sequence[str]) -> str:
    """Why a kernel that takes a call is not the one that is called."""
    what = "was slower when it was timed" if name in timed else "was not timed on such a chip"
    return f"takes the call too, and {what}"
