"""The 4-bit linear beside the floor of reading its weights and fp16 matmul: `nox -s bench_gpu`."""

import argparse
import json
import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor

from qload.kernels import GPTQMarlinConfig, GPTQMarlinWeight, cuda
from qload.kernels.cuda import w4a16
from qload.kernels.cuda.marlin import MarlinCall
from qload.kernels.cuda.module import native, stream
from tests.bench.timing import copies, microseconds

SHAPES = [  # K, N: Llama 3 8B and 70B
    (4096, 4096),
    (4096, 6144),
    (4096, 28672),
    (14336, 4096),
    (8192, 8192),
    (8192, 57344),
    (28672, 8192),
]
TOKENS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096]
GROUP = 128
LINE = "{:>13} {:>5} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8} {:>10}"
HEAD = ("K x N", "M", "floor", "us", "no pdl", "fp16", "x floor", "x fp16", "division")


def weight(K: int, N: int) -> GPTQMarlinWeight:
    words = torch.randint(-(2**31), 2**31, (K // 16, 2 * N), dtype=torch.int32, device="cuda")
    scales = (torch.rand(K // GROUP, N, device="cuda") * 0.02 + 0.001).half()
    return GPTQMarlinWeight(config=GPTQMarlinConfig(4, GROUP), qweight=words, scales=scales)


def floor(words: list[Tensor]) -> float:
    sink = torch.zeros(4, dtype=torch.int32, device="cuda")

    def read(tensor: Tensor) -> None:
        native().read(tensor.data_ptr(), tensor.numel() * 4, sink.data_ptr(), stream(tensor))

    return microseconds([partial(read, w) for w in words])


def wrong(y: Tensor, x: Tensor, w: Tensor) -> bool:
    """Whether a result is off by more than rounding weights, sums and the result can cost."""
    exact, size = (a.double() @ b.double().T for a, b in ((x, w), (x.abs(), w.abs())))
    unit = torch.finfo(x.dtype).eps
    return not bool(((y.double() - exact).abs() <= (unit + x.shape[1] * 2.0**-24) * size + unit).all())


def call(x: Tensor, w: GPTQMarlinWeight, columns: int, split: int, early: bool) -> Tensor:
    made = MarlinCall(x, w.qweight, w.scales, *[None] * 4, w.layer.N, 4, GROUP, True)
    return w4a16.run(made, columns, split, early)


def best_division(x: Tensor, weights: list[GPTQMarlinWeight]) -> tuple[int, int, list[Any]]:
    seen = []
    for columns in (1, 2, 4):
        for split in (1, 2, 4, 8):
            calls = [partial(call, x, w, columns, split, True) for w in weights]
            try:
                seen.append((round(microseconds(calls), 2), columns, split))
            except RuntimeError as refused:
                if "not supported" not in str(refused):
                    raise
    return (*min(seen)[1:], sorted(seen))


def measure(K: int, N: int, tokens: list[int], sweep: bool) -> list[dict[str, Any]]:
    weights = [weight(K, N) for _ in range(copies(K * N // 2))]
    lowest = floor([w.qweight for w in weights])
    plain = [weights[0].dequantize().half()]
    plain += [torch.randn(N, K, device="cuda", dtype=torch.float16) for _ in range(copies(K * N * 2) - 1)]
    rows = []
    for M in tokens:
        x = torch.randn(M, K, device="cuda", dtype=torch.float16)
        dense = microseconds([partial(torch.nn.functional.linear, x, w) for w in plain])
        row: dict[str, Any] = {"K": K, "N": N, "M": M, "floor": lowest, "fp16": dense}
        if wrong(cuda.linear(x[:256], weights[0]), x[:256], plain[0]):
            rows.append(row | {"wrong": True})
            continue
        row["us"] = microseconds([partial(cuda.linear, x, w) for w in weights])
        if M <= 64:
            row["plain"] = microseconds([partial(call, x, w, 0, 0, False) for w in weights])
            if sweep:
                columns, split, seen = best_division(x, weights)
                row |= {"columns": columns, "split": split, "best": seen[0][0], "sweep": seen}
        rows.append(row)
    return rows


def show(row: dict[str, Any]) -> str:
    name = f"{row['K']}x{row['N']}"
    if row.get("wrong"):
        return LINE.format(
            name, row["M"], f"{row['floor']:.1f}", "wrong", "", f"{row['fp16']:.1f}", "", "", ""
        )
    plain = f"{row['plain']:.1f}" if "plain" in row else ""
    division = f"{row['columns']},{row['split']}:{row['best']:.1f}" if "best" in row else ""
    ratios = f"{row['us'] / row['floor']:.2f}", f"{row['fp16'] / row['us']:.2f}"
    times = (f"{row[key]:.1f}" for key in ("floor", "us"))
    return LINE.format(name, row["M"], *times, plain, f"{row['fp16']:.1f}", *ratios, division)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="*", default=TOKENS)
    parser.add_argument("--sweep", action="store_true", help="try every division of a layer")
    parser.add_argument("--json", help="a file for all numbers")
    asked = parser.parse_args()
    put = sys.stdout.write
    put(LINE.format(*HEAD) + "\n")
    rows = []
    for K, N in SHAPES:
        for row in measure(K, N, asked.tokens, asked.sweep):
            rows.append(row)
            put(show(row) + "\n")
        torch.cuda.empty_cache()
    if asked.json:
        with open(asked.json, "w") as file:
            json.dump(rows, file)


if __name__ == "__main__":
    main()
