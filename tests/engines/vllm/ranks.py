"""Ranks as copies of this process, which has imported vLLM: `run(2, work)` -> what each has returned."""

import os
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.engines.vllm import running

LONGEST = 1800  # seconds, on a machine that has other work


def run(world: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What `work(*arguments)` returns on every rank; of one that raises its words, as a string."""
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        port = place.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{rank}.pt" for rank in range(world)]
        joins = [partial(running.join, rank, world, port) for rank in range(world)]
        pids = [begun(join, file, work, arguments) for join, file in zip(joins, files, strict=True)]
        wait(pids)
        return [torch.load(file, weights_only=True) for file in files]


def alone(work: Callable[..., Any], *arguments: Any) -> Any:
    """What `work(*arguments)` returns in a process that is no rank yet; its words, if it raises."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "alone.pt"
        wait([begun(lambda: None, file, work, arguments)])
        return torch.load(file, weights_only=True)


def begun(join: Callable[[], None], file: Path, work: Callable[..., Any], arguments: tuple[Any, ...]) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        torch.set_num_threads(1)
        join()
        made: Any = work(*arguments)
    except BaseException:
        made = traceback.format_exc()
    torch.save(made, file)
    os._exit(0)


def wait(pids: list[int]) -> None:
    """Until all have ended; those that have not in time are ended."""
    left, last = set(pids), time.monotonic() + LONGEST
    while left and time.monotonic() < last:
        left -= {pid for pid in left if os.waitpid(pid, os.WNOHANG)[0]}
        time.sleep(0.05)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert not left
