"""Layers like Llama 3 8B's in strips beside fp16: eager, in a graph, compiled; the host's time of a call.

    python -m tests.bench.stack [--tokens 1 16 64 300 1024] [--blocks 32] [--compiled 8] [--peers FOLDER]

Attention is left out: what the norms and the four linears of a block take is what differs. Of `--compiled`
blocks a model is compiled, as a whole, and compared with the graph of as many. All times are medians of turns
in which every way is measured once: one call until the device is done, as after a wait for a token, and calls
one after another, the host ahead of the device as far as it gets. No way is timed whose result is off: of the
layers of a block against float64 products of the dequantized weight, of a stack against one that keeps all
but the linears' inputs and outputs in float32, from which no way may be twice as far as the eager one is.
Where a folder of peers has vLLM, a stack of its Marlin operators stands beside, eager and in a graph.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from tests.bench import peer_folder, peers
from tests.bench.layers import checkpoint, layers
from tests.bench.linear import right

H, QKV, INNER, EPS = 4096, 6144, 14336, 1e-5
SHAPES = ((H, QKV), (H, H), (H, 2 * INNER), (INNER, H))  # K, N
SMALL = 2.0**-8  # of scales of what a block adds
TURNS, CALLS = 21, 200
IN_A_ROW = 8
Call = Callable[[], Tensor]


class Block(nn.Module):
    """Norm, qkv, output, norm, gate and up, down; `wide`: what is between linears is float32, x too."""

    def __init__(self, linears: list[nn.Module], norms: list[Tensor]) -> None:
        super().__init__()
        self.qkv, self.out, self.gate_up, self.down = linears
        self.norms = nn.ParameterList([nn.Parameter(each, requires_grad=False) for each in norms])
        self.wide = False

    def forward(self, x: Tensor) -> Tensor:
        gate = self._between(self.qkv(self._normed(x, 0)))[:, :H]
        x = x + self._between(self.out(self._narrow(nn.functional.silu(gate))))  # in the place of attention
        gate, up = self._between(self.gate_up(self._normed(x, 1))).chunk(2, -1)
        y: Tensor = x + self._between(self.down(self._narrow(nn.functional.silu(gate) * up)))
        return y

    def _normed(self, x: Tensor, i: int) -> Tensor:
        return self._narrow(nn.functional.rms_norm(x, (H,), self._between(self.norms[i]), EPS))

    def _between(self, y: Tensor) -> Tensor:
        return y.float() if self.wide else y

    def _narrow(self, x: Tensor) -> Tensor:
        return x.to(self.norms[0].dtype) if self.wide else x


def plain(K: int, N: int) -> nn.Module:
    """An fp16 layer."""
    made = nn.Linear(K, N, bias=False, device="cuda", dtype=torch.float16)
    return made.requires_grad_(False)


class Operator(nn.Module):
    """A peer's call as a layer; `scale` times those of a checkpoint."""

    def __init__(self, peer: peers.Peer, K: int, N: int, scale: float) -> None:
        super().__init__()
        layer = checkpoint(K, N, 4, 128)
        layer.scales.mul_(scale)
        self.call, self.w = peer.prepare(layer)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.call(x)
        return y


def stacks(blocks: int) -> Iterator[tuple[str, nn.Sequential]]:
    """The same model in fp16 and in strips, and by vLLM's Marlin where it is; each has weights of its own."""
    norms = [torch.rand(H, device="cuda").half() for _ in range(2)]
    yield "fp16", nn.Sequential(*(Block([plain(*each) for each in SHAPES], norms) for _ in range(blocks)))
    made = [[layers("strips", *each, 4, 128, 1)[0].get_linear() for each in SHAPES] for _ in range(blocks)]
    for _, out, _, down in made:  # what a block adds stays small beside what it gets
        for linear in (out, down):
            linear.get_buffer("scales").mul_(SMALL)
    yield "strips", nn.Sequential(*(Block(linears, norms) for linears in made))
    marlin = next(peer for peer in peers.PEERS if peer.name == "marlin")
    if marlin.here:
        scales = 1.0, SMALL, 1.0, SMALL
        sizes = [(*shape, scale) for shape, scale in zip(SHAPES, scales, strict=True)]
        operators = [[Operator(marlin, *each) for each in sizes] for _ in range(blocks)]
        yield "marlin", nn.Sequential(*(Block([*linears], norms) for linears in operators))


