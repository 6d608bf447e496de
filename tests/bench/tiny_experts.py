"""Time of `get_experts` for many tiny experts, and by hand: `python -m tests.bench.tiny_experts`.

By hand: safetensors reads each tensor, and torch stacks them by field, gate and up joined along the outputs.
Both read an open file from the page cache. The result of both is compared first. The goal is a ratio of 2.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from qload import ExpertFacts, ExpertsWeight, open_checkpoint
from qload.experts import GatedActivation

PREFIX = "model.layers.0.mlp.experts"
MATRICES = ("gate_proj", "up_proj", "down_proj")
FACTS = ExpertFacts(GatedActivation("silu"))
GROUP, BLOCK = 32, 32  # inputs of a group; sides of a block
OUTPUTS = {"weight": 0, "weight_scale_inv": 0, "qweight": 1, "qzeros": 1, "scales": 1}  # axis of the join
FIELDS = {"weight_scale_inv": "weight_scale"}  # suffix -> field of the typed weight
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False}
FP8 = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}


def plain(N: int, K: int) -> dict[str, Tensor]:
    """A plain matrix."""
    return {"weight": torch.randn(N, K).bfloat16()}


def fp8(N: int, K: int) -> dict[str, Tensor]:
    """An FP8 matrix in blocks."""
    scales = torch.rand(N // BLOCK, K // BLOCK) + 0.5
    return {"weight": torch.randn(N, K).to(torch.float8_e4m3fn), "weight_scale_inv": scales}


def gptq(N: int, K: int, middle: bool = False) -> dict[str, Tensor]:
    """A GPTQ matrix of 4 bits; `middle`: all zero points in the middle of the codes."""
    words, zeros = _words(K // 8, N), _words(K // GROUP, N // 8)
    return {
        "qweight": words,
        "qzeros": torch.full_like(zeros, 0x77777777) if middle else zeros & 0x77777777,
        "scales": torch.rand(K // GROUP, N).half() + 0.5,
        "g_idx": (torch.arange(K) // GROUP).int(),
    }


def _words(*shape: int) -> Tensor:
    return torch.randint(-(2**31), 2**31, shape).int()


FORMATS: dict[str, tuple[Callable[[int, int], dict[str, Tensor]], dict[str, Any] | None]] = {
    "plain": (plain, None),
    "fp8, blocks": (fp8, FP8),
    "gptq, sym": (lambda N, K: gptq(N, K, middle=True), GPTQ | {"sym": True}),
    "gptq": (gptq, GPTQ | {"sym": False}),
}


def write(folder: Path, name: str, experts: int, hidden: int, inner: int) -> None:
    """Write a layer of experts in a format."""
    matrix, section = FORMATS[name]
    shapes = ((inner, hidden), (inner, hidden), (hidden, inner))
    tensors = {
        f"{PREFIX}.{expert}.{own}.{field}": tensor
        for expert in range(experts)
        for own, shape in zip(MATRICES, shapes, strict=True)
        for field, tensor in matrix(*shape).items()
    }
    save_file(tensors, folder / "model.safetensors")
    config = {} if section is None else {"quantization_config": section}
    (folder / "config.json").write_text(json.dumps(config))


def stack(opened: Any, experts: int) -> Iterator[tuple[str, Tensor]]:
    """Read and stack by hand: field of a stack, and its tensor."""
    first = f"{PREFIX}.0.{MATRICES[0]}."
    names: Sequence[str] = opened.keys()
    for field in [name.removeprefix(first) for name in names if name.startswith(first)]:
        parts = []
        for matrix in MATRICES:
            each = [opened.get_tensor(f"{PREFIX}.{expert}.{matrix}.{field}") for expert in range(experts)]
            parts.append(torch.stack(each))
        joined, own = OUTPUTS.get(field), FIELDS.get(field, field)
        yield f"gate_up.{own}", parts[0] if joined is None else torch.cat(parts[:2], joined + 1)
        yield f"down.{own}", parts[2]


def check(loaded: ExpertsWeight, by_hand: dict[str, Tensor]) -> None:
    """Compare both results bit by bit."""
    for name, tensor in loaded.fields().items():
        assert torch.equal(tensor.view(torch.uint8), by_hand[name].contiguous().view(torch.uint8)), name


def milliseconds(work: Callable[[], object], rounds: int) -> tuple[float, float]:
    """Median of several rounds: of the clock, and of this process' CPU."""
    walls, cpus = [], []
    for _ in range(rounds):
        wall, cpu = time.perf_counter(), time.process_time()
        work()
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    return 1e3 * median(walls), 1e3 * median(cpus)


def main() -> None:
    """Print a table with a row for each format."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=64, help="inputs of gate and up")
    parser.add_argument("--inner", type=int, default=96, help="outputs of gate and up")
    parser.add_argument("--rounds", type=int, default=15)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    table = Table("format", "tensors", "ms", "ms CPU", "ms by hand", "ms CPU by hand", "ratio")
    for name in FORMATS:
        with TemporaryDirectory() as place:
            write(Path(place), name, asked.experts, asked.hidden, asked.inner)
            with (
                open_checkpoint(place) as weights,
                safe_open(Path(place) / "model.safetensors", "pt") as opened,
            ):
                check(weights.get_experts(PREFIX, facts=FACTS), dict(stack(opened, asked.experts)))
                load = milliseconds(lambda w=weights: w.get_experts(PREFIX, facts=FACTS), asked.rounds)
                hand = milliseconds(lambda o=opened: dict(stack(o, asked.experts)), asked.rounds)
                count = len(weights.storage.keys())
        row = (f"{value:.1f}" for value in (*load, *hand))
        table.add_row(name, str(count), *row, f"{load[0] / hand[0]:.2f}")
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
