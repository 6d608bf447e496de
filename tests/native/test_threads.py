"""The threads of a call: those of torch where it has some, and others in a process that was forked."""

import subprocess
import sys

import pytest
from torch.__config__ import parallel_info

from qload.native import load
from tests.paths import ROOT
from tests.support.torchrun import environment

NO_OPENMP = sys.platform != "linux" or "OpenMP" not in parallel_info()
FORKS = """
import os
import torch
from qload import native
from qload.devices import cpu
from qload.native import load

codes = torch.zeros(1 << 21, dtype=torch.uint8)
turned = torch.empty_like(codes)

def turn():
    with native.using(threads=2):
        assert cpu.move(codes, turned, 8, [(1 << 10, 1, 1 << 11), (1 << 11, 1 << 10, 1)])
    return load("cpu").found.is_on_threads_of_torch()

before = turn()
if child := os.fork():
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert turn() == before
else:
    os._exit(turn())
"""

COPY = """
import os, signal, sys, torch
torch.set_num_threads(2)
torch.ones(1 << 20).add_(1)
if child := os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
signal.alarm(50)
torch.set_num_threads(1)  # its own operations ask for no more

from qload import native
from qload.layouts import gptq

codes = torch.arange(1024 * 4096).remainder(13).int().view(1024, 4096)
with native.using(threads=2):
    found = gptq.rows(4).unpack(gptq.rows(4).pack(codes))
os._exit(bool((found != codes).any()))
"""

NOBODY = 65534  # whose threads are counted; those of root have no limit
ELSEWHERE = 77  # the exit code where there is no such user
FEW = """
import os, resource, sys, threading, torch
from qload import native
from qload.layouts import gptq
from qload.testing import assert_same_bits

rows, codes = gptq.rows(4), torch.arange(1024 * 4096).remainder(13).int().view(1024, 4096)
with native.using(threads=1):
    words = rows.pack(codes)
    assert_same_bits(rows.unpack(words), codes)
    want = codes.tolist()
if child := os.fork():  # which has no threads of torch
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
try:
    os.setuid(NOBODY) if os.getuid() == 0 else None
except OSError:
    os._exit(ELSEWHERE)
torch.set_num_threads(1)  # its own operations ask for no more
_, most = resource.getrlimit(resource.RLIMIT_NPROC)
more = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_NPROC, (len(os.listdir("/proc/self/task")) + more, most))
if not more:
    try:
        threading.Thread(target=print).start()
    except RuntimeError:
        print("no threads", flush=True)
with native.using(threads=8):
    found = rows.unpack(words)
os._exit(found.tolist() != want)
"""


@pytest.mark.skipif(NO_OPENMP, reason="this torch has no threads of OpenMP")
def test_calls_are_made_on_the_threads_of_torch() -> None:
    module = load("cpu").found

    assert module is not None
    assert module.is_on_threads_of_torch()


@pytest.mark.skipif(sys.platform == "win32", reason="nothing forks here")
def test_a_forked_process_has_threads_of_its_own() -> None:
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=60)

    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="nothing forks here")
def test_a_process_that_was_forked_may_load_the_module() -> None:
    done = subprocess.run([sys.executable, "-c", COPY], capture_output=True, text=True, timeout=60)

    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted as Linux does")
@pytest.mark.parametrize("more", [0, 2])
def test_work_is_done_by_as_many_threads_as_can_be_started(more: int) -> None:
    script = FEW.replace("NOBODY", str(NOBODY)).replace("ELSEWHERE", str(ELSEWHERE))
    command = [sys.executable, "-c", script, str(more)]
    run = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)

    if run.returncode == ELSEWHERE:
        pytest.skip("this process may not become another user")
    assert run.returncode == 0, run.stderr
    assert run.stdout == "no threads\n" * (more == 0)
