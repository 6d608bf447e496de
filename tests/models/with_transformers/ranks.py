"""What each process of a world does: `torchrun -m tests.models.with_transformers.ranks FOLDER`.

Every folder in FOLDER is a model; its logits go into it, one file a rank.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from qload.models import load_model
from qload.parallel import joined_world
from tests.models.recorded import logits
from tests.models.with_transformers.asked import IDS, UNQUANTIZED

SPLITS: dict[str, Any] = {"tensor": "tensor", "experts": "experts"}


def main(folder: Path) -> None:
    """The logits of all models, experts shared by tensor and by expert."""
    torch.set_num_threads(1)
    with joined_world("cpu", timeout_s=120) as group:
        for path in sorted(each for each in folder.iterdir() if each.is_dir()):
            made = {}
            for name, split in SPLITS.items():
                options = {"process_group": group, "expert_split": split, **UNQUANTIZED}
                model = load_model(path / "stored", dtype=torch.float32, **options)
                made[name] = logits(model, IDS, ranks=group.size())
            save_file(made, path / f"{group.size()}-{group.rank()}.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
