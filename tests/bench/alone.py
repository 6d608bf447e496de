"""What benches of a CPU are asked for alike, and the clock that they read."""

import argparse
import time
from collections.abc import Callable, Iterable, Sequence

import torch

Clock = Callable[[], float]


def parser_of(
    said: str | None, ways: Iterable[str], tokens: Sequence[int], rounds: int
) -> argparse.ArgumentParser:
    """Tokens and rounds by default; which of all `ways`; whether `--alone`."""
    parser = argparse.ArgumentParser(description=said)
    parser.add_argument("--tokens", type=int, nargs="+", default=tokens)
    parser.add_argument("--only", action="append", choices=list(ways), help="may be given several times")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--alone", action="store_true", help="one thread, and the processor's time")
    return parser


def clock_of(asked: argparse.Namespace) -> Clock:
    """The wall's clock; alone, torch has one thread from now on, and the time is that of the processor."""
    if not asked.alone:
        return time.perf_counter
    torch.set_num_threads(1)
    return time.process_time
