"""What the experts of a layer cost to load, and to check: `python -m tests.bench.experts`.

Of 256 FP8 experts in blocks: peak memory beside the result, and the time of a load beside that of
safetensors' own `load_file` and a copy of the same bytes. Of the headers of 94,428 tensors, named as
DeepSeek V3's are: how long names, headers and cuts of all experts take.
"""

import argparse
import json
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file

from qload import ExpertFacts, FakeWorld, Weights, open_checkpoint
from qload.experts import GatedActivation
from qload.experts.load import plan_experts
from tests.bench import folders
from tests.bench.large import anonymous, peak, seconds

TENSORS = 94_428
FACTS = ExpertFacts(GatedActivation("silu"))
PREFIX = "model.layers.0.mlp.experts"
ROUNDS = 5
MB, MIB = 1e6, 1 << 20


def made(folder: Path, experts: int, inner: int, hidden: int) -> int:
    """Write a layer of FP8 experts, noise in blocks; its bytes."""
    tensors = [
        stored
        for expert in range(experts)
        for name, shape in zip(folders.PROJECTIONS, [(inner, hidden)] * 2 + [(hidden, inner)], strict=True)
        for stored in folders.fp8(f"{PREFIX}.{expert}.{name}", *shape)
    ]
    head, size = folders.header(tensors)
    with (folder / "model.safetensors").open("wb") as stream:
        stream.write(head)
        for start in range(0, size, 1 << 24):
            count = min(1 << 24, size - start)
            stream.write(torch.randint(0, 120, (count,), dtype=torch.uint8).numpy().tobytes())
    (folder / "config.json").write_text(json.dumps({"quantization_config": folders.FP8}))
    return size


def load(folder: Path) -> object:
    """All experts, stacked."""
    with open_checkpoint(folder) as weights:
        return weights.get_experts(PREFIX, facts=FACTS)


def copied(folder: Path) -> object:
    """The same bytes, by safetensors' own load, and a copy of each tensor."""
    return {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}


def loads(folder: Path, size: int) -> Table:
    """Time and memory of a load of all experts."""
    before = anonymous()
    most = peak(lambda: load(folder)) - before
    table = Table("MB", "MiB beside the result", "what", "ms", "ms CPU", title="256 experts")
    for what, work in (("get_experts", load), ("load_file and clone", copied)):
        wall, cpu = seconds(lambda work=work: work(folder), ROUNDS)
        beside = f"{(most - size) / MIB:.1f}" if work is load else ""
        table.add_row(f"{size / MB:.0f}", beside, what, f"{wall * 1e3:.0f}", f"{cpu * 1e3:.0f}")
    return table


def checks(folder: Path) -> Table:
    """Names, headers and cuts of all experts of all layers, for the ranks of several worlds."""
    folder.mkdir()
    count = folders.sparse(folder, folders.experts(TENSORS), 160, folders.FP8)
    table = Table("tensors", "split", "s open", "s check", "s CPU", title="names and cuts")
    for split, ranks in ((None, None), ("experts", None), ("both", 8)):
        opened = time.perf_counter()
        with open_checkpoint(folder, process_group=list(FakeWorld(8))[3]) as weights:
            opened = time.perf_counter() - opened
            start, busy = time.perf_counter(), time.process_time()
            checked = sum(check(weights, layer, split, ranks) for layer in layers(weights))
            wall, cpu = time.perf_counter() - start, time.process_time() - busy
        table.add_row(f"{checked} of {count}", str(split), f"{opened:.2f}", f"{wall:.2f}", f"{cpu:.2f}")
    return table


def layers(weights: Weights) -> list[str]:
    """The prefixes of all layers of which the last expert is there."""
    numbers = range(1000)
    prefixes = [f"model.layers.{number}.mlp.experts" for number in numbers]
    last = f"{folders.EXPERTS - 1}.down_proj.weight_scale_inv"
    return [prefix for prefix in prefixes if weights.has_tensor(f"{prefix}.{last}")]


def check(weights: Weights, prefix: str, split: str | None, ranks: int | None) -> int:
    """Plan the load of a layer's experts; how many tensors they are."""
    plan = plan_experts(weights, prefix, split, ranks)  # type: ignore[arg-type]
    return 2 * len(folders.PROJECTIONS) * plan.names.count


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--inner", type=int, default=512, help="outputs of gate and up")
    parser.add_argument("--hidden", type=int, default=2048, help="inputs of gate and up")
    asked = parser.parse_args()
    console = Console(width=100)
    torch.set_num_threads(1)
    with TemporaryDirectory() as place:
        folder = Path(place) / "experts"
        folder.mkdir()
        console.print(loads(folder, made(folder, asked.experts, asked.inner, asked.hidden)))
        console.print(checks(Path(place) / "headers"))


if __name__ == "__main__":
    main()
