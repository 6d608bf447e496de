"""What vLLM imports and never calls while it loads and runs a model on a CPU, as modules of nothing.

A module of these names is found only where the real one is not installed. Importing this file looks for them.
"""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from pydantic_core.core_schema import any_schema

STUBBED = {
    *("anthropic", "fastapi", "mcp", "openai", "openai_harmony", "starlette", "uvicorn"),  # servers
    *("xgrammar", "llguidance", "outlines_core", "lmformatenforcer"),  # grammars
    *(
        "cv2",
        "mistral_common",
        "tiktoken",
        "depyf",
        "ijson",
        "watchfiles",
        "model_hosting_container_standards",
    ),
    *("prometheus_fastapi_instrumentator", "pythonjsonlogger"),
}


class Nothing(type):
    """A class that has whatever is asked of it, and may be a base, a decorator or an annotation."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return nothing(name)

    def __getitem__(cls, item: Any) -> Any:
        return cls

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        only = args[0] if len(args) == 1 and not kwargs else None
        return only if callable(only) else super().__call__()

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __or__


def nothing(name: str) -> Any:
    held = {
        "__init__": lambda self, *args, **kwargs: None,
        "__get_pydantic_core_schema__": lambda *asked: any_schema(),  # of what vLLM's requests are made of
    }
    return Nothing(name, (), held)


class Stub(ModuleType):
    """A module that has every name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = nothing(name)
        setattr(self, name, made)
        return made


class Finder(MetaPathFinder, Loader):
    """Finds stubs, after everybody else has found nothing."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in STUBBED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        made = Stub(spec.name)
        made.__path__ = []  # of a package, which has all that is looked for
        return made

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to run."""


if not any(type(found).__name__ == Finder.__name__ for found in sys.meta_path):
    sys.meta_path.append(Finder())
