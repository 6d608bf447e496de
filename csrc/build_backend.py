"""The build backend: scikit-build-core, and where a compiler fails, a wheel without what that should compile.

scikit-build-core can do that by itself, through its override `if.failed`; but then it cannot tell the
metadata before it has compiled everything, and who asks for a name and a version waits for the compiler.
"""

import os
import shutil
from collections.abc import Callable

from scikit_build_core import build as backend
from scikit_build_core.build import (
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

Settings = dict[str, list[str] | str] | None


def build_wheel(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    """Put a wheel into the folder and return its name."""
    return _build(backend.build_wheel, wheel_directory, config_settings)


def build_editable(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    """Put an editable wheel into the folder and return its name."""
    return _build(backend.build_editable, wheel_directory, config_settings)


def _build(build: Callable[[str, Settings], str], folder: str, settings: Settings) -> str:
    """The first attempt that succeeds. The metadata that was told before holds for each: only tags differ."""
    *others, last = _attempts()
    for variables in others:
        os.environ.update(variables)
        try:
            return build(folder, settings)
        except SystemExit as failure:
            if failure.code != 1:  # cmake and compilers end with 1; a setting that is wrong stays wrong
                raise
    os.environ.update(last)
    return build(folder, settings)


def _attempts() -> list[dict[str, str]]:
    """The variables that each attempt adds: none, then those that leave out CUDA, then the compiler."""
    if os.environ.get("QLOAD_CUDA", "") not in ("", "auto", "0"):
        return [{}]  # who asks for CUDA by name gets it or an error
    with_nvcc = shutil.which("nvcc") or os.environ.get("CUDACXX")
    without_cuda = [{"QLOAD_CUDA": "failed"}] if with_nvcc and os.environ.get("QLOAD_CUDA") != "0" else []
    return [{}, *without_cuda, {"QLOAD_PYTHON_ONLY": "failed"}]
