"""What each process of a world does: `torchrun -m tests.engines.transformers.ranks FOLDER`.

Every folder in FOLDER is a checkpoint. Its logits, or the words of what refused it and how long that took,
go into it, one file a rank.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from qload.engines import transformers as engine
from qload.errors import CutError, DivideError
from tests.engines.transformers.models import EAGER, greedy, logits


def main(folder: Path) -> None:
    """The logits of all models, and the first tokens that follow."""
    torch.set_num_threads(1)
    rank, ranks = os.environ["RANK"], os.environ["WORLD_SIZE"]
    for path in sorted(each for each in folder.iterdir() if each.is_dir()):
        options = {"dtype": torch.float32, "activations": "unquantized", "tp_plan": "auto", **EAGER}
        begun = time.monotonic()
        try:
            model = engine.load(path / "stored", **options)
        except (CutError, DivideError) as error:
            said = {"error": str(error), "seconds": time.monotonic() - begun}
            (path / f"{ranks}-{rank}.json").write_text(json.dumps(said))
            continue
        made = {"logits": logits(model), "tokens": greedy(model)}
        save_file(
            {name: each.contiguous() for name, each in made.items()}, path / f"{ranks}-{rank}.safetensors"
        )
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
