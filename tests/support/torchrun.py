"""Commands as processes of torchrun, of this checkout, one thread each."""

import os
import subprocess
import sys

from tests.paths import ROOT

SECONDS = 300  # until a world is given up, on a machine that has other work


def command(processes: int, *arguments: str) -> list[str]:
    """`python arguments` as so many processes, which meet at a port of their own; of one without torchrun."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return [sys.executable, *(launch if processes > 1 else []), *arguments]


def environment(**more: str) -> dict[str, str]:
    """Of a process that is no rank yet, and that writes whole lines: those of several go into one pipe."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("TORCHELASTIC") and name != "PYTHONUNBUFFERED"  # which tears lines apart
    }
    paths = os.pathsep.join(filter(None, [str(ROOT), inherited.get("PYTHONPATH")]))
    told = {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths, "PYTHONFAULTHANDLER": "1"}
    return {**inherited, **told, **more}


def ended(processes: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """What they print, and the exit code, of torchrun's where there are several."""
    return subprocess.run(
        command(processes, *arguments),
        cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=SECONDS, check=False,
    )  # fmt: skip
