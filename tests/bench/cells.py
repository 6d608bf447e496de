"""Every format times every type of activations: the way that always works, beside what it is made of.

    python -m tests.bench.cells [--cpu] [--tokens 1 8 64 300 1024] [--only TEXT] [--out FILE]

A cell is one call of `qload.kernels.plans.multiply` on a layer of 8192 x 8192 (2048 x 2048 on a CPU).
Beside it stand `dequantize()` to the type of the activations alone, the vendor's product in that type alone,
and the ratio of the call to both together; then how much memory the call asks for above y. A ratio above 1.3
and more than 256 MiB are marked. No cell is timed whose result is off by more than rounding can cost. On a
GPU what is timed is a graph's replay, or calls in turn where a call cannot be captured (then marked `eager`).

Plain layers stand beside `torch.nn.Linear`: the median of 30 paired turns.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from qload.kernels import declared, plans
from qload.spec import Weight
from tests.bench import cell_layers
from tests.bench.timing import microseconds

TYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
SLOW, MUCH, TURNS, CHECKED = 1.3, 256.0, 30, 16
ROW = "{:30} {:8} {:5} {:>9} {:>9} {:>9} {:>6} {:>7}  {}"


def taken(x: Tensor, weight: Weight) -> Tensor:
    """Inputs in float64 as the weight takes them: times their factors, and quantized where it declares so."""
    factors = weight.input_factors
    x = x if factors is None else x.float() * factors.float()
    if weight.activations is None:
        return x.double()
    return torch.cat([made.dequantize().double() for made, _ in declared.quantized(x, weight, None)][:1])


def off(y: Tensor, x: Tensor, weight: Weight) -> tuple[float, float]:
    """The largest error of any number over what rounding can cost it, and of all over half a unit of theirs.

    Rounding costs half a unit for the weight, for inputs that are quantized and for y, and K sums of float32.
    """
    rows = torch.linspace(0, x.shape[0] - 1, min(x.shape[0], CHECKED), device=x.device).long()
    wide, w = taken(x, weight)[rows], weight.dequantize().double()
    exact, size = wide @ w.T, wide.abs() @ w.abs().T
    unit, error = torch.finfo(x.dtype).eps / 2, (y[rows].double() - exact).abs()
    cost = (2 * unit + (x.shape[1] + 4) * 2.0**-24) * size + 2 * unit * exact.abs()
    return float((error / cost.clamp(min=1e-30)).max()), float(error.norm() / exact.norm()) / unit


def seconds(call: Callable[[], object], device: str) -> tuple[float, str]:
    """Microseconds of a call, and how they were found."""
    if device == "cuda":
        try:
            return microseconds([call]), ""
        except RuntimeError:
            torch.cuda.synchronize()
    found = []
    for _ in range(9):
        start = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
    return median(found) * 1e6, "eager" if device == "cuda" else ""


def above(call: Callable[[], Tensor]) -> float:
    """MiB that a call asks for on a GPU, without its result."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = call()
    return (torch.cuda.max_memory_allocated() - before - y.nbytes) / 2**20


def cell(weight: Weight, x: Tensor, alone: dict[str, tuple[float, str]]) -> dict[str, Any]:
    """One cell, or what is wrong with it."""
    device = x.device.type

    def call() -> Tensor:
        return plans.multiply(x, weight)

    each, together = off(call(), x, weight)
    found: dict[str, Any] = {"off": each, "off together": together}
    if not each <= 1:
        return {**found, "notes": "WRONG"}
    found["MiB"] = above(call) if device == "cuda" else 0.0
    us, how = seconds(call, device)
    dequantize, its = alone["dequantize"]
    ratio = us / (dequantize + alone["product"][0])
    marks = [how, its and "dequantize eager", "SLOW" * (ratio > SLOW), "MUCH" * (found["MiB"] > MUCH)]
    return found | {"us": us, "ratio": ratio, "notes": " ".join(filter(None, marks))}


