"""Rate of the experts' load beside that of dense layers of the same bytes, both repacked for the device.

    python -m tests.bench.expert_loads [--device cuda] [--formats gptq fp8] [--experts 128] [--rounds 5]

Both folders are in the page cache, the C library keeps freed memory, and the loads take turns: of the rate
the medians, by the clock and by the time that cores worked. `beside` is the most host memory beyond the
result of the experts' load, of which a layer may take as much as its own bytes. Stacks of gpt-oss are
interleaved blocks of MXFP4.
"""

import argparse
import gc
import json
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file
from torch import Tensor

from qload import ExpertFacts, open_checkpoint
from qload.checkpoint import load_layers
from qload.experts import GatedActivation
from tests.bench.cpu_load import give_back, in_turns, keeps_memory
from tests.bench.expert_formats import FORMATS, Format, expert_shapes, noise
from tests.bench.large import anonymous, peak

LAYER = "model.layers.0.mlp"
FACTS = ExpertFacts(GatedActivation("silu"))
ROWS = 8192  # of a dense layer
STACKS = "gpt-oss"
COLUMNS = ("format", "MB", "experts GB/s", "dense GB/s", "ratio", "ratio of cores", "MB beside")


def write(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> int:
    """Write a checkpoint of one file; its bytes."""
    folder.mkdir(parents=True)
    own = {name: tensor.clone() for name, tensor in tensors.items()}  # some may share memory
    save_file(own, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return sum(tensor.nbytes for tensor in tensors.values())


def write_experts(folder: Path, kind: Format, experts: int, hidden: int, inner: int) -> int:
    """Write the experts of a layer, each matrix by its own name."""
    tensors = kind.matrices(expert_shapes(f"{LAYER}.experts", experts, hidden, inner))
    return write(folder, tensors, {"quantization_config": dict(kind.config)})


def write_stacks(folder: Path, experts: int, hidden: int, inner: int) -> int:
    """Write the experts of a layer as gpt-oss stacks them."""
    tensors = {}
    for name, N, K in (("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner)):
        blocks = noise((experts * N, K // 2), "cpu")
        tensors[f"{LAYER}.experts.{name}_blocks"] = blocks.view(experts, N, K // 32, 16)
        scales = torch.randint(118, 124, (experts, N, K // 32), dtype=torch.uint8)
        tensors[f"{LAYER}.experts.{name}_scales"] = scales
        tensors[f"{LAYER}.experts.{name}_bias"] = torch.randn(experts, N).bfloat16()
    sizes = {"num_local_experts": experts, "hidden_size": hidden, "intermediate_size": inner}
    config = {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}, **sizes}
    return write(folder, tensors, config)


def write_dense(folder: Path, kind: Format, elements: int, K: int) -> int:
    """Write layers of (8192, K), as many as have so many elements."""
    count = -(-elements // (ROWS * K))
    tensors = kind.matrices({f"model.layers.{n}.mlp.up_proj": (ROWS, K) for n in range(count)})
    return write(folder, tensors, {"quantization_config": dict(kind.config)})


def load_experts(folder: Path, device: str) -> Any:
    """All experts, stacked and repacked."""
    with open_checkpoint(folder, target="auto", device=device) as weights:
        experts = weights.get_experts(f"{LAYER}.experts", facts=FACTS)
    if device == "cuda":
        torch.cuda.synchronize()
    return experts


def load_dense(folder: Path, device: str) -> Any:
    """All layers, repacked."""
    with open_checkpoint(folder, target="auto", device=device) as weights:
        layers = list(load_layers(weights))
    if device == "cuda":
        torch.cuda.synchronize()
    return layers


def measure(name: str, asked: argparse.Namespace, folder: Path) -> tuple[str, ...]:
    """Return a row of the table."""
    kind = FORMATS["mxfp4" if name == STACKS else name]
    sizes = asked.experts, asked.hidden, asked.inner
    experts, dense = folder / "experts", folder / "dense"
    size = write_stacks(experts, *sizes) if name == STACKS else write_experts(experts, kind, *sizes)
    elements = 3 * asked.experts * asked.hidden * asked.inner
    size_of_dense = write_dense(dense, kind, elements, asked.hidden)
    load_experts(experts, asked.device)  # imports, and buffers of the reader
    gc.collect()
    give_back()
    before, loaded = anonymous(), list[Any]()
    most = peak(lambda: loaded.append(load_experts(experts, asked.device))) - before
    fields = loaded.pop().fields().values()
    result = sum(each.nbytes for each in fields if each.device.type == "cpu")
    del fields
    ways = {
        "experts": lambda turn: load_experts(experts, asked.device),
        "dense": lambda turn: load_dense(dense, asked.device),
    }
    found = in_turns(ways, asked.rounds)
    rates = {
        way: [nbytes / median(each) / 1e9 for each in zip(*found[way], strict=True)]
        for way, nbytes in (("experts", size), ("dense", size_of_dense))
    }
    ratios = [own / other for own, other in zip(rates["experts"], rates["dense"], strict=True)]
    numbers = rates["experts"][0], rates["dense"][0], *ratios
    cells = [f"{number:.2f}" for number in numbers]
    return name, f"{size / 1e6:.0f}", *cells, f"{(most - result) / 1e6:.0f}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [*FORMATS, STACKS]
    parser.add_argument("--formats", nargs="+", default=names, choices=names)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--inner", type=int, default=768)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    keeps_memory()
    table = Table(*COLUMNS, title=f"{asked.experts} experts ({asked.hidden}, {asked.inner}), {asked.device}")
    for name in asked.formats:
        with TemporaryDirectory() as place:
            table.add_row(*measure(name, asked, Path(place)))
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
