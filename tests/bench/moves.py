"""Repack and dequantize on a CUDA device beside a copy of as many bytes: `nox -s bench_gpu`."""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from qload import native
from qload.formats import AWQConfig, AWQWeight, BNB4Config, BNBNF4Weight, GPTQWeight
from qload.kernel_formats import repack
from qload.layouts import awq, exllama, gptq, marlin
from qload.layouts.packing import Packing
from qload.spec import Weight
from tests.bench.timing import copies, rounds_of
from tests.bench.timing import microseconds as timed

SHAPES = [(8192, 8192), (14336, 4096), (8192, 57344)]  # K, N
WIDENED = [(8192, 8192), (14336, 4096), (4096, 28672)]
MOVES: list[tuple[str, Packing, Packing]] = [
    ("gptq to marlin", gptq.rows(4), marlin.rows(4)),
    ("awq to marlin", awq.columns(4), marlin.rows(4)),
    ("gptq to exllama", gptq.rows(4), exllama.rows(4)),
    ("exllama to gptq", exllama.rows(4), gptq.rows(4)),
    ("marlin to gptq", marlin.rows(4), gptq.rows(4)),
    ("marlin to awq", marlin.rows(4), awq.columns(4)),
    ("gptq to awq", gptq.rows(4), awq.columns(4)),
    ("gptq to marlin, 8 bits", gptq.rows(8), marlin.rows(8)),
]
LINE = "{:<34} {:>14} {:>9} {:>9} {:>10}"


def words(*shape: int) -> Tensor:
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, device="cuda")


def microseconds(calls: Sequence[Callable[[], object]]) -> float:
    return timed(calls, rounds=rounds_of(len(calls)))


def copy_rate(total: int) -> float:
    """Bytes read and written per microsecond by a copy that moves `total` bytes both ways together."""
    count = copies(total)
    sides = [
        [torch.empty(total // 8, dtype=torch.int32, device="cuda") for _ in range(2)] for _ in range(count)
    ]
    return total / microseconds([lambda a=a, b=b: b.copy_(a) for a, b in sides])  # type: ignore[misc]


def move_line(name: str, one: Packing, other: Packing, K: int, N: int) -> str:
    total = 2 * K * N * one.bits // 8
    sources = [words(*one.shape_of_words((K, N))) for _ in range(copies(total))]
    if K * N <= 1 << 26:
        with native.reference():
            want = other.pack(one.unpack(sources[0]))
        if not torch.equal(other.pack(one.packed(sources[0])), want):
            return LINE.format(name, f"{K} x {N}", "wrong", "", "")
        del want
    time = microseconds([lambda s=s: other.pack(one.packed(s)) for s in sources])  # type: ignore[misc]
    return line(name, K, N, total, time)


def rows_line(name: str, one: Packing, other: Packing, K: int, N: int) -> str:
    total = 2 * K * N * one.bits // 8
    sources = [words(*one.shape_of_words((K, N))) for _ in range(copies(total))]
    order = torch.randperm(K, device="cuda")
    if K * N <= 1 << 26:
        with native.reference():
            want = other.pack(one.unpack(sources[0])[order])
        if not torch.equal(other.pack(one.packed(sources[0])[order]), want):
            return LINE.format(name, f"{K} x {N}", "wrong", "", "")
        del want
    time = microseconds([lambda s=s: other.pack(one.packed(s)[order]) for s in sources])  # type: ignore[misc]
    return line(name, K, N, total, time)


def line(name: str, K: int, N: int, total: int, time: float) -> str:
    rate = total / time
    return LINE.format(
        name, f"{K} x {N}", f"{time:.1f}", f"{rate / 1e6:.2f}", f"{100 * rate / copy_rate(total):.0f} %"
    )


def weights(layout: str, K: int, N: int, group: int = 128) -> Weight:
    if layout == "act order":
        weight = weights("gptq", K, N, group)
        assert isinstance(weight, GPTQWeight)
        g_idx = weight.g_idx[torch.randperm(K, device="cuda")]
        return replace(weight, g_idx=g_idx, config=replace(weight.config, positional=False))
    if layout == "nf4":
        absmax, table = torch.rand(N * K // 64, device="cuda"), torch.linspace(-1, 1, 16, device="cuda")
        codes = words(N * K // 8).view(torch.uint8).reshape(-1, 1)
        return BNBNF4Weight(config=BNB4Config("nf4", K=K), weight=codes, absmax=absmax, quant_map=table)
    scales = (torch.rand(K // group, N, device="cuda") * 0.02).half()
    zeros = words(K // group, N // 8)
    weight = AWQWeight(config=AWQConfig(group), qweight=words(K, N // 8), scales=scales, qzeros=zeros)
    return repack(weight, layout)


def dequantize_line(layout: str, K: int, N: int, dtype: torch.dtype) -> str:
    total = K * N * 4 // 8 + K * N * dtype.itemsize
    held = [weights(layout, K, N) for _ in range(copies(total))]
    name = f"{layout} to {str(dtype).removeprefix('torch.')}"
    with native.reference():
        want = held[0].dequantize(dtype) if K * N <= 1 << 26 else None
    got = held[0].dequantize(dtype)
    if want is not None and not torch.equal(got.view(torch.uint8), want.view(torch.uint8)):
        return LINE.format(name, f"{K} x {N}", "wrong", "", "")
    del want, got
    time = microseconds([lambda w=w: w.dequantize(dtype) for w in held])  # type: ignore[misc]
    return line(name, K, N, total, time)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dequantize", action="store_true", help="leave repacking out")
    asked = parser.parse_args()
    put = sys.stdout.write
    put(LINE.format("operation", "K x N", "us", "TB/s", "of a copy") + "\n")
    for K, N in () if asked.dequantize else SHAPES:
        for name, one, other in MOVES:
            put(move_line(name, one, other, K, N) + "\n")
        for name, one, other in MOVES[0], MOVES[2], MOVES[4]:
            put(rows_line(f"{name}, rows looked up", one, other, K, N) + "\n")
    for K, N in WIDENED:
        for layout in ("gptq", "awq", "marlin", "exllama", "nf4", "act order"):
            if layout == "act order" and WIDENED[0] != (K, N):
                continue
            for dtype in (torch.float16, torch.bfloat16, torch.float32):
                put(dequantize_line(layout, K, N, dtype) + "\n")


if __name__ == "__main__":
    main()
