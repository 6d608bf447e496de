"""What each process of a world does: `torchrun -m tests.engines.transformers.ranks FOLDER [--stop]`.

Every folder in FOLDER is a checkpoint. Its logits go into it, one file a rank; or the words of what refused
it, how long that took, and which weights were read by then, with which the process ends if it is to stop.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import core_model_loading

from qload.engines import transformers as engine
from qload.errors import CutError, DivideError
from qload.storage import SafetensorsStorage
from tests.engines.transformers.models import EAGER, greedy, logits

FACTS = ("g_idx", "quant_state.bitsandbytes__nf4")  # which every rank reads before it reads a weight


def watched() -> list[str]:
    """From now on the names of all tensors that are read, by qload or by transformers; not those of facts."""
    read: list[str] = []
    own, theirs = SafetensorsStorage.read, core_model_loading._materialize_copy

    def note(storage: SafetensorsStorage, name: str, *index: Any) -> torch.Tensor:
        if not name.endswith(FACTS):
            read.append(name)
        return own(storage, name, *index)

    def note_theirs(tensor: Any, *options: Any) -> Any:
        read.append("of transformers")
        return theirs(tensor, *options)

    SafetensorsStorage.read = note  # type: ignore[method-assign]
    core_model_loading._materialize_copy = note_theirs
    return read


def main(folder: Path, *, stop: bool) -> None:
    """The logits of all models, and the first tokens that follow."""
    torch.set_num_threads(1)
    read = watched()
    rank, ranks = os.environ["RANK"], os.environ["WORLD_SIZE"]
    for path in sorted(each for each in folder.iterdir() if each.is_dir()):
        options = {"dtype": torch.float32, "activations": "unquantized", "tp_plan": "auto", **EAGER}
        read.clear()
        begun = time.monotonic()
        try:
            model = engine.load(path / "stored", **options)
        except (CutError, DivideError) as error:
            said = {"error": str(error), "seconds": time.monotonic() - begun, "read": read}
            (path / f"{ranks}-{rank}.json").write_text(json.dumps(said))
            if stop:
                raise
            continue
        assert len(set(read)) > 1
        made = {"logits": logits(model), "tokens": greedy(model)}
        save_file(
            {name: each.contiguous() for name, each in made.items()}, path / f"{ranks}-{rank}.safetensors"
        )
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), stop="--stop" in sys.argv)
    os._exit(0)  # transformers keeps groups of torch, whose threads can abort an interpreter that ends
