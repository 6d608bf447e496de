"""Which native modules this installation has, and why one is missing."""

from dataclasses import dataclass
from importlib import import_module
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

MODULES = ("cpu", "cuda")
NEVER = "not built: this qload runs from its sources; `pip install .` builds it, docs/native.md says how"
GONE = "built, and its file is not there any more"


@dataclass(frozen=True)
class NativeModule:
    """A native module, or why there is none."""

    found: ModuleType | None
    reason: str = ""


_LOADED: dict[str, NativeModule] = {}  # plain, for what traces a model to look into


def load(name: str) -> NativeModule:
    """The module `qload.native._<name>`, imported once."""
    if name not in _LOADED:
        _LOADED[name] = _import(name)
    return _LOADED[name]


def _import(name: str) -> NativeModule:
    full = f"{__package__}._{name}"
    if find_spec(full) is None:
        return NativeModule(None, _why_not(name))
    try:
        return NativeModule(import_module(full))
    except ImportError as error:  # built for other libraries than this machine has
        return NativeModule(None, f"built, and cannot be loaded: {error}")


def _why_not(name: str) -> str:
    here = [file.name for file in sorted(Path(__file__).parent.glob(f"_{name}.*"))]
    if here:
        return f"built for another Python: {', '.join(here)}; this one loads {EXTENSION_SUFFIXES[0]}"
    missing = _left_out()
    if missing is None:
        return NEVER
    return f"not built: {missing[name]}" if name in missing else GONE


def _left_out() -> dict[str, str] | None:
    """What the build left out and why, as it wrote it beside the modules; none where nothing was built."""
    try:
        record: dict[str, str] = import_module(f"{__package__}._missing").MISSING
    except ModuleNotFoundError:
        return None
    return record
