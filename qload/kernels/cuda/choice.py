"""Choice of the fastest kernel for a layer, by a table from bench_gpu.

A row of the table: for a layout and width on chips of a capability, layers of up to so many bytes and up to
so many tokens, the kernels from the fastest on. Rows of a `kind` are for layers with smaller groups or zero
points of their own; where there are none, they have the rows of others.
"""

import json
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any

from torch import Tensor

from qload.errors import ArgumentError, NoKernelError

TABLE = "dispatch.json"
WHOLE = 128  # rows of a group; smaller ones end inside of the rows that kernels take at a time
Rows = dict[tuple[str, str, int, tuple[int, int]], list[tuple[int, int, tuple[str, ...]]]]


@dataclass(frozen=True)
class CudaKernel:
    """One way to multiply: why not, or y (M, N), of a call.

    `prepare`: the `Launch` of calls like one, and of its x; None: it has more to do than to launch.
    """

    name: str
    why_not: Callable[[Any], str | None]
    run: Callable[[Any], Tensor]
    prepare: Callable[[Any, Tensor], Any] | None = None


def kind_of(group: int, zeros: bool) -> str:
    """Kind in the table of a layer with groups of so many rows, and zero points or none."""
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
