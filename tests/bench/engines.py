"""How long a model takes to load through transformers, beside its layers alone, and the memory of the host.

    nox -s bench -- engines                     of a random AWQ Llama, made for the occasion
    python -m tests.bench.engines FOLDER        of a checkpoint

Each load is a process of its own, as memory is a process', and its imports are no part of it. The files were
read before, so that no disk counts. In turns, of each way the median. `s CPU` is what the process computed,
whatever else the machine did; exit code 1 where that is more than 1.5 times as much through transformers.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

from tests.bench import folders
from tests.bench.large import anonymous, peak

ALLOWED = 1.5  # of what the layers alone take
WIDTH, INNER, HEADS, VOCABULARY = 2048, 5632, 32, 4000
ENDS = "model-ends.safetensors"
TIMES = tuple[float, float, int]  # on the wall, of computing, and bytes that the process grew by at most


def layers(folder: Path) -> Callable[[], object]:
    """Ready to open the checkpoint, and to get the typed weights of all layers."""
    from qload import open_checkpoint
    from qload.checkpoint import LayerIndex

    def load() -> object:
        with open_checkpoint(folder, target="auto") as weights:
            return [weights.get_weights(prefix) for prefix in LayerIndex(weights).found]

    return load


def transformers(folder: Path) -> Callable[[], object]:
    """Ready to make the model, whose class transformers imports when it is asked for."""
    import accelerate  # noqa: F401
    from transformers import AutoConfig

    from qload.engines.transformers.loading import class_of, load

    class_of(AutoConfig.from_pretrained(folder))
    return lambda: load(folder)


WAYS: dict[str, Callable[[Path], Callable[[], object]]] = {
    "open_checkpoint, get_weights": layers,
    "transformers": transformers,
}


def llama(folder: Path, blocks: int) -> None:
    """Write a random Llama in AWQ, its embedding and its head in fp16."""
    size = folders.noise(folder, blocks, width=WIDTH, inner=INNER)
    matrix = torch.rand(VOCABULARY, WIDTH).half()
    ends = {"model.embed_tokens.weight": matrix, "lm_head.weight": matrix.clone()}
    save_file({**ends, "model.norm.weight": torch.ones(WIDTH).half()}, folder / ENDS, {"format": "pt"})
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"] |= dict.fromkeys((*ends, "model.norm.weight"), ENDS)
    index["metadata"] = {"total_size": size}  # which transformers looks up
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = json.loads((folder / "config.json").read_text()) | {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "float16",
        "hidden_size": WIDTH, "intermediate_size": INNER, "vocab_size": VOCABULARY,
        "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "tie_word_embeddings": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


def measure(way: str, folder: Path) -> None:
    """Print what one load of this process takes, as JSON."""
    load = WAYS[way](folder)
    before, wall, cpu = anonymous(), time.perf_counter(), time.process_time()
    most = peak(load)
    print(json.dumps((time.perf_counter() - wall, time.process_time() - cpu, most - before)))


def measured(way: str, folder: Path) -> TIMES:
    """The same of a process of its own."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.bench.engines", str(folder), "--way", way]
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}  # threads that wait for each other compute too
    printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=alone).stdout
    wall, cpu, grown = json.loads(printed.splitlines()[-1])
    return wall, cpu, grown


def compare(folder: Path, runs: int) -> float:
    """Print a table; how many times as much transformers computes."""
    stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    for way in WAYS:
        measured(way, folder)  # which reads the files, and counts for nothing
    found: dict[str, list[TIMES]] = {way: [] for way in WAYS}
    for _ in range(runs):
        for way, times in found.items():
            times.append(measured(way, folder))
    table = Table("load", "s", "of the first", "s CPU", "of the first", "peak, of the bytes stored")
    table.title = f"{stored / (1 << 20):.0f} MiB"
    middles = [
        (median(each[0] for each in times), median(each[1] for each in times)) for times in found.values()
    ]
    for (way, times), (wall, cpu) in zip(found.items(), middles, strict=True):
        shares = wall / middles[0][0], cpu / middles[0][1]
        grown = max(each[2] for each in times) / stored
        row = f"{wall:.2f}", f"{shares[0]:.2f}", f"{cpu:.2f}", f"{shares[1]:.2f}", f"{grown:.2f}"
        table.add_row(way, *row)
    Console(width=120).print(table)
    return middles[1][1] / middles[0][1]


def main() -> int:
    """1 where transformers takes more than is allowed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--blocks", type=int, default=40, help="of the random model, 26 MB each")
    asked = parser.parse_args()
    if asked.way:
        measure(asked.way, asked.folder)
        return 0
    with TemporaryDirectory() as place:
        folder = asked.folder
        if folder is None:
            folder = Path(place) / "llama"
            folder.mkdir()
            llama(folder, asked.blocks)
        return int(compare(folder, asked.runs) > ALLOWED)


if __name__ == "__main__":
    sys.exit(main())
