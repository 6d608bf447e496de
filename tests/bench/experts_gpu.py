"""Experts of models beside their floor and fp16: `python -m tests.bench.experts_gpu --help`.

The floor is the time that the codes and scales of the experts that were chosen take to be read, at the rate
of one long read of the same run. fp16 is what torch makes of the same experts in fp16, one after another,
with the rows of each known to the host. Where a folder of peers has vLLM, its experts by Marlin stand
beside, on the same weights. No time is shown for a result that fails its check.

`--formats` names formats of checkpoints (`expert_formats`): their experts are loaded with target "auto", and
multiply inputs that are not quantized, beside peers in bfloat16.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from qload import ExpertFacts, ExpertsWeight, GatedActivation, MemoryStorage, Weights, loader_from_config
from qload.errors import ArgumentError
from qload.kernels.cuda import experts
from qload.kernels.cuda.experts_launches import ExpertMatrix
from qload.kernels.cuda.module import native, stream
from qload.spec import Weight
from tests.bench import peer_folder
from tests.bench.expert_formats import FORMATS, Format, expert_shapes
from tests.bench.expert_peers import TARGETS, MarlinExperts, here
from tests.bench.timing import microseconds, replayed
from tests.gpu.expert_layers import Experts, Tokens, tokens

POOL = 1 << 30  # bytes of the long read
FEW_CALLS, CALLS = 6, 24  # with experts of their own each, of a graph
MOST_TOKENS_OF_FEW = 256
COLUMNS = ("model", "M", "active", "floor", "1.3 x + 8", "us", "x floor", "few", "many", "fp16", "vllm")


@dataclass(frozen=True)
class Model:
    """A layer's sizes: x (M, hidden), `inner` between; layers that are rotated."""

    name: str
    hidden: int
    inner: int
    experts: int
    top: int
    layers: int


MODELS = (
    Model("Mixtral 8x7B", 4096, 14336, 8, 2, 2),
    Model("Qwen3-30B-A3B", 2048, 768, 128, 8, 5),
    Model("DeepSeek V2", 5120, 1536, 160, 6, 2),
    Model("DeepSeek V3", 7168, 2048, 256, 8, 1),
    Model("gpt-oss 20B", 2880, 2880, 32, 4, 4),
)
FACTS = ExpertFacts(GatedActivation("silu"))


def drawn(model: Model, bits: int, group: int) -> Experts:
    """Random experts, made on the device."""
    shapes = ((2 * model.inner, model.hidden), (model.hidden, model.inner))
    return Experts(*(_matrix(model.experts, N, K, bits, group) for N, K in shapes))


