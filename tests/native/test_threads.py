"""The threads of a call: those of torch where it has some, and others in a process that was forked."""

import subprocess
import sys

import pytest
from torch.__config__ import parallel_info

from qload.native import load

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


@pytest.mark.skipif(NO_OPENMP, reason="this torch has no threads of OpenMP")
def test_calls_are_made_on_the_threads_of_torch() -> None:
    module = load("cpu").found

    assert module is not None
    assert module.is_on_threads_of_torch()


@pytest.mark.skipif(sys.platform == "win32", reason="nothing forks here")
def test_a_forked_process_has_threads_of_its_own() -> None:
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=60)

    assert done.returncode == 0, done.stderr
