"""The kill matrix of one kernel: every fault that can be planted in it, and which checks notice."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from qload.diagnosis import diagnose
from qload.errors import ArgumentError
from qload.spec import Weight
from qload.testing.checks import Kernel, read_back
from qload.testing.kernel_faults import KERNEL_FAULTS, KernelFault
from qload.testing.selftest.oracles import ORACLES, OWN, READS, misread
from qload.testing.selftest.subjects import SUBJECTS


class Adapter(Protocol):
    """Somebody's kernel: a `format` that it reads, what packs a typed weight, and what multiplies."""

    format: str

    def pack(self, weight: Any) -> Any:
        """The buffers of a typed weight."""

    def gemm(self, x: Tensor, buffers: Any) -> Tensor:
        """X (M, K) -> y (M, N)."""


@dataclass(frozen=True)
class KillRow:
    """A fault, planted in the kernel for one subject.

    Attributes
    ----------
    subject, fault, words
        Of which weight, and which fault.
    noticed
        By name of each check: whether it failed, as it has to.
    named
        The class that a diagnosis gives to the weight that is read back; None for none.
    refused
        What the kernel's own packing raised, which says more than any check: its class and first line; or "".
    """

    subject: str
    fault: str
    words: str
    noticed: dict[str, bool]
    named: str | None
    refused: str = ""

    @property
    def caught(self) -> bool:
        """Whether a check of qload notices, or the kernel packs no such weight."""
        return bool(self.refused) or any(self.noticed[name] for name in OWN)


def kill_matrix(adapter: Adapter, dtype: torch.dtype = torch.float16) -> Iterator[KillRow]:
    """A row for every fault that applies to the kernel of `adapter`, with activations of `dtype`.

    The subjects are those of its format: one of `SUBJECTS`, or all whose name begins with the format's.
    ArgumentError where there are none, or where the kernel is wrong before anything is planted.
    """
    names = [name for name in SUBJECTS if name == adapter.format] or [
        name for name in SUBJECTS if name.startswith(adapter.format)
    ]
    if not names:
        raise ArgumentError("format", f"one of {', '.join(SUBJECTS)}", repr(adapter.format))
    for name in names:
        yield from _of_subject(adapter, name, SUBJECTS[name](), dtype)


def _of_subject(adapter: Adapter, name: str, weight: Weight, dtype: torch.dtype) -> Iterator[KillRow]:
    sound = partial(_gemm, adapter, adapter.pack(weight))
    failing = [check for check in OWN if not ORACLES[check](sound, weight, dtype)]
    right = read_back(sound, weight.layer.K, dtype)
    if failing:
        found = diagnose(weight.dequantize(), right, weight)
        raise ArgumentError(
            "the kernel", "right before a fault is planted", f"{', '.join(failing)}: {found.sentence}"
        )
    for fault in KERNEL_FAULTS:
        try:
            planted = _planted(adapter, fault, weight)
        except Exception as error:  # a class of the kernel's own
            first, *_ = str(error).splitlines() or [""]
            refused = f"{type(error).__name__}: {first}"
            yield KillRow(name, fault.name, fault.words, dict.fromkeys(ORACLES, True), None, refused)
            continue
        if planted is not None and not torch.equal(read_back(planted, weight.layer.K, dtype), right):
            yield _row(name, fault, planted, weight, dtype)


def _row(name: str, fault: KernelFault, planted: Kernel, weight: Weight, dtype: torch.dtype) -> KillRow:
    seen, named = misread(planted, weight, dtype)
    others = [check for check in ORACLES if check != READS]
    noticed = {READS: seen, **{check: not ORACLES[check](planted, weight, dtype) for check in others}}
    return KillRow(name, fault.name, fault.words, noticed, named)


def _planted(adapter: Adapter, fault: KernelFault, weight: Weight) -> Kernel | None:
    packed = fault.packed(weight)
    if packed is None:
        return None
    return fault.gemm(partial(_gemm, adapter, adapter.pack(packed)), weight.layer.N)


def _gemm(adapter: Adapter, buffers: Any, x: Tensor) -> Tensor:
    return adapter.gemm(x, buffers)


def adapter_of(found: object) -> Adapter:
    """An adapter, or an instance of a class of one; ArgumentError where it lacks what one has."""
    made: Any = found() if isinstance(found, type) else found
    missing = [name for name in ("format", "pack", "gemm") if not hasattr(made, name)]
    if missing:
        raise ArgumentError(
            "adapter", "format, pack(weight) and gemm(x, buffers)", f"none of {', '.join(missing)}"
        )
    adapter: Adapter = made
    return adapter
