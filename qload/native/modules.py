"""Which native modules this installation has, and why one is missing."""

import os
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

MODULES = ("cpu", "cuda")
NOT_BUILT = "not built: this qload runs from its sources; `pip install .` builds it, docs/native.md says how"
FILE_MISSING = "built, and its file is not there any more"


@dataclass(frozen=True)
class NativeModule:
    """A native module, or why there is none."""

    found: ModuleType | None
    reason: str = ""


_LOADED_MODULES: dict[str, NativeModule] = {}  # plain, for what traces a model to look into


def load(name: str) -> NativeModule:
    """The module `qload.native._<name>`, imported once."""
    if name not in _LOADED_MODULES:
        _LOADED_MODULES[name] = _import(name)
    return _LOADED_MODULES[name]


def _import(name: str) -> NativeModule:
    full = f"{__package__}._{name}"
    if find_spec(full) is None:
        return NativeModule(None, _missing_reason(name))
    try:
        return NativeModule(import_module(full))
    except ImportError as error:  # built for other libraries than this machine has
        return NativeModule(None, f"built, and cannot be loaded: {error}")


def _missing_reason(name: str) -> str:
    here = [file.name for file in sorted(Path(__file__).parent.glob(f"_{name}.*"))]
    if here:
        return f"built for another Python: {', '.join(here)}; this one loads {EXTENSION_SUFFIXES[0]}"
    missing = _read_build_record()
    if missing is None:
        return NOT_BUILT
    return f"not built: {missing[name]}" if name in missing else FILE_MISSING


def _read_build_record() -> dict[str, str] | None:
    """What the build left out and why, as it wrote it beside the modules; none where nothing was built."""
    try:
        record: dict[str, str] = import_module(f"{__package__}._missing").MISSING
    except ModuleNotFoundError:
        return None
    return record


ISAS = ("scalar", "avx2", "avx512", "avx512_vnni", "avx512_bf16", "avx512_amx")
MAX_THREADS = 4096


@dataclass(frozen=True)
class _Settings:
    on: bool = True
    isa: str | None = None
    threads: int | None = None


_DEFAULTS = _Settings()
_settings: ContextVar[_Settings] = ContextVar("native", default=_DEFAULTS)


@contextmanager
def reference() -> Iterator[None]:
    """Inside, everything runs on plain torch, the reference that native code equals bit for bit."""
    token = _settings.set(replace(_settings.get(), on=False))
    try:
        yield
    finally:
        _settings.reset(token)


@contextmanager
def using(isa: str | None = None, threads: int | None = None) -> Iterator[None]:
    """Inside, native code uses this instruction set and so many threads, whatever the environment says."""
    if threads is not None and not (type(threads) is int and 1 <= threads <= MAX_THREADS):
        raise ArgumentError("threads", f"a number from 1 to {MAX_THREADS}", repr(threads))
    token = _settings.set(_Settings(True, isa, threads))
    try:
        yield
    finally:
        _settings.reset(token)


@contextmanager
def one_thread() -> Iterator[None]:
    """Inside, native code stays on the thread that calls it, for callers that have threads of their own."""
    token = _settings.set(replace(_settings.get(), threads=1))
    try:
        yield
    finally:
        _settings.reset(token)


def is_on() -> bool:
    """Whether native code is used where there is some."""
    return _settings.get().on


def available() -> tuple[str, ...]:
    """The instruction sets that there are kernels for and that this CPU has, best first."""
    found = load("cpu").found
    return tuple(found.isas()) if found else ()


def isa() -> str:
    """The instruction set in use, or ArgumentError where the one asked for is not to be had."""
    asked, said = _requested_isa()
    here = available()
    if asked is None:
        return here[0]
    if asked not in here:
        raise ArgumentError(said, f"one of {', '.join(here)}, which this CPU has", repr(asked))
    return asked


def check() -> None:
    """What QLOAD_ISA and QLOAD_NUM_THREADS say can be used here, or ArgumentError."""
    requested_threads()
    check_isa()


def check_isa() -> None:
    """What QLOAD_ISA says can be used here, as far as there are native modules, or ArgumentError."""
    if available():
        isa()
    else:
        _requested_isa()


def _requested_isa() -> tuple[str | None, str]:
    """The instruction set that is asked for, if one is, and by which name."""
    asked, said = _settings.get().isa, "isa"
    if asked is None:
        asked, said = os.environ.get("QLOAD_ISA") or None, "QLOAD_ISA"
    if asked is not None and asked not in ISAS:
        raise ArgumentError(said, f"one of {', '.join(ISAS)}", repr(asked))
    return asked, said


def requested_threads() -> int | None:
    """The number of threads that `using` or QLOAD_NUM_THREADS sets, or None; ArgumentError for no number."""
    inside = _settings.get().threads
    if inside is not None:
        return inside
    value = os.environ.get("QLOAD_NUM_THREADS")
    if not value:
        return None
    if not value.isdecimal() or not 1 <= int(value) <= MAX_THREADS:
        raise ArgumentError("QLOAD_NUM_THREADS", f"a number from 1 to {MAX_THREADS}", repr(value))
    return int(value)


def threads() -> int:
    """How many threads a call may use: as many as are set, or as many as torch uses."""
    number = requested_threads()
    if number is not None:
        return number
    import torch  # the module is for commands too that end before torch is needed

    return torch.get_num_threads()
