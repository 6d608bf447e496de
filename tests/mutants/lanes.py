"""A copy of the tree in which mutants are made one after another, so that none meets another."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from cosmic_ray.work_db import WorkDB, use_db

from tests.mutants.choose import coverage_file, measure
from tests.mutants.sample import Chunk, configuration

NOT_COPIED = shutil.ignore_patterns(
    ".git", ".nox", ".venv", "venv", "build", "dist", "__pycache__", ".*_cache"
)


class Lane:
    """The tree copied to `folder`, in which one chunk runs at a time."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.folder: Path = folder
        shutil.copytree(root, folder, ignore=NOT_COPIED)

    def baseline(self, package: str) -> None:
        """The package's tests, here and unchanged, and which lines each runs; RuntimeError if one fails."""
        noted = coverage_file(package, self.folder)
        if not noted.exists():
            done = measure(package, self.folder, self._environment())
            if done.returncode:
                noted.unlink(missing_ok=True)
            _check(done)

    def run(self, chunk: Chunk) -> None:
        """Each mutant of the chunk that did not run yet against its package's tests.

        The session keeps what became of it.
        """
        changed = sorted({str(item.mutations[0].module_path) for item in chunk.items})
        chunk.config.write_text(configuration(changed, chunk.package))
        if not chunk.session.exists():
            with use_db(str(chunk.session), WorkDB.Mode.create) as session:
                session.add_work_items(chunk.items)
        self._cosmic_ray("exec", str(chunk.config), str(chunk.session))

    def _cosmic_ray(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "cosmic_ray.cli", *arguments]
        environment = self._environment()
        _check(subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True))

    def _environment(self) -> dict[str, str]:
        """In which this tree comes before an installed qload."""
        paths = [str(self.folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def _check(done: subprocess.CompletedProcess[str]) -> None:
    if done.returncode:
        raise RuntimeError(f"{' '.join(done.args)}:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
