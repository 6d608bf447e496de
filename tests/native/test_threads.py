"""Where the system has no more threads, those that there are do the work."""

import subprocess
import sys

import pytest

from tests.paths import ROOT
from tests.torchrun import environment

NOBODY = 65534  # whose threads are counted; those of root have no limit
ELSEWHERE = 77  # the exit code where there is no such user
UNPACKED = """
import os, resource, sys, threading, torch
from qload import native
from qload.layouts import gptq
from qload.testing import assert_same_bits

rows, codes = gptq.rows(4), torch.arange(1024 * 4096).remainder(13).int().view(1024, 4096)
with native.using(threads=1):
    words = rows.pack(codes)
    assert_same_bits(rows.unpack(words), codes)
try:
    os.setuid(NOBODY) if os.getuid() == 0 else None
except OSError:
    sys.exit(ELSEWHERE)
_, most = resource.getrlimit(resource.RLIMIT_NPROC)
more = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_NPROC, (len(os.listdir("/proc/self/task")) + more, most))
if not more:
    try:
        threading.Thread(target=print).start()
    except RuntimeError:
        print("no threads")
with native.using(threads=8):
    assert_same_bits(rows.unpack(words), codes)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted as Linux does")
@pytest.mark.parametrize("more", [0, 2])
def test_work_is_done_by_as_many_threads_as_can_be_started(more: int) -> None:
    script = UNPACKED.replace("NOBODY", str(NOBODY)).replace("ELSEWHERE", str(ELSEWHERE))
    command = [sys.executable, "-c", script, str(more)]
    run = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)

    if run.returncode == ELSEWHERE:
        pytest.skip("this process may not become another user")
    assert run.returncode == 0, run.stderr
    assert run.stdout == "no threads\n" * (more == 0)
