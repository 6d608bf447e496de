"""One process of a world, as tests launch it: python -m tests.parallel.rank WORK FOLDER.

What a rank finds it writes into the folder, under its number.
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qload import (
    Heads,
    MemoryStorage,
    ProcessGroup,
    QloadError,
    Weights,
    agree,
    collectives_of,
    joined_world,
    loader_from_config,
    open_checkpoint,
)
from qload.methods import (
    MergedColumnParallelLinear,
    ParallelLMHead,
    QKVParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from qload.parallel.launcher import WAKE_SIGNAL
from tests.methods.loaded_layers import bias_of
from tests.methods.test_loaded_layers import GPTQ, count, gptq


def tensors() -> dict[str, Tensor]:
    """A small model: quantized queries, keys and values and the way down, all else plain."""
    return {
        "embed.weight": count(67, 128),
        **gptq("q", N=64, seed=1),
        **gptq("k", N=32, seed=2),
        **gptq("v", N=32, seed=3),
        "q.bias": bias_of(64),
        "o.weight": count(128, 64),
        "o.bias": bias_of(128),
        "gate.weight": count(32, 128),
        "up.weight": count(32, 128) + 1,
        **gptq("down", N=64, K=128, act_order=True),
        "down.bias": bias_of(64),
        "head.weight": count(67, 128),
    }


def outputs(group: ProcessGroup) -> dict[str, Tensor]:
    """What the layers of that model make, whole, each of inputs of its own."""
    weights = Weights(MemoryStorage(tensors()), loader=loader_from_config(GPTQ), process_group=group)
    ranks, rank, world = collectives_of(group), group.rank(), group.size()
    x, heads = count(3, 128), Heads(8, 4)
    attention = QKVParallelLinear.load(weights, ["q", "k", "v"], heads, head_size=8)
    gate_up = MergedColumnParallelLinear.load(weights, ["gate", "up"])
    queries = attention(x)[:, : 64 // world]
    embedding = VocabParallelEmbedding.load(weights, "embed")
    return {
        "embedded": embedding(torch.arange(67)),
        "queries": ranks.gathered(queries),
        "attended": RowParallelLinear.load(weights, "o")(count(3, 64).chunk(world, -1)[rank]),
        "gates": ranks.gathered(gate_up(x).chunk(2, -1)[0]),
        "down": RowParallelLinear.load(weights, "down")(x.chunk(world, -1)[rank]),
        "logits": ParallelLMHead.load(weights, "head", vocab=65)(x),
        "tied": ParallelLMHead.load(weights, "none", vocab=67, tied_to=embedding)(x),
        "largest": ranks.maximum(torch.tensor([rank, -rank])),
        "first": ranks.first(torch.tensor([rank + 5])),
        "bfloat16": ranks.summed(torch.full((3,), rank + 1.0, dtype=torch.bfloat16)),
    }


def stuck(group: ProcessGroup, folder: Path) -> None:
    """One rank is killed while the others are where no signal reaches them, as in native code."""
    if group.rank() == int(os.environ["VICTIM"]):
        load(group, folder)
    signal.pthread_sigmask(signal.SIG_BLOCK, {WAKE_SIGNAL})
    time.sleep(600)


def save(group: ProcessGroup, folder: Path) -> None:
    """What the layers make, for who compares it."""
    torch.save(outputs(group), folder / f"{group.rank()}.pt")


def refuse(group: ProcessGroup, folder: Path) -> None:
    """Each rank opens a folder of its own; that of rank 1 has no files."""
    found = None
    try:
        with open_checkpoint(folder / f"model-{group.rank()}", process_group=group):
            pass
    except QloadError as error:
        found = error
    agree(group, found)
    load(group, folder)


def cut(group: ProcessGroup, folder: Path) -> None:
    """A cut that no rank can make."""
    weights = Weights(MemoryStorage(tensors()), loader=loader_from_config(GPTQ), process_group=group)
    MergedColumnParallelLinear.load(weights, ["embed", "head"])


def load(group: ProcessGroup, folder: Path) -> None:
    """A long load, in which one rank is killed."""
    (folder / f"reads-{group.rank()}").touch()
    victim = int(os.environ["VICTIM"])
    for turn in range(10_000):
        if group.rank() == victim and turn == 3:
            (folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.1)
        Weights(MemoryStorage(tensors()), loader=loader_from_config(GPTQ)).get_weights("down")


def wait(group: ProcessGroup, folder: Path) -> None:
    """One rank is killed while the others wait for it."""
    if group.rank() == int(os.environ["VICTIM"]):
        load(group, folder)
    collectives_of(group).summed(torch.ones(3))


def main(work: str, folder: Path) -> None:
    """Do the work in the world that this process was launched into."""
    works: dict[str, Any] = {
        "refuse": refuse,
        "cut": cut,
        "load": load,
        "wait": wait,
        "stuck": stuck,
        "outputs": save,
    }
    try:
        with joined_world(timeout_s=120) as group:
            works[work](group, folder)
    except BaseException as error:
        (folder / f"{os.environ['RANK']}.txt").write_text(f"{type(error).__name__}: {error}")
        raise


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
