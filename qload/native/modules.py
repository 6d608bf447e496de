"""Native modules of this installation, and the settings for native code.

Environment variables:

QLOAD_ISA          instruction set: scalar, avx2, avx512, avx512_vnni, avx512_bf16 or avx512_amx; by
                   default the best of this CPU
QLOAD_NUM_THREADS  number of threads; by default that of torch
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from qload.errors import ArgumentError
from qload.lazy_torch import torch

MODULES = ("cpu", "cuda")
ISAS = ("scalar", "avx2", "avx512", "avx512_vnni", "avx512_bf16", "avx512_amx")
MAX_THREADS = 4096
NOT_BUILT = "not built: this qload runs from its sources; `pip install .` builds it, see docs/native.md"
FILE_MISSING = "built, but its file is missing"


@dataclass(frozen=True)
class NativeModule:
    """A native module, or the reason why it is missing."""

    found: ModuleType | None
    reason: str = ""


@dataclass(frozen=True)
class _Settings:
    on: bool = True
    isa: str | None = None
    threads: int | None = None


_LOADED_MODULES: dict[str, NativeModule] = {}  # a plain dict, which torch.compile can trace
_DEFAULTS = _Settings()
_settings: ContextVar[_Settings] = ContextVar("native", default=_DEFAULTS)


def load(name: str) -> NativeModule:
    """Import the module `qload.native._<name>` once."""
    if name not in _LOADED_MODULES:
        _LOADED_MODULES[name] = _import(name)
    return _LOADED_MODULES[name]


def _import(name: str) -> NativeModule:
    module = f"{__package__}._{name}"
    if find_spec(module) is None:
        return NativeModule(None, _missing_reason(name))
    try:
        return NativeModule(import_module(module))
    except ImportError as error:  # a library of the build machine is missing
        return NativeModule(None, f"built, but cannot be loaded: {error}")


def _missing_reason(name: str) -> str:
    files = [file.name for file in sorted(Path(__file__).parent.glob(f"_{name}.*"))]
    if files:
        return f"built for another Python: {', '.join(files)}; this one loads {EXTENSION_SUFFIXES[0]}"
    try:
        reasons: dict[str, str] = import_module(f"{__package__}._missing").MISSING  # written by the build
    except ModuleNotFoundError:
        return NOT_BUILT
    return f"not built: {reasons[name]}" if name in reasons else FILE_MISSING


@contextmanager
def reference() -> Iterator[None]:
    """Run the block on plain torch, the bit-exact reference of native code."""
    with _settings_replaced(on=False):
        yield


@contextmanager
def using(isa: str | None = None, threads: int | None = None) -> Iterator[None]:
    """Run native code in the block with an instruction set and a number of threads.

    They override the environment variables. ArgumentError for an invalid number of threads.
    """
    if threads is not None and not (type(threads) is int and 1 <= threads <= MAX_THREADS):
        raise ArgumentError("threads", f"a number from 1 to {MAX_THREADS}", repr(threads))
    with _settings_replaced(on=True, isa=isa, threads=threads):
        yield


@contextmanager
def one_thread() -> Iterator[None]:
    """Run native code in the block on the calling thread, for callers with their own threads."""
    with _settings_replaced(threads=1):
        yield


@contextmanager
def _settings_replaced(**changes: bool | str | int | None) -> Iterator[None]:
    token = _settings.set(replace(_settings.get(), **changes))  # type: ignore[arg-type]
    try:
        yield
    finally:
        _settings.reset(token)


def is_on() -> bool:
    """Return True outside of `reference` blocks."""
    return _settings.get().on


def available() -> tuple[str, ...]:
    """List the supported instruction sets of this CPU, best first; empty without the CPU module."""
    module = load("cpu").found
    return tuple(module.isas()) if module else ()


def isa() -> str:
    """Return the instruction set in use; ArgumentError if the requested one is not available."""
    requested, name = _requested_isa()
    module = load("cpu").found
    isas: tuple[str, ...] = tuple(module.isas()) if module else ()
    if requested is None:
        return isas[0]
    if requested not in isas:
        raise ArgumentError(name, f"an instruction set of this CPU: {', '.join(isas)}", repr(requested))
    return requested


def check() -> None:
    """Raise ArgumentError for an unusable QLOAD_ISA or QLOAD_NUM_THREADS."""
    requested_threads()
    check_isa()


def check_isa() -> None:
    """Raise ArgumentError for an unusable QLOAD_ISA; without the CPU module only for an unknown one."""
    if available():
        isa()
    else:
        _requested_isa()


def _requested_isa() -> tuple[str | None, str]:
    """Return the requested instruction set, or None, and the name of the setting."""
    requested, name = _settings.get().isa, "isa"
    if requested is None:
        requested, name = os.environ.get("QLOAD_ISA") or None, "QLOAD_ISA"
    if requested is not None and requested not in ISAS:
        raise ArgumentError(name, f"one of {', '.join(ISAS)}", repr(requested))
    return requested, name


def requested_threads() -> int | None:
    """Return the number of threads from `using` or QLOAD_NUM_THREADS, or None.

    ArgumentError for an invalid QLOAD_NUM_THREADS.
    """
    threads = _settings.get().threads
    if threads is not None:
        return threads
    value = os.environ.get("QLOAD_NUM_THREADS")
    if not value:
        return None
    if not value.isdecimal() or not 1 <= int(value) <= MAX_THREADS:
        raise ArgumentError("QLOAD_NUM_THREADS", f"a number from 1 to {MAX_THREADS}", repr(value))
    return int(value)


def threads() -> int:
    """Return the number of threads of a call: the requested one, or torch's; before its import one a CPU."""
    number = requested_threads()
    if number is not None:
        return number
    return torch.get_num_threads() if sys.modules.get("torch") else os.cpu_count() or 1
