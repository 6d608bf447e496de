"""What many tensors, and many bytes, cost: `nox -s bench`.

The folders are made for the occasion. Of many tensors, named as DeepSeek V3's are, nothing but headers is on
disk. `CPU` is what this process computed, whatever else the machine did; `µs a tensor` has to stay the same
from row to row, and `of the row before` says how much it grew.
"""

import argparse
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread

from rich.console import Console
from rich.table import Table

from qload.checkpoint import open_checkpoint
from qload.verify import inspect, verify
from tests.bench import folders

SIZES = {1_000: 2, 3_000: 6, 10_000: 20, 30_000: 60, 100_000: 200}  # tensors -> shards
ROUNDS = 3
MB = 1e6

WORK: dict[str, Callable[[Path], object]] = {
    "open_checkpoint": lambda folder: open_checkpoint(folder).__exit__(None, None, None),
    "inspect": inspect,
    "verify": verify,
}


def seconds(work: Callable[[], object], rounds: int = ROUNDS) -> tuple[float, float]:
    """Of several rounds the least: of the clock on the wall, and of this process' computing."""
    took = []
    for _ in range(rounds):
        wall, cpu = time.perf_counter(), time.process_time()
        work()
        took.append((time.perf_counter() - wall, time.process_time() - cpu))
    return min(wall for wall, _ in took), min(cpu for _, cpu in took)


def tensors(folder: Path, most: int) -> Iterator[Table]:
    """A table for each thing to do, by number of tensors."""
    sizes = {size: shards for size, shards in SIZES.items() if size <= most}
    for size, shards in sizes.items():
        (folder / str(size)).mkdir()
        folders.sparse(folder / str(size), folders.experts(size), shards, folders.FP8)
    for what, work in WORK.items():
        table = Table("tensors", "shards", "ms", "ms CPU", "µs CPU a tensor", "of the row before", title=what)
        before = None
        for size, shards in sizes.items():
            wall, cpu = seconds(
                lambda size=size, work=work: work(folder / str(size)), ROUNDS if size < 30_000 else 1
            )
            each = cpu / size
            grown = f"{each / before:.2f}" if before else ""
            table.add_row(
                str(size), str(shards), f"{wall * 1e3:.0f}", f"{cpu * 1e3:.0f}", f"{each * 1e6:.1f}", grown
            )
            before = each
        yield table


def anonymous() -> int:
    """The memory of this process that is no file's, in bytes; 0 where the system does not tell."""
    status = Path("/proc/self/status")
    found = re.search(r"RssAnon:\s+(\d+)", status.read_text()) if status.exists() else None
    return int(found[1]) * 1024 if found else 0


def peak(work: Callable[[], object]) -> int:
    """The most anonymous memory while it works."""
    most, done = anonymous(), Event()

    def watch() -> None:
        nonlocal most
        while not done.wait(0.005):
            most = max(most, anonymous())

    watcher = Thread(target=watch)
    watcher.start()
    try:
        work()
    finally:
        done.set()
        watcher.join()
    return most


def noise(folder: Path, layers: int) -> Table:
    """A random AWQ model of as many layers of 8 billion parameters' model."""
    folder.mkdir()
    size = folders.noise(folder, layers)
    table = Table("MB", "s", "s CPU", "MB/s a core", "MiB anonymous", title="verify a random AWQ model")
    wall, cpu = seconds(lambda: verify(folder), 1)
    most = peak(lambda: verify(folder))
    table.add_row(
        f"{size / MB:.0f}", f"{wall:.2f}", f"{cpu:.2f}", f"{size / cpu / MB:.0f}", f"{most / (1 << 20):.0f}"
    )
    return table


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog="example: python -m tests.bench.large --most 10000"
    )
    parser.add_argument("--most", type=int, default=100_000, help="tensors of the largest folder")
    parser.add_argument("--layers", type=int, default=34, help="of the AWQ model, 126 MB each; 0: none")
    asked = parser.parse_args()
    console = Console(width=120)
    with TemporaryDirectory() as place:
        if asked.layers:  # first, while this process has no memory but what this work takes
            console.print(noise(Path(place) / "awq", asked.layers))
        for table in tensors(Path(place), asked.most):
            console.print(table)


if __name__ == "__main__":
    main()
