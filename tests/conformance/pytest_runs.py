"""Runs of pytest with the plugin and without others, in a process of their own or in this one."""

import io
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest.mock import patch

import pytest

from qload.conformance.expert_checks import load_experts
from qload.conformance.linear_checks import load_shares
from tests.paths import ROOT

OPTIONS = ("-q", "-p", "qload.conformance.plugin", "-p", "no:cacheprovider", "--qload-tier=smoke")


def run(folder: Path, held: Mapping[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """What pytest says in a `folder` of the files that are `held`, texts by name."""
    for name, text in held.items():
        (folder / name).write_text(text)
    return subprocess.run(
        [sys.executable, "-m", "pytest", *OPTIONS, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def run_here(folder: Path, held: Mapping[str, str], *arguments: str) -> tuple[int, str]:
    """Return the exit code and the output of pytest in this process, in a `folder` of files by name."""
    for name, text in held.items():
        (folder / name).write_text(text)
    for cached in (load_experts, load_shares):  # a wrong kernel of another run may have changed a weight
        cached.cache_clear()
    output, before = io.StringIO(), Path.cwd()
    options = ("-s", "--import-mode=importlib", f"--rootdir={folder}", *OPTIONS)
    try:
        os.chdir(folder)
        alone = patch.dict(os.environ, {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"})
        path = patch.object(sys, "path", [str(folder), *sys.path])
        with redirect_stdout(output), redirect_stderr(output), alone, path:
            return int(pytest.main([*options, *arguments])), output.getvalue()
    finally:
        os.chdir(before)
        for name in [Path(name).stem for name in held]:
            sys.modules.pop(name, None)
