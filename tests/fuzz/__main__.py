"""A long run: `python -m tests.fuzz 1000000 20000` tries a million headers and 20,000 folders."""

import faulthandler
import random
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from tests.detect.torchao_headers import torchao_mutations, try_torchao
from tests.fuzz import folders
from tests.storage import comfy_mutations, gguf_mutations, mutations

Header = TypeVar("Header")  # bytes of a file, or metadata
HANG = 1.0  # seconds, of this process' own time


def headers(kind: str, files: Iterator[Header], try_one: Callable[[Header], bool]) -> str:
    """Parse mutated headers and report the counts; SystemExit for one of more than a second."""
    count, passed, slowest, start = 0, 0, 0.0, time.perf_counter()
    for count, file in enumerate(files, 1):
        began = time.process_time()
        passed += try_one(file)
        slowest = max(slowest, time.process_time() - began)
        if slowest > HANG:
            sys.exit(f"{kind} {count} took {slowest:.1f} s")
    rate = count / (time.perf_counter() - start)
    outcome = f"{passed} pass, {count - passed} are refused"
    return f"{count} headers of {kind}, {rate:.0f} a second, the slowest {slowest:.3f} s: {outcome}"


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
    lines = (
        headers("safetensors", mutations.mutations(header_count, seed), mutations.try_one),
        headers("GGUF", gguf_mutations.gguf_mutations(header_count, seed), gguf_mutations.try_gguf),
        headers("torchao", torchao_mutations(folder_count, seed), try_torchao),
        headers("ComfyUI", comfy_mutations.comfy_mutations(folder_count, seed), comfy_mutations.try_comfy),
        whole(folder_count, seed),
    )
    for line in lines:
        sys.stdout.write(f"{line}; nothing else was raised\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
