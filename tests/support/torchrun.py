"""Commands as processes of torchrun in this checkout, with one thread each."""

import os
import subprocess
import sys

from tests.paths import ROOT

SECONDS = 300  # timeout of a run, for a machine under load


def command(processes: int, *arguments: str) -> list[str]:
    """Return the command line of `python arguments` under torchrun, on a free port; plain for one process."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return [sys.executable, *(launch if processes > 1 else []), *arguments]


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a process outside torchrun; buffered output keeps lines in a pipe whole."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("TORCHELASTIC") and name != "PYTHONUNBUFFERED"  # it splits lines
    }
    paths = os.pathsep.join(filter(None, [str(ROOT), inherited.get("PYTHONPATH")]))
    told = {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths, "PYTHONFAULTHANDLER": "1"}
    return {**inherited, **told, **more}


def ended(processes: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command; return its output and its exit code (torchrun's for several processes)."""
    return subprocess.run(
        command(processes, *arguments),
        cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=SECONDS, check=False,
    )  # fmt: skip