class Products:
    """The vendor's product alone, timed once for a type and a number of tokens."""

    def __init__(self, size: int, device: str) -> None:
        self.size, self.device, self.known = size, device, dict[tuple[str, int], float]()

    def alone(self, kind: str, x: Tensor) -> float:
        """Microseconds of x times a plain weight."""
        key = kind, x.shape[0]
        if key not in self.known:
            w = torch.randn(self.size, self.size, device=self.device).to(x.dtype)
            self.known[key], _ = seconds(lambda: linear(x, w), self.device)
        return self.known[key]


def cells(size: int, device: str, tokens: list[int], only: str, types: list[str]) -> Iterator[dict[str, Any]]:
    """Every cell in turn."""
    products = Products(size, device)
    for name, make in cell_layers.LAYERS.items():
        if only not in name:
            continue
        weight = make(size, size)
        for kind in types:
            dequantize = seconds(partial(weight.dequantize, TYPES[kind]), device)
            for M in tokens:
                x = torch.randn(M, size, device=device).to(TYPES[kind])
                alone = {"dequantize": dequantize, "product": (products.alone(kind, x), "")}
                row = {"format": name, "x": kind, "M": M}
                yield row | {key: us for key, (us, _) in alone.items()} | cell(weight, x, alone)


def plain(size: int, device: str, tokens: list[int]) -> Iterator[dict[str, Any]]:
    """Plain layers: paired turns of ours and nn.Linear's, eagerly."""
    for kind, M in product(TYPES, tokens):
        weight = cell_layers.plain(TYPES[kind])(size, size)
        own, x = weight.get_linear(), torch.randn(M, size, device=device).to(TYPES[kind])
        other = torch.nn.Linear(size, size, bias=False, device=device, dtype=TYPES[kind])
        other.weight.requires_grad_(False).copy_(weight.fields()["weight"])
        ratios = []
        for _ in range(TURNS + 3):
            pair = [_turn(partial(layer, x), device) for layer in (own, other)]
            ratios.append(pair[0] / pair[1])
        same = bool(torch.equal(own(x), other(x)))
        yield {
            "format": "plain",
            "x": kind,
            "M": M,
            "ratio": median(ratios[3:]),
            "notes": "" if same else "WRONG",
        }


def _turn(call: Callable[[], object], device: str) -> float:
    """Seconds of some calls in a row, until the device is done with them."""
    start = time.perf_counter()
    for _ in range(5):
        call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def shown(row: dict[str, Any]) -> str:
    """A line of the table."""
    numbers = [
        f"{row[key]:.{digits}f}" if key in row else ""
        for key, digits in (("dequantize", 1), ("product", 1), ("us", 1), ("ratio", 2), ("MiB", 0))
    ]
    notes = f"{row.get('notes', '')} off {row.get('off', 0):.2f} {row.get('off together', 0):.2f}"
    return ROW.format(row["format"], row.get("x", ""), row.get("M", ""), *numbers, notes)


def main(arguments: list[str]) -> int:
    """Prints the table; 1 where a result is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--size", type=int)
    parser.add_argument("--tokens", type=int, nargs="*", default=[1, 8, 64, 300, 1024])
    parser.add_argument("--types", nargs="*", default=list(TYPES))
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args(arguments)
    device = cell_layers.Device.name = "cpu" if asked.cpu else "cuda"
    size = asked.size or (2048 if asked.cpu else 8192)
    rows = []
    sys.stdout.write(
        ROW.format("format", "x", "M", "dequant", "product", "us", "ratio", "MiB", "notes") + "\n"
    )
    with torch.no_grad():
        made = [] if asked.only else [plain(size, device, asked.tokens)]
        for each in [*made, cells(size, device, asked.tokens, asked.only, asked.types)]:
            for row in each:
                rows.append(row)
                sys.stdout.write(shown(row) + "\n")
    if asked.out:
        asked.out.write_text(json.dumps(rows))
    return int(any("WRONG" in row["notes"] for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
