"""Linears of quantized layers beside their limits, a dense matmul and peers: `nox -s bench_gpu -- --help`.

The limit of a cell is the larger of two times measured in the same run: reading the layer's codes and scales
and nothing else, and M x K x N at the rate of a large fp16 product. No time is shown for a result that fails
its check. From 128 tokens on, where power limits the chip and what follows a slower way would be faster, each
way runs alone for 60 ms and then is timed for as long, in five turns. Numbers of tokens where time jumps, or
falls as tokens are added, are named at the end.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from qload.errors import ArgumentError
from qload.kernels import cuda
from qload.kernels.cuda.linear import able, call_of
from qload.spec import Weight
from tests.bench import dispatch, peer_folder, peers, plot, steps
from tests.bench.layers import SHAPES, TOKENS, checkpoint, layers
from tests.bench.limits import SQUARE, floor, rate
from tests.bench.timing import copies, replayed, rounds_of, sustained

CHECKED = 256  # tokens at most
LIMITED = 128  # tokens from which the chip's power can be the limit
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
PEERS = "any of {}; or a folder of wheels and shared libraries that they come from"
COLUMNS = ("order", "layer", "M", "floor", "limit", "us", "x limit", "no pdl", "dense", "x dense", "kernel")


@dataclass(frozen=True)
class Group:
    """Calls of x that do the same with other memory; the first multiplies with w."""

    calls: Sequence[Any]
    x: Tensor
    w: Tensor


def wrong(y: Tensor, x: Tensor, w: Tensor) -> bool:
    """Whether a result is off by more than rounding weights, sums and the result costs.

    In any element by what it can cost, in all together by what it does: one lost row of a weight is much
    less than the former.
    """
    exact, size = (a.double() @ b.double().T for a, b in ((x, w), (x.abs(), w.abs())))
    unit, off = torch.finfo(x.dtype).eps, (y.double() - exact).abs()
    each = bool((off <= (unit + x.shape[1] * 2.0**-24) * size + unit).all())
    return not (each and bool(off.norm() <= unit * exact.norm()))


def right(y: Tensor, x: Tensor, w: Tensor) -> bool:
    """Whether rows of a result, spread over it, pass the check."""
    rows = torch.linspace(0, x.shape[0] - 1, min(x.shape[0], CHECKED), device=x.device).long()
    return not wrong(y[rows], x[rows], w)


def ours(weights: Sequence[Weight], **options: Any) -> list[Any]:
    """Calls of x with each of these weights."""
    return [partial(lambda x, w: cuda.linear(x, w, **options), w=w) for w in weights]


def measure(
    asked: argparse.Namespace, layout: str, K: int, N: int, matmul: float
) -> Iterator[dict[str, Any]]:
    """One row for each number of tokens."""
    size, dtype = K * N * asked.bits // 8, DTYPES[asked.dtype]
    weights = layers(layout, K, N, asked.bits, asked.group, copies(size), asked.zeros, dtype)
    lowest, w = floor(weights), weights[0].dequantize(dtype)
    different = [w, *(torch.randn_like(w) for _ in range(copies(K * N * 2) - 1))]
    dense = [different[i % len(different)] for i in range(len(weights))]  # as many calls of each
    others = {peer.name: prepared(peer, asked, K, N) for peer in peers.PEERS if peer.name in asked.peers}
    for M in asked.tokens:
        x = torch.randn(M, K, device="cuda", dtype=dtype)
        row: dict[str, Any] = {"layout": layout, "bits": asked.bits, "group": asked.group}
        row |= {"zeros": asked.zeros, "dtype": asked.dtype, "kind": call_of(x, weights[0]).kind}
        row |= {"K": K, "N": N, "M": M, "floor": lowest, "limit": max(lowest, 2 * M * K * N / matmul)}
        ables = able(x, weights[0]) if asked.kernels else ()
        groups = {
            ("fp16",): Group([partial(torch.nn.functional.linear, weight=each) for each in dense], x, w),
            ("us",): Group(ours(weights), x, w),
            ("plain",): Group(ours(weights, early=False), x, w),
            **{("kernels", name): Group(ours(weights, kernel=name), x, w) for name in ables},
            **{("peers", name): peer_group(made, x) for name, made in others.items()},
        }
        row |= {"kernels": {}, "peers": {}}
        for (field, *names), time in timed(groups).items():
            place = row[field] if names else row
            place[names[0] if names else field] = time
        yield row


def timed(groups: dict[tuple[str, ...], Group | str]) -> dict[tuple[str, ...], float | str | None]:
    """Microseconds of a call of each group, in turns; None: its result is wrong; else why it does not run.

    Results are checked before, and once more after the last replay.
    """
    found: dict[tuple[str, ...], float | str | None] = {}
    there: dict[tuple[str, ...], Group] = {}
    for key, group in groups.items():
        found[key] = group if isinstance(group, str) else None
        try:
            if isinstance(group, Group) and right(group.calls[0](group.x), group.x, group.w):
                there[key] = group
        except Exception as refused:
            if key[0] != "peers":
                raise
            found[key] = _first_line(refused)
    try:
        return found | _replayed(there)
    except Exception as refused:
        peers_there = [key for key in there if key[0] == "peers"]
        if not peers_there:
            raise
        found |= dict.fromkeys(peers_there, _first_line(refused))
        return found | _replayed({key: group for key, group in there.items() if key not in peers_there})


def _replayed(there: dict[tuple[str, ...], Group]) -> dict[tuple[str, ...], float | None]:
    calls = [[partial(call, group.x) for call in group.calls] for group in there.values()]
    if any(group.x.shape[0] >= LIMITED for group in there.values()):
        found = sustained(calls)
    else:
        found = replayed(calls, rounds=rounds_of(min(map(len, calls)))) if calls else []
    ended = zip(there.items(), found, strict=True)
    return {key: time if right(y, group.x, group.w) else None for (key, group), (time, y) in ended}


def prepared(peer: peers.Peer, asked: argparse.Namespace, K: int, N: int) -> Any:
    """As many of a peer's layers as are rotated, or why there are none."""
    if not peer.here:
        return "not installed"
    if asked.zeros:
        return "its layers have no zero points here"
    try:
        count = copies(K * N * asked.bits // 8)
        made = [peer.prepare(checkpoint(K, N, asked.bits, asked.group)) for _ in range(count)]
    except Exception as refused:
        return _first_line(refused)
    return peer, [call for call, _ in made], made[0][1]


def peer_group(made: Any, x: Tensor) -> Group | str:
    """A peer's calls, or why there are none."""
    if isinstance(made, str):
        return made
    peer, calls, w = made
    return Group(calls, x.to(peer.dtype), w)


def _first_line(refused: Exception) -> str:
    """Why a peer does not run, whichever way it says so."""
    return (str(refused) or type(refused).__name__).splitlines()[0]


def here() -> dict[str, str]:
    """What was measured on, and with."""
    name, (major, minor) = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    return {
        "chip": name,
        "capability": f"{major}.{minor}",
        "torch": torch.__version__,
        "CUDA": str(torch.version.cuda),
    }


def cells(row: dict[str, Any], names: Sequence[str]) -> list[str]:
    """A row as the table shows it."""
    us, fp16 = row["us"], row["fp16"]
    _, fastest = min(((time, name) for name, time in row["kernels"].items() if time), default=(0, ""))
    shown = [
        row["layout"],
        f"{row['K']} x {row['N']}",
        str(row["M"]),
        f"{row['floor']:.1f}",
        f"{row['limit']:.1f}",
    ]
    shown += [_us(us), f"{us / row['limit']:.2f}" if us else "", _us(row["plain"]), _us(fp16)]
    shown += [f"{fp16 / us:.2f}" if us and fp16 else "", fastest]
    return shown + [_beside(row["peers"].get(name), us) for name in names]


def _beside(time: float | str | None, us: float | None) -> str:
    """A peer's time, and how much longer than ours it is."""
    return _us(time) + (f" ({time / us:.2f}x)" if isinstance(time, float) and us else "")


def _us(time: float | str | None) -> str:
    if isinstance(time, str):
        return "-"
    return "wrong" if time is None else f"{time:.1f}"


def arguments() -> argparse.Namespace:
    """What is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example: nox -s bench_gpu -- --tokens 1 16 64 --json times.json --plot times.png",
    )
    names = [peer.name for peer in peers.PEERS]
    parser.add_argument(
        "--layout", nargs="*", default=["strips", "marlin"], help="what the layers are repacked to"
    )
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--group", type=int, default=128, help="-1: one scale a column")
    parser.add_argument("--zeros", action="store_true", help="random zero points, not all the same")
    parser.add_argument("--dtype", choices=DTYPES, default="float16", help="of x, and of the product beside")
    parser.add_argument("--tokens", type=int, nargs="*", default=TOKENS)
    parser.add_argument("--shapes", nargs="*", default=[], metavar="KxN", help="default: Llama 3 8B and 70B")
    parser.add_argument(
        "--peers", nargs="*", default=names, metavar="NAME|DIR", help=PEERS.format(", ".join(names))
    )
    parser.add_argument("--kernels", action="store_true", help="time every kernel, not only the chosen one")
    parser.add_argument("--json", help="a file for all numbers")
    parser.add_argument("--plot", help="a PNG of the ratio to the limit over M")
    parser.add_argument("--dispatch", action="store_true", help="write the table of kernels")
    asked = parser.parse_args()
    if asked.dispatch and asked.dtype != "float16":
        parser.error("--dispatch: the table is of float16")
    asked.peers = peers_of(asked.peers, names)
    asked.kernels |= asked.dispatch
    asked.shapes = [tuple(map(int, shape.split("x"))) for shape in asked.shapes] or SHAPES
    return asked


def peers_of(asked: Sequence[str], names: Sequence[str]) -> list[str]:
    """Names of peers, all where none is asked for; a folder makes what it holds importable."""
    folders = [each for each in asked if Path(each).is_dir()]
    for each in folders:
        sys.stderr.write(f"peers from {each}: {', '.join(peer_folder.add(Path(each)))}\n")
    others = [each for each in asked if each not in folders]
    unknown = [each for each in others if each not in names]
    if unknown:
        raise ArgumentError("peers", "folders, or " + ", ".join(names), ", ".join(unknown))
    return others if others or not folders else list(names)


def main() -> None:
    """Measure, and put the table on stdout."""
    asked = arguments()
    there = [peer.name for peer in peers.PEERS if peer.here and peer.name in asked.peers]
    table = Table(*COLUMNS, *there, box=None)
    matmul, rows = rate(), []
    sys.stderr.write(f"fp16 product of {SQUARE}: {matmul / 1e6:.0f} TFLOP/s\n")
    for layout, (K, N) in product(asked.layout, asked.shapes):
        for row in measure(asked, layout, K, N, matmul):
            rows.append(row)
            table.add_row(*cells(row, there))
            sys.stderr.write(" ".join(cells(row, there)) + "\n")
        torch.cuda.empty_cache()
    Console(width=24 * len(table.columns)).print(table)
    if asked.json:
        with open(asked.json, "w") as file:
            json.dump({"TFLOP/s": matmul / 1e6, **here(), "rows": rows}, file)
    for step in steps.found(rows):
        sys.stderr.write(step + "\n")
    if asked.plot:
        plot.ratios(rows, asked.plot)
    if asked.dispatch:
        dispatch.write(rows, torch.cuda.get_device_capability())


if __name__ == "__main__":
    main()
