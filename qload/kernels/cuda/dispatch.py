"""Choice of the fastest kernel for a call, by a table from bench_gpu, and the base of these calls.

A row of the table: for a layout and width on chips of a capability, layers of up to so many bytes and up to
so many tokens, the kernels from the fastest on. Rows of a `kind` are for layers with smaller groups, zero
points of their own, or codes whose operands take longer; where there are none, they have the rows of others.
"""

import json
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any, ClassVar

import torch
from torch import Tensor

from qload.devices.cuda import runs_on
from qload.errors import ArgumentError, NoKernelError
from qload.kernels.cuda import launch
from qload.kernels.cuda.module import native

TABLE = "dispatch.json"
WIDE = "float32 scales"
WHOLE = 128  # rows of a group; smaller ones end inside of the rows that kernels take at a time
Rows = dict[tuple[str, str, int, tuple[int, int]], list[tuple[int, int, tuple[str, ...]]]]
ACTIVATIONS = (torch.float16, torch.bfloat16)
CAPABILITY = (8, 0)


@dataclass(frozen=True)
class CudaKernel:
    """One way to multiply: why not, or y (M, N), of a call.

    `prepare`: the `Launch` of calls like one, and of its x; None: it has more to do than to launch.
    """

    name: str
    why_not: Callable[[Any], str | None]
    run: Callable[[Any], Tensor]
    prepare: Callable[[Any, Tensor], Any] | None = None


def kind_of(group: int, zeros: bool, wide: bool = False) -> str:
    """Kind in the table of a layer with groups of so many rows, zero points or none, and `wide` scales."""
    if wide:
        return WIDE
    return f"groups of {group}" if group < WHOLE else "zero points" if zeros else ""


def every_call(call: Any) -> str | None:
    """`why_not` of a kernel for every call."""
    return None


def choose(
    kernels: Sequence[CudaKernel], call: Any, *, layout: str, capability: tuple[int, int], asked: str = ""
) -> CudaKernel:
    """Return the fastest kernel for a call, or the named one.

    `call` has `tokens`, `bits`, `bytes` (of the weight's codes) and a `kind`. Raises ArgumentError for a
    name that no kernel has, NoKernelError with every reason where none takes the call.
    """
    by_name = {kernel.name: kernel for kernel in kernels}
    if asked and asked not in by_name:
        raise ArgumentError("kernel", " or ".join(by_name), repr(asked))
    names = (asked,) if asked else ranked(layout, call.bits, capability, call.bytes, call.tokens, call.kind)
    reasons = {}
    for name in names if asked else dict.fromkeys((*names, *by_name)):
        reason = by_name[name].why_not(call) if name in by_name else "is not one of this layout's kernels"
        if reason is None:
            return by_name[name]
        reasons[name] = reason
    raise NoKernelError(f"{call.bits}-bit {layout}, {call.tokens} tokens", reasons)


def known(layout: str, bits: int, capability: tuple[int, int]) -> bool:
    """Return whether the table has rows for a layout and width, of a chip or an older one."""
    return any(others == [layout, "", bits] and chip <= capability for *others, chip in ROWS)


@lru_cache(maxsize=4096)
def ranked(
    layout: str, bits: int, capability: tuple[int, int], size: int, tokens: int, kind: str = ""
) -> tuple[str, ...]:
    """Names of kernels from the fastest on, on the nearest chip not newer than this; () without one."""
    chips = [chip for *others, chip in ROWS if others == [layout, "", bits] and chip <= capability]
    if not chips:
        return ()
    rows = ROWS.get((layout, kind, bits, max(chips))) or ROWS[layout, "", bits, max(chips)]
    sizes = sorted({row[0] for row in rows})
    of_size = sizes[min(bisect_left(sizes, size), len(sizes) - 1)]
    of_layer = sorted(row[1:] for row in rows if row[0] == of_size)
    at = min(bisect_left([row[0] for row in of_layer], tokens), len(of_layer) - 1)
    found: tuple[str, ...] = of_layer[at][1]
    return found


def forget() -> None:
    """Read the table again after a change."""
    ranked.cache_clear()
    ROWS.clear()
    ROWS.update(_read())


def _read() -> Rows:
    found: Rows = {}
    try:
        for row in json.loads(resources.files(__package__).joinpath(TABLE).read_text("utf-8")):
            key = row["layout"], row.get("kind", ""), row["bits"], tuple(row["capability"])
            found.setdefault(key, []).append((row["bytes"], row["tokens"], tuple(row["kernels"])))
    except (ValueError, KeyError, TypeError) as error:
        raise ArgumentError(f"{__package__}/{TABLE}", "the table as it is installed", repr(error)) from error
    return found


ROWS = _read()  # once: a model that is compiled cannot open files


@dataclass(frozen=True)
class KernelCall:
    """x (M, K) and the words of a weight; operators add the rest, `bits` and `N` among it."""

    x: Tensor
    weights: Tensor

    layout: ClassVar[str]

    @property
    def kind(self) -> str:
        """Kind of the layer in the table of kernels."""
        return ""

    @property
    def offset_zero(self) -> int:
        """Zero point of all codes of integers with offsets; -1: no offsets."""
        return -1

    @property
    def is_wide(self) -> bool:
        """Return whether scales and offsets of integers are float32."""
        return False

    @property
    def tokens(self) -> int:
        """M."""
        return self.x.shape[0]

    @property
    def bytes(self) -> int:
        """Bytes of the codes."""
        return 4 * self.weights.numel()

    def why_not_hopper(self) -> str | None:
        """Reason why x's device cannot run kernels with Hopper's own instructions, or None."""
        return launch.why_not_hopper(self.x.device)


def why_not_device(device: torch.device) -> str | None:
    """Why no kernel of the module runs on a device, or None."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < CAPABILITY:
        return f"needs a CUDA device of capability 8.0, the weight is on {device}"
    if not runs_on(native(), device):
        return f"the CUDA module was built for {native().chips}, and not for the chip of {device}"
    return None


def why_not_capability(capability: tuple[int, int]) -> str | None:
    """Return why no kernel of the module runs on a chip of a capability, or None."""
    needed, got = (".".join(map(str, each)) for each in (CAPABILITY, capability))
    return None if capability >= CAPABILITY else f"needs a CUDA device of capability {needed}, got {got}"


def why_not(weight: Any, dtype: torch.dtype) -> str | None:
    """Why activations of a dtype cannot be multiplied with a weight as it lies, or None."""
    return why_not_device(weight.device) or why_not_on(
        weight, dtype, torch.cuda.get_device_capability(weight.device)
    )


def why_not_on(weight: Any, dtype: torch.dtype, capability: tuple[int, int]) -> str | None:
    """Reason why a chip of a capability cannot multiply a weight, wherever that is, or None."""
    reason = why_not_capability(capability)
    if reason:
        return reason
    is_read = weight.scales.dtype == dtype or getattr(weight, "is_wide", False)
    if dtype not in ACTIVATIONS or not is_read:
        return f"needs float16 or bfloat16 of both, got {dtype} activations, {weight.scales.dtype} scales"
    return None


def multiply(kernels: Sequence[CudaKernel], call: Any, kernel: str) -> Tensor:
    """y (M, N) of a checked call, by the named kernel or the fastest for the call."""
    if not call.tokens or not call.N:
        return call.x.new_empty(call.tokens, call.N)  # type: ignore[no-any-return]
    capability = torch.cuda.get_device_capability(call.x.device)
    return choose(kernels, call, layout=call.layout, capability=capability, asked=kernel).run(call)
