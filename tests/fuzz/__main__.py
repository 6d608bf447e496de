"""A long run: `python -m tests.fuzz 1000000 20000` tries a million headers and 20,000 folders."""

import faulthandler
import random
import resource
import sys
import tempfile
import time
from pathlib import Path

from tests.fuzz import folders
from tests.storage import mutations

HANG = 1.0  # seconds, of this process' own time


def headers(count: int, seed: int) -> str:
    """Mutated headers, and what came of them."""
    start = time.perf_counter()
    passed = sum(map(mutations.try_one, mutations.mutations(count, seed)))
    rate = count / (time.perf_counter() - start)
    return f"{count} headers, {rate:.0f} a second: {passed} pass, {count - passed} are refused"


def whole(count: int, seed: int) -> str:
    """Broken folders, and what came of them; SystemExit with the number of one that took over a second."""
    opened, slowest, start = 0, 0.0, time.perf_counter()
    with tempfile.TemporaryDirectory() as place:
        for number in range(seed * count, (seed + 1) * count):
            faulthandler.dump_traceback_later(60, exit=True)
            began = time.process_time()
            try:
                opened += folders.try_one(random.Random(number), Path(place) / "folder")
            except BaseException:
                sys.stderr.write(f"folder {number}\n")
                raise
            took = time.process_time() - began
            slowest = max(slowest, took)
            if took > HANG:
                sys.exit(f"folder {number} took {took:.1f} s")
    faulthandler.cancel_dump_traceback_later()
    rate = count / (time.perf_counter() - start)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    return (
        f"{count} folders, {rate:.0f} a second, the slowest {slowest:.2f} s, at most {memory} MiB: "
        f"{opened} open, {count - opened} are refused"
    )


def main(header_count: int = 1_000_000, folder_count: int = 20_000, seed: int = 0) -> None:
    """Headers, then folders; nothing but qload's errors may be raised."""
    for line in (headers(header_count, seed), whole(folder_count, seed)):
        sys.stdout.write(f"{line}; nothing else was raised\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
