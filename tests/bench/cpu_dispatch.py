"""The table of ways on a CPU, made of measured times: `nox -s bench -- --dispatch`.

Layers of 2048 x 2048, one thread, and the time for which the processor worked for it, so that it matters
little what else the machine does: the best of some rounds, in turns. A way is timed where its result is
within the bound. Neighbouring numbers of tokens with the same fastest way are one row. A way that is faster
by less than `CLEAR` is none to change for.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qload import native
from qload.kernel_formats import repack
from qload.kernels import cpu, products
from qload.kernels.cpu import PAIRS, REGISTERS, TORCH, KeptRows
from qload.spec import Weight
from qload.testing import assert_within_bound
from tests.bench import cell_layers

FILE = Path(cpu.__file__).with_name(cpu.TABLE)
TOKENS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MOST_IN_REGISTERS = 6
K = N = 2048
CLEAR = 0.05
TORCHS = {  # what keeps torch to an instruction set, so that a chip with better ones speaks for those without
    isa: {"ATEN_CPU_CAPABILITY": own, "ONEDNN_MAX_CPU_ISA": onednn, "MKL_ENABLE_INSTRUCTIONS": mkl}
    for isa, own, onednn, mkl in (
        ("scalar", "default", "SSE41", "SSE4_2"),
        ("avx2", "avx2", "AVX2", "AVX2"),
        ("avx512", "avx512", "AVX512_CORE", "AVX512"),
        ("avx512_bf16", "avx512", "AVX512_CORE_BF16", "AVX512"),
    )
}
Times = dict[int, dict[str, float | None]]  # by tokens, then by way; None: wrong


def ways_of(kind: str, tokens: int) -> tuple[str, ...]:
    """Those that there are for so many tokens."""
    some = {REGISTERS: tokens <= MOST_IN_REGISTERS, PAIRS: tokens <= 16}
    return tuple(way for way in cpu.WAYS[kind] if some.get(way, True))


def call(way: str, weight: Weight, kept: KeptRows, x: Tensor) -> Tensor:
    """x times a weight, one way."""
    plan = None if way == TORCH else cpu.plan_of(weight, kept)
    y = None if plan is None else plan.product(way, x)
    return products.multiply(x, weight) if y is None else y


def seconds(work: Callable[[], object]) -> float:
    start = time.thread_time()
    work()
    return time.thread_time() - start


def cell(weight: Weight, dtype: torch.dtype, tokens: Sequence[int], rounds: int) -> Times:
    """The best of each way, for each number of tokens."""
    kept, found = KeptRows(), Times()
    for M in tokens:
        x, best = torch.randn(M, K).to(dtype), dict[str, float | None]()
        calls = {way: partial(call, way, weight, kept) for way in ways_of(cpu.kind_of(type(weight)), M)}
        for way, each in calls.items():
            try:
                assert_within_bound(each, weight, x[:2])
            except AssertionError:
                best[way] = None
        for _ in range(rounds):
            for way, each in calls.items():
                before = best.get(way, float("inf"))
                best[way] = None if before is None else min(before, seconds(partial(each, x)))
        found[M] = best
    return found


def together(layers: Sequence[Times]) -> Times:
    """Times of several layers added; None where one was wrong."""
    found = Times()
    for M in layers[0]:
        each = [times[M] for times in layers]
        found[M] = {
            way: None if any(one[way] is None for one in each) else sum(one[way] or 0 for one in each)
            for way in each[0]
        }
    return found


def order(times: dict[str, float | None], before: str | None) -> list[str]:
    """Right ways from the fastest on; that of fewer tokens stays first unless another is clearly faster."""
    right = {way: took for way, took in times.items() if took is not None}
    if before in right:
        right[before] *= 1 - CLEAR
    return sorted(right, key=lambda way: right[way])


def rows(times: Times, said: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Rows of the table: of neighbours with one order the last."""
    made, before = list[dict[str, Any]](), None
    for M, each in sorted(times.items()):
        ways = order(each, before)
        before = ways[0]
        if made and made[-1]["ways"][0] == ways[0] and set(made[-1]["ways"]) >= set(ways):
            made.pop()
        made.append({**said, "tokens": M, "ways": ways})
    yield from made


def layers() -> dict[tuple[str, int], list[Weight]]:
    """What is measured, by kind and width."""
    cell_layers.RANDOM.name = "cpu"
    made = cell_layers.LAYERS
    names = {
        ("rows", 4): ("mxfp4", "nf4"),
        ("rows", 8): ("fp8 channel", "ct int8 channel"),
        ("eetq", 8): ("eetq",),
    }
    panels = {("panels", bits): [repack(made[f"gptq {bits}"](N, K), "panels")] for bits in (4, 8)}
    return {**panels, **{cell: [made[name](N, K) for name in each] for cell, each in names.items()}}


def write(made: Sequence[dict[str, Any]]) -> None:
    """Put these rows in the place of those of their cells."""
    names = "kind", "bits", "dtype", "isa"
    new = {tuple(row[name] for name in names) for row in made}
    known = [
        row for row in json.loads(FILE.read_text("utf-8")) if tuple(row[name] for name in names) not in new
    ]
    lines = ",\n".join(json.dumps(row) for row in [*known, *made])
    FILE.write_text(f"[\n{lines}\n]\n", "utf-8")
    cpu.forget()


@torch.no_grad()
def measure(isa: str, tokens: Sequence[int], rounds: int) -> None:
    """All cells of an instruction set, and their rows to the table."""
    torch.set_num_threads(1)
    measured, made = layers(), list[dict[str, Any]]()
    for (kind, bits), dtype in product(measured, DTYPES):
        said = {"kind": kind, "bits": bits, "dtype": str(dtype).removeprefix("torch."), "isa": isa}
        with native.using(isa, 1):
            each = [cell(weight, dtype, tokens, rounds) for weight in measured[kind, bits]]
        made += rows(together(each), said)
    write(made)


def main() -> None:
    """Measure what is asked for, each instruction set in a process in which torch has no better one."""
    parser = argparse.ArgumentParser(description=__doc__)
    isas = native.available()
    parser.add_argument("--isa", choices=isas, help="in this process, whatever torch has; else all")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    if asked.isa:
        measure(asked.isa, asked.tokens, asked.rounds)
        return
    for isa in isas:
        options = ["--rounds", str(asked.rounds), "--tokens", *map(str, asked.tokens)]
        command = [sys.executable, "-m", "tests.bench.cpu_dispatch", "--isa", isa, *options]
        subprocess.run(command, env={**os.environ, **TORCHS.get(isa, {})}, check=True)


if __name__ == "__main__":
    main()