def captured(model: Callable[[Tensor], Tensor], x: Tensor) -> Call:
    """A replay of the model on x."""
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        model(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        y = model(x)

    def replay() -> Tensor:
        graph.replay()
        return y

    return replay


def eager(model: nn.Sequential, x: Tensor) -> dict[str, Call]:
    """The model as it is."""
    return {"eager": partial(model, x)}


def compiled(model: nn.Sequential, x: Tensor) -> dict[str, Call]:
    """The model compiled in two modes, and warm."""
    modes = {"compiled": None, "reduced": "reduce-overhead"}
    made: dict[str, Call] = {}
    for name, mode in modes.items():
        made[name] = partial(torch.compile(model, fullgraph=True, dynamic=False, mode=mode), x)
        for _ in range(4):
            made[name]()
    torch.cuda.synchronize()
    return made


def distance(one: Tensor, other: Tensor) -> float:
    """Of two results, as a part of the second."""
    return float((one.double() - other.double()).norm() / other.double().norm())


def checked(name: str, model: nn.Sequential, x: Tensor, made: dict[str, Call]) -> None:
    """SystemExit where a way's result is off."""
    blocks: list[Any] = list(model)
    for block in blocks:
        block.wide = True
    want = model(x.float())
    for block in blocks:
        block.wide = False
    room = distance(model(x), want)
    for way, call in made.items():
        off = distance(call().clone(), want)
        if not off <= 2 * room:
            raise SystemExit(f"{name}, {way}, M = {x.shape[0]}: off by {off:.2e}, the eager one {room:.2e}")


def checked_layers(model: nn.Sequential, M: int) -> None:
    """SystemExit where a layer of the first block is off."""
    block: Any = model[0]
    for linear in (block.qkv, block.out, block.gate_up, block.down):
        w = linear.w if isinstance(linear, Operator) else linear.typed.dequantize(torch.float16)
        x = torch.randn(M, w.shape[1], device="cuda").half()
        if not right(linear(x), x, w):
            raise SystemExit(f"{linear}: a result of {M} tokens is off")


def milliseconds(calls: dict[str, Call], in_a_row: int) -> dict[str, float]:
    """Of one call of each, among so many until the device is done, in turns."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(TURNS):
        for name, call in calls.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(in_a_row):
                call()
            torch.cuda.synchronize()
            found[name].append((time.perf_counter() - start) * 1e3 / in_a_row)
    return {name: median(times) for name, times in found.items()}


def host_microseconds(call: Call) -> float:
    """Of one call, while the device is still busy with those before: what Python and the driver take.

    Few calls at a time, so that the queue of launches never fills.
    """
    found = []
    for _ in range(TURNS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        found.append((time.perf_counter() - start) * 1e6 / CALLS)
        torch.cuda.synchronize()
    return median(found)


def timed(
    models: dict[str, nn.Sequential],
    x: Tensor,
    ways: Callable[[nn.Sequential, Tensor], dict[str, Call]],
    table: Table,
) -> None:
    """A row of the table for each way, and for a graph of the model."""
    torch._dynamo.reset()
    made = {name: ways(model, x) for name, model in models.items()}
    for name, model in models.items():  # last: compiling frees memory of cuBLAS that older graphs use
        made[name]["graph"] = captured(model, x)
        checked(name, model, x, made[name])
    calls = {f"{name} {way}": made[name][way] for name in made for way in made[name]}
    for in_a_row in (1, IN_A_ROW):
        times = milliseconds(calls, in_a_row)
        for way in made["strips"]:
            one, other = times[f"fp16 {way}"], times[f"strips {way}"]
            own = one / times["fp16 graph"], other / times["strips graph"]
            beside = times.get(f"marlin {way}")
            ratios = [f"{ratio:.2f}" for ratio in (other / one, *own)]
            numbers = f"{one:.3f}", f"{other:.3f}", f"{beside:.3f}" if beside else "-", *ratios
            table.add_row(f"{x.shape[0]}", f"{len(models['strips'])}", way, f"{in_a_row}", *numbers)


def hosts(models: dict[str, nn.Sequential], M: int, table: Table) -> None:
    """A row for two layers of a block."""
    x = torch.randn(M, H, device="cuda").half()
    for name, N in (("qkv", QKV), ("gate_up", 2 * INNER)):
        own = (models[each] for each in ("fp16", "strips"))
        one, other = (host_microseconds(partial(getattr(model[0], name), x)) for model in own)
        table.add_row(f"{M}", f"{H} x {N}", f"{one:.1f}", f"{other:.1f}", f"{other / one:.2f}")


def show(tokens: list[int], blocks: int, few: int) -> None:
    """The tables, on standard output."""
    head = "M", "blocks", "way", "in a row", "fp16 ms", "strips ms", "marlin ms", "strips / fp16"
    steps = Table(*head, "fp16 / its graph", "strips / its graph")
    calls = Table("M", "K x N", "nn.Linear us", "strips us", "ratio")
    models = dict(stacks(blocks))
    with torch.no_grad():
        for M in tokens:
            x = torch.randn(M, H, device="cuda").half()
            for name in models.keys() - {"fp16"}:
                checked_layers(models[name], M)
            timed(models, x, eager, steps)
            hosts(models, M, calls)
            if few:
                first = {name: nn.Sequential(*list(models[name])[:few]) for name in ("fp16", "strips")}
                timed(first, x, compiled, steps)
    for table in (steps, calls):
        Console(width=120).print(table)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 64, 300, 1024])
    parser.add_argument("--blocks", type=int, default=32)
    parser.add_argument("--compiled", type=int, default=8)
    parser.add_argument("--peers", type=Path, help="a folder of wheels, vLLM's among them")
    said = parser.parse_args()
    if said.peers:
        peer_folder.add(said.peers)
    show(said.tokens, said.blocks, said.compiled)
