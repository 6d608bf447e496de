"""GPTQ brought to Marlin's order on a CPU: `python -m tests.bench.cpu_load [--layers 34] [--rounds 30]`.

- `repack(weight, "marlin")` of a layer of 4096 x 14336, into buffers and into fresh memory, beside a copy of
  its words, in turns over six layers.
- The load of as many layers, repacked, beside safetensors' `load_file` and a clone of each tensor, in turns,
  from a folder that is made for the occasion and read once before.

Medians, and of loads the best too, by the clock and by the time for which cores worked, which says more on a
machine that does other things; `repack` on one thread, loads on all. The C library keeps the memory of a turn
for the next one: else a way may get that of the way before it, and leave none to the one after it. With
`--given-back` each turn begins without, and asks the system for all of it.
"""

import argparse
import ctypes
import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file
from torch import Tensor

from qload import native
from qload.checkpoint import load_layers, open_checkpoint
from qload.detect import KernelTarget
from qload.formats import GPTQConfig, GPTQWeight
from qload.kernel_formats import repack
from qload.layouts import Stored
from tests.bench.cpu_model import packed
from tests.bench.model import GROUP, QUANTIZATION

K, N, COPIES = 4096, 14336, 6
TRIM_THRESHOLD, MMAP_MAX = -1, -4  # of <malloc.h>
PAUSE = 0.05  # seconds, in which threads of the way before stop waiting busily
Work = Callable[[int], object]


Took = Mapping[str, Sequence[tuple[float, float]]]  # of each turn the seconds by the clock, and of the cores


def keeps_memory() -> bool:
    """Tell the C library to keep what is given back to it; False where it cannot be told."""
    if sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "mallopt"):
        return False
    told = ctypes.CDLL(None).mallopt
    return bool(told(MMAP_MAX, 0)) and bool(told(TRIM_THRESHOLD, -1))


def give_back() -> None:
    """What the C library keeps goes to the system, where there is a way."""
    if sys.platform == "linux" and hasattr(ctypes.CDLL(None), "malloc_trim"):
        ctypes.CDLL(None).malloc_trim(0)


def in_turns(ways: Mapping[str, Work], rounds: int, before: Callable[[], None] = lambda: None) -> Took:
    """What each turn of rounds took, after one that is not counted; `before` each, something else is done."""
    took: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name, work in ways.items():
            before()
            time.sleep(PAUSE)
            clock, cores = time.perf_counter(), time.process_time()
            made = work(turn)
            took[name].append((time.perf_counter() - clock, time.process_time() - cores))
            del made
    return {name: each[1:] for name, each in took.items()}


def table(title: str, found: Took, against: str, of: Callable[[Iterable[float]], float] = median) -> Table:
    """How long each takes, `of` its turns, and what part of the rate of `against` it reaches."""
    made = Table("what", "ms", "of " + against, "ms of cores", "of " + against, title=title)
    shown = {name: [of(each) for each in zip(*turns, strict=True)] for name, turns in found.items()}
    for name, each in shown.items():
        beside = zip(each, shown[against], strict=True)
        cells = ((f"{1e3 * own:.2f}", f"{its / own:.0%}") for own, its in beside)
        made.add_row(name, *(cell for both in cells for cell in both))
    return made


def layer(tensors: Mapping[str, Tensor]) -> GPTQWeight:
    """Symmetric codes, read as they stand."""
    return GPTQWeight(config=GPTQConfig(4, GROUP, zeros=Stored(), positional=True), **tensors)


def repacks(rounds: int) -> Table:
    """Into buffers and into fresh memory, beside a copy of the words."""
    made = [layer(packed(K, N)) for _ in range(COPIES)]
    out, words = repack(made[0], "marlin"), torch.empty_like(made[0].qweight)
    ways: dict[str, Work] = {
        "a copy": lambda turn: words.copy_(made[(turn + COPIES // 2) % COPIES].qweight),
        "repack(out=)": lambda turn: repack(made[turn % COPIES], "marlin", out=out),
        "repack": lambda turn: repack(made[turn % COPIES], "marlin"),
    }
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # of the copy
    with native.using(threads=1):
        found = in_turns(ways, rounds)
    torch.set_num_threads(before)
    return table(f"GPTQ to Marlin, {K} x {N}, one thread", found, "a copy")


def loads(folder: Path, layers: int, rounds: int, given_back: bool) -> list[Table]:
    """A folder's layers as they are stored and repacked, beside load_file and clones."""
    kept = not given_back and keeps_memory()
    one = packed(K, N)
    tensors = {f"layers.{n}.{name}": each.clone() for n in range(layers) for name, each in one.items()}
    save_file(tensors, folder / "model.safetensors")
    size = sum(each.nbytes for each in tensors.values())
    del tensors
    (folder / "config.json").write_text(json.dumps({"quantization_config": QUANTIZATION}))

    def load(target: str | None) -> Any:
        asked: Any = None if target is None else KernelTarget(target)  # type: ignore[arg-type]
        with open_checkpoint(folder, target=asked) as weights:
            return list(load_layers(weights))

    ways: dict[str, Work] = {
        "load_file, clone": lambda turn: [
            each.clone() for each in load_file(folder / "model.safetensors").values()
        ],
        "as stored": lambda turn: load(None),
        "to marlin": lambda turn: load("marlin"),
        "to panels": lambda turn: load("panels"),
    }
    found = in_turns(ways, rounds, give_back if given_back else lambda: None)
    memory = "kept" if kept else "given back" if given_back else "as it comes"
    title = f"{size / (1 << 20):.0f} MiB, {native.threads()} threads, memory {memory}"
    return [table(f"{title}, {of.__name__}", found, "load_file, clone", of) for of in (median, min)]


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=34)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--given-back", action="store_true")
    asked = parser.parse_args()
    console = Console(width=110)
    console.print(repacks(asked.rounds))
    with TemporaryDirectory() as folder:
        console.print(*loads(Path(folder), asked.layers, max(3, asked.rounds // 3), asked.given_back))


if __name__ == "__main__":
    main()
