"""How fast the CPU code is, beside a copy of as many bytes and beside other programs: `nox -s bench`.

A row is the best of several rounds over a layer of 4096 inputs and 14336 outputs. What is read is rotated
over 1 GiB, as a cache may hold a layer; what is written is one buffer, as a loader reuses it. Before every
call a copy of the same bytes is timed, from as far apart to the same buffer: `of a copy` is the share of its
rate.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import product

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from qload import native
from qload.layouts import NibblePairs, Packing, awq, compressed_tensors, exllama, gptq, marlin
from qload.spec import Codes

K, N = 4096, 14336
POOL = torch.randint(0, 256, (1 << 30,), dtype=torch.uint8)
OUT = torch.zeros(4 * K * N, dtype=torch.uint8)
SCALES, VALUES = torch.rand(N, K // 64), torch.linspace(-1, 1, 16)
GROUPS = torch.arange(K) // 64

PEER = "peer: "
Row = tuple[str, str, int, float, float]  # what, how, bytes that have to move, seconds, seconds of a copy
Work = Callable[[Tensor], object]


def seconds(work: Work, x: Tensor) -> float:
    start = time.perf_counter()
    work(x)
    return time.perf_counter() - start


def measure(what: str, how: str, read: int, written: int, work: Work, rounds: int) -> Row:
    """Work on `read` bytes, and a copy that moves as many, in turns; the best of each."""
    half = (read + written) // 2
    took = copied = float("inf")
    for turn in range(rounds):
        at = turn * half % (POOL.numel() - half)
        copied = min(copied, seconds(lambda x: OUT[:half].copy_(x), POOL[at : at + half]))
        at = (turn * read + POOL.numel() // 2) // 64 * 64 % (POOL.numel() - read)
        took = min(took, seconds(work, POOL[at : at + read].view(torch.int32)))
    return what, how, read + written, took, copied


def each(what: str, read: int, written: int, work: Work) -> Iterator[Row]:
    """By every instruction set, on one thread and on all."""
    for isa, threads in product(native.available(), sorted({1, torch.get_num_threads()})):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)  # of the copy
        with native.using(isa, threads):
            yield measure(what, f"{isa}, {threads}", read, written, work, 5 if isa == "scalar" else 30)
        torch.set_num_threads(before)


def repack(what: str, source: Packing, target: Packing, order: Tensor | None = None) -> Iterator[Row]:
    codes = torch.zeros(K, N, dtype=torch.int32)
    shape, made = source.pack(codes).shape, target.pack(codes)
    out, size = OUT.view(torch.int32)[: made.numel()].view(made.shape), 4 * made.numel()

    def work(x: Tensor) -> None:
        packed = source.packed(x.view(shape))
        target.pack(packed if order is None else packed[order], out)

    yield from each(what, size, size, work)


def repacks() -> Iterator[Row]:
    yield from repack("gptq to marlin", gptq.rows(4), marlin.rows(4))
    yield from repack("gptq to marlin, act order", gptq.rows(4), marlin.rows(4), torch.randperm(K))
    yield from repack("awq to marlin", awq.columns(4), marlin.rows(4))
    yield from repack("marlin to gptq", marlin.rows(4), gptq.rows(4))
    yield from repack("awq to gptq", awq.columns(4), gptq.rows(4))
    yield from repack("gptq to awq", gptq.rows(4), awq.columns(4))
    yield from repack("gptq to exllama", gptq.rows(4), exllama.rows(4))
    yield from repack("zero points to marlin's", gptq.columns(4), marlin.zeros(4))
    yield from repack("gptq to marlin, 8 bits", gptq.rows(8), marlin.rows(8))
    yield from repack("gptq to exllama, 3 bits", gptq.rows(3), exllama.rows(3))
    size, out = 2 * K * N // 4, OUT.view(torch.float16)[: K * N // 4].view(K // 4, N)
    for order in (marlin.SCALES_GROUPED, marlin.SCALES_PER_COLUMN):
        yield from each(
            f"scales {order.pattern}",
            size,
            size,
            lambda x, o=order: o.apply(x.view(torch.float16).view(out.shape), out),
        )


def dequantizes() -> Iterator[Row]:
    half, out = K * N // 2, OUT.view(torch.bfloat16)[: K * N].view(N, K)
    ways: dict[str, Callable[[Tensor], Codes]] = {
        "nf4 to bfloat16": lambda x: Codes(
            4, NibblePairs(x.view(torch.uint8).view(N, K // 2), True), SCALES, None, GROUPS, VALUES
        ),
        "gptq to bfloat16": lambda x: Codes(4, gptq.rows(4).packed(x.view(-1, N)).T, SCALES, None, GROUPS),
        "awq to bfloat16": lambda x: Codes(4, awq.columns(4).packed(x.view(K, -1)).T, SCALES, None, GROUPS),
        "gptq to bfloat16, 3 bits": lambda x: Codes(
            3, gptq.rows(3).packed(x[: 3 * K * N // 32].view(-1, N)).T, SCALES, None, GROUPS
        ),
        "marlin to bfloat16": lambda x: Codes(
            4, marlin.rows(4).packed(x.view(-1, 2 * N)).T, SCALES, None, GROUPS
        ),
    }
    for what, codes in ways.items():
        yield from each(what, half, 2 * K * N, lambda x, codes=codes: codes(x).dequantize(out=out))


def plain() -> Iterator[Row]:
    """What a machine without a compiler has, what native code has, and what others have."""
    codes = torch.randint(0, 16, (N, K), dtype=torch.int32)
    words, packing = (
        torch.randint(0, 2**31, (N, K // 8), dtype=torch.int32),
        compressed_tensors.rows(4, dense=True),
    )
    made = Codes(4, NibblePairs(words.view(torch.uint8), True), SCALES, None, GROUPS, VALUES)
    small, wide, packed = (
        torch.empty(N, K, dtype=torch.uint8),
        torch.empty_like(codes),
        torch.empty_like(words),
    )
    floats = torch.empty(N, K, dtype=torch.bfloat16)
    read, large = K * N // 2, 4 * K * N
    ways: list[tuple[str, str, int, int, Work]] = [
        ("pack", "", large, read, lambda _: packing.pack(codes)),
        ("pack", " to a buffer", large, read, lambda _: packing.pack(codes, packed)),
        ("unpack", " to new int32", read, large, lambda _: packing.unpack(words)),
        ("unpack", " to an int32 buffer", read, large, lambda _: packing.unpack(words, wide)),
        ("unpack", " to a uint8 buffer", read, K * N, lambda _: packing.unpack(words, small)),
        ("nf4 to bfloat16", "", read, 2 * K * N, lambda _: made.dequantize(torch.bfloat16)),
        ("nf4 to bfloat16", " to a buffer", read, 2 * K * N, lambda _: made.dequantize(out=floats)),
    ]
    for what, how, before, after, work in ways:
        with native.reference():
            yield measure(what, f"torch{how}", before, after, work, 5)
        if native.available():
            yield measure(what, f"native{how}", before, after, work, 5)
    yield from peers(codes, words)


def peers(codes: Tensor, words: Tensor) -> Iterator[Row]:
    """Other programs, where they can be imported."""
    read, shape, ways = K * N // 2, torch.Size((N, K)), list[tuple[str, str, int, int, Work]]()
    with suppress(ImportError):
        from compressed_tensors.compressors.pack_quantized import helpers

        small = (codes - 8).to(torch.int8)
        ways += [
            ("pack", "compressed-tensors, from int8", K * N, read, lambda _: helpers.pack_to_int32(small, 4)),
            (
                "unpack",
                "compressed-tensors, to int8",
                read,
                K * N,
                lambda _: helpers.unpack_from_int32(words, 4, shape),
            ),
        ]
    with suppress(ImportError):
        from bitsandbytes.backends.default import ops
        from bitsandbytes.functional import dequantize_4bit, quantize_4bit

        weight, state = quantize_4bit(torch.rand(N, K, dtype=torch.bfloat16), quant_type="nf4", blocksize=64)
        given = (weight.flatten(), state.absmax, state.code, 64, shape, torch.bfloat16)
        what, bytes_ = "nf4 to bfloat16", (read, 2 * K * N)
        ways.append((what, "bitsandbytes, its C++", *bytes_, lambda _: dequantize_4bit(weight, state)))
        if hasattr(ops, "_dequantize_4bit_compute"):  # what it does where its C++ cannot
            ways.append(
                (what, "bitsandbytes, its torch", *bytes_, lambda _: ops._dequantize_4bit_compute(*given))
            )
    for what, how, before, after, work in ways:
        yield measure(what, PEER + how, before, after, work, 5)


def beside(rows: list[Row], row: Row) -> str:
    """The time of a row as a multiple of the best peer's for the same."""
    others = [took for what, how, _, took, _ in rows if what == row[0] and how.startswith(PEER)]
    return f"{row[3] / min(others):.2f}" if others else ""


TABLES = {"repack": repacks, "dequantize": dequantizes, "torch": plain}


def main() -> None:
    """Print the tables, or those that are asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=f"example: nox -s bench -- --only {next(iter(TABLES))}"
    )
    parser.add_argument("--only", action="append", choices=list(TABLES), help="may be given several times")
    console = Console(width=120)
    for title in parser.parse_args().only or TABLES:
        rows = list(TABLES[title]())
        table = Table("what", "how", "MB to move", "ms", "GB/s", "of a copy", "x best peer", title=title)
        for row in rows:
            what, how, moved, took, copied = row
            rate, share = f"{moved / took / 1e9:.1f}", f"{copied / took:.0%}"
            table.add_row(
                what, how, f"{moved / 1e6:.0f}", f"{took * 1e3:.2f}", rate, share, beside(rows, row)
            )
        console.print(table)


if __name__ == "__main__":
    main()
