"""Pytest in a process of its own, with the plugin and with no other that is not asked for."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

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
