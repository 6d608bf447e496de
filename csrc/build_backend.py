"""Build backend: scikit-build-core, with a smaller wheel if a compiler fails.

If nvcc fails, the wheel has no CUDA module; if the C++ compiler fails, it has no native module. The override
`if.failed` of scikit-build-core has the same effect, but then the metadata is available only after the
compilation: a query of the name and version would wait for the compiler.
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
    """Run the attempts until one succeeds. They differ in tags, so earlier metadata is valid for each."""
    *others, last = _attempts()
    for variables in others:
        os.environ.update(variables)
        try:
            return build(folder, settings)
        except SystemExit as failure:
            if failure.code != 1:  # cmake and compilers exit with 1; a wrong setting would fail again
                raise
    os.environ.update(last)
    return build(folder, settings)


def _attempts() -> list[dict[str, str]]:
    """List the variables of each attempt: none, then a build without CUDA, then one without a compiler."""
    if os.environ.get("QLOAD_CUDA", "") not in ("", "auto", "0"):
        return [{}]  # an explicit request for CUDA gives CUDA or an error
    with_nvcc = shutil.which("nvcc") or os.environ.get("CUDACXX")
    without_cuda = [{"QLOAD_CUDA": "failed"}] if with_nvcc and os.environ.get("QLOAD_CUDA") != "0" else []
    return [{}, *without_cuda, {"QLOAD_PYTHON_ONLY": "failed"}]