def _matrix(E: int, N: int, K: int, bits: int, group: int) -> ExpertMatrix:
    words = torch.randint(-(2**31), 2**31, (E, N // 64, K * bits * 2), dtype=torch.int32, device="cuda")
    rows = K if group == -1 else group
    scales = (torch.rand(E, K // rows, N, device="cuda") * 0.002 + 0.0001) * 16 / 2**bits
    return ExpertMatrix(words, scales.half(), None, None, None, N, K, bits, group)


def read_rate() -> float:
    """Bytes a microsecond of one long read."""
    pool = torch.randint(-(2**31), 2**31, (POOL // 4,), dtype=torch.int32, device="cuda")
    sink = torch.zeros(4, dtype=torch.int32, device="cuda")

    def read() -> None:
        native().read(pool.data_ptr(), POOL, sink.data_ptr(), stream(pool))

    return POOL / microseconds([read, read])


def bytes_of(held: Experts) -> float:
    """Codes and scales of one expert."""
    both = (held.gate_up, held.down)
    return sum(each.weights.nbytes + each.scales.nbytes for each in both) / held.down.experts


def ours(held: Experts, chosen: Tokens, way: str = "") -> Tensor:
    """y (M, hidden)."""
    return experts.multiply(chosen.x, chosen.ids, chosen.weights, held.gate_up, held.down, way=way)


class Dense:
    """The same experts in fp16, and the rows of each."""

    def __init__(self, weight: Callable[[str, int], Weight], chosen: Tokens) -> None:
        self.chosen = chosen
        self.rows = {e: (chosen.ids == e).nonzero().T for e in chosen.ids.unique().tolist()}
        self.both = {
            e: tuple(weight(name, e).dequantize(torch.float16) for name in ("gate_up", "down"))
            for e in self.rows
        }

    def __call__(self, dtype: torch.dtype = torch.float16) -> Tensor:
        x, y = self.chosen.x.to(dtype), torch.zeros_like(self.chosen.x, dtype=dtype)
        for e, (rows, places) in self.rows.items():
            gate_up, down = (each.to(dtype) for each in self.both[e])
            gate, up = torch.nn.functional.linear(x[rows], gate_up).chunk(2, 1)
            out = torch.nn.functional.linear(torch.nn.functional.silu(gate) * up, down)
            y.index_add_(0, rows, out * self.chosen.weights[rows, places, None].to(dtype))
        return y


def right(y: Tensor, dense: Dense) -> bool:
    """Whether a result is as near to fp32's as roundings of weights, between and of y bring it."""
    exact = dense(torch.float32)
    off = (y.float() - exact).norm() / exact.norm()
    return bool(off <= 4 * torch.finfo(y.dtype).eps)


def measure(model: Model, asked: argparse.Namespace, rate: float) -> Iterator[dict[str, Any]]:
    """One row for each number of tokens."""
    layers = [drawn(model, asked.bits, asked.group) for _ in range(model.layers)]
    beside = [MarlinExperts.of_strips(each) for each in layers] if asked.peers and asked.bits == 4 else []
    for M in asked.tokens:
        count = CALLS if M == 1 else FEW_CALLS
        chosen = [
            tokens(M, model.hidden, model.top, model.experts, torch.float16, seed) for seed in range(count)
        ]
        active = mean(each.ids.unique().numel() for each in chosen)
        row: dict[str, Any] = {"model": model.name, "M": M, "active": active, "bits": asked.bits}
        row |= {"floor": active * bytes_of(layers[0]) / rate}
        dense = Dense(layers[0].weight, chosen[0])
        for way in ("", *experts.WAYS):
            if way == "few" and M > MOST_TOKENS_OF_FEW:
                continue
            calls = [partial(ours, layers[i % len(layers)], each, way) for i, each in enumerate(chosen)]
            groups = [calls]
            if beside and not way:  # in turns
                narrow = [replace(each, ids=each.ids.int()) for each in chosen]
                groups.append([partial(beside[i % len(beside)], each) for i, each in enumerate(narrow)])
            for name, (time, y) in zip((way or "us", "vllm"), replayed(groups), strict=False):
                row[name] = time if right(y, dense) else None
        time, y = replayed([[dense] * 2])[0]
        row["fp16"] = time if right(y, dense) else None
        yield row
        del dense
        torch.cuda.empty_cache()


def loaded(
    tensors: dict[str, Tensor], kind: Format, dtype: torch.dtype, target: Literal["auto"] | None = "auto"
) -> ExpertsWeight:
    """Load experts of a format to the device; `target` None: as the checkpoint stores them."""
    loader = loader_from_config(dict(kind.config), target=target)
    weights = Weights(MemoryStorage(tensors), loader=loader, device="cuda", dtype=dtype)
    return weights.get_experts("experts", facts=FACTS)


def measure_format(
    model: Model, name: str, tokens_of: list[int], rate: float, peers: bool = False
) -> Iterator[dict[str, Any]]:
    """One row for each number of tokens, by the module of typed experts; with peers in bfloat16."""
    kind, dtype = FORMATS[name], torch.bfloat16 if peers else torch.float16
    shapes = expert_shapes("experts", model.experts, model.hidden, model.inner)
    stored = [kind.matrices(shapes) for _ in range(model.layers)]
    layers = [loaded(tensors, kind, dtype) for tensors in stored]
    modules = [layer.get_linear(activations="unquantized", dtype=dtype) for layer in layers]
    beside = None
    if peers and name in TARGETS:
        beside = MarlinExperts.of_stored(loaded(stored[0], kind, dtype, None), TARGETS[name])
    nbytes = sum(tensor.nbytes for tensor in layers[0].fields().values()) / model.experts

    def weight(name: str, expert: int) -> Weight:
        made: Weight = getattr(layers[0], name).expert(expert)
        return made

    for M in tokens_of:
        count = CALLS if M == 1 else FEW_CALLS
        chosen = [tokens(M, model.hidden, model.top, model.experts, dtype, seed) for seed in range(count)]
        active = mean(each.ids.unique().numel() for each in chosen)
        row: dict[str, Any] = {"model": model.name, "M": M, "active": active, "floor": active * nbytes / rate}
        calls = [
            partial(modules[i % len(modules)], each.x, each.ids, each.weights)
            for i, each in enumerate(chosen)
        ]
        groups = [calls]
        if beside is not None:  # in turns
            groups.append([partial(beside, replace(each, ids=each.ids.int())) for each in chosen])
        dense = Dense(weight, chosen[0])
        for name_of_row, (time, y) in zip(("us", "vllm"), replayed(groups), strict=False):
            row[name_of_row] = time if right(y, dense) else None
        yield row


def cells(row: dict[str, Any]) -> list[str]:
    """A row as the table shows it."""
    us, floor = row["us"], row["floor"]
    shown = [row["model"], str(row["M"]), f"{row['active']:.1f}", f"{floor:.1f}", f"{1.3 * floor + 8:.1f}"]
    shown += [_us(us), f"{us / floor:.2f}" if us else ""]
    return shown + [_us(row[name]) if name in row else "-" for name in ("few", "many", "fp16", "vllm")]


def _us(time: float | None) -> str:
    return "wrong" if time is None else f"{time:.1f}"


def main() -> None:
    """Measure, and put the table on stdout."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [model.name for model in MODELS]
    parser.add_argument("--models", nargs="*", default=names, choices=names, metavar="NAME")
    parser.add_argument("--tokens", type=int, nargs="*", default=[1, 8, 64])
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--group", type=int, default=128, help="-1: one scale a column")
    parser.add_argument("--formats", nargs="*", default=[], choices=[*FORMATS])
    parser.add_argument("--peers", type=Path, help="a folder of wheels, vLLM's among them, or its library")
    parser.add_argument("--json", help="a file for all numbers")
    asked = parser.parse_args()
    if asked.peers and asked.bits != 4 and not asked.formats:
        parser.error("--peers: vLLM's integers have 4 bits here")
    if asked.peers:
        peer_folder.add(asked.peers)
        if not here():
            raise ArgumentError("peers", "a folder with vLLM's wheel", str(asked.peers))
    table, rows, rate = Table(*COLUMNS, box=None), [], read_rate()
    sys.stderr.write(f"read rate {rate / 1e6:.2f} TB/s\n")
    for model in (each for each in MODELS if each.name in asked.models):
        by_format = [
            (name, measure_format(model, name, asked.tokens, rate, bool(asked.peers)))
            for name in asked.formats
        ]
        for name, found in by_format or [("", measure(model, asked, rate))]:
            for row in found:
                row["model"] = f"{model.name} {name}".rstrip()
                rows.append(row)
                table.add_row(*cells(row))
                sys.stderr.write(" ".join(cells(row)) + "\n")
            torch.cuda.empty_cache()
    Console(width=16 * len(COLUMNS)).print(table)
    if asked.json:
        with open(asked.json, "w") as file:
            json.dump({"read rate": rate / 1e6, "rows": rows}, file)


if __name__ == "__main__":
    main()
