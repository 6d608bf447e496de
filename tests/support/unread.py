"""Checkpoints with tensors that no format reads, for the tests of what is done with such ones.

Should the form of `stacks`, or the order of `layer`, be read one day, another one is put in its place here.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from qload.testing import make_checkpoint
from tests.paths import FIXTURES

EXPERTS = "model.layers.1.mlp.experts"
COUNT = 4
LAYER = "model.layers.0.self_attn.v_proj"


@dataclass(frozen=True)
class UnreadCheckpoint:
    """A folder, the tensors in it that are not read, and the prefixes under which they might be asked for.

    `model`: whether a program that runs models finds one in it. `reason`: a part of the reason.
    """

    folder: Path
    unread: dict[str, Tensor]
    prefixes: tuple[str, ...]
    model: bool
    reason: str

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.unread.values())


def stacks(lead: str = EXPERTS, seed: int = 0) -> dict[str, Tensor]:
    """Stacks of FP8 experts in a fourth axis of thirds, beside scales under a name of nobody's."""
    chance = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=chance).to(torch.float8_e4m3fn)

    return {
        f"{lead}.gate_up_proj": drawn(COUNT, 3, 32, 64),
        f"{lead}.gate_up_proj_scale_rate": torch.rand(COUNT, 3, generator=chance),
        f"{lead}.down_proj": drawn(COUNT, 3, 64, 32),
        f"{lead}.down_proj_scale_rate": torch.rand(COUNT, 3, generator=chance),
    }


def known_type(folder: Path, seed: int = 0) -> UnreadCheckpoint:
    """A whole model of a type that qload knows, the experts of whose one sparse layer are `stacks`."""
    make_checkpoint("fp8-block", folder, model="qwen3_moe")
    unread = stacks(seed=seed)
    file = folder / "model.safetensors"
    tensors = {name: each for name, each in load_file(file).items() if not name.startswith(f"{EXPERTS}.")}
    save_file({**tensors, **unread}, file, {"format": "pt"})
    prefixes = (EXPERTS, f"{EXPERTS}.gate_up_proj", f"{EXPERTS}.0.gate_proj")
    return UnreadCheckpoint(folder, unread, prefixes, True, "experts in one tensor")


def unknown_type(folder: Path, seed: int = 0) -> UnreadCheckpoint:
    """The same of a type that there is no table of."""
    made = known_type(folder, seed)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "of_no_table"}))
    return UnreadCheckpoint(folder, made.unread, made.prefixes, False, made.reason)


def layer(folder: Path, seed: int = 0) -> UnreadCheckpoint:
    """A layer of bitsandbytes in the order of a kernel that is no more, and a plain norm."""
    source = FIXTURES / "bnb" / "int8_16x128"
    tensors = load_file(source / "model.safetensors")
    tensors[f"{LAYER}.weight_format"] = torch.tensor(1, dtype=torch.uint8)
    tensors[f"{LAYER}.weight"] = tensors[f"{LAYER}.weight"].roll(seed, 0)
    folder.mkdir()
    save_file({**tensors, "model.norm.weight": torch.ones(8)}, folder / "model.safetensors")
    (folder / "config.json").write_text((source / "config.json").read_text())
    return UnreadCheckpoint(folder, tensors, (LAYER,), False, "bnb_int8 in the order col32")


KINDS: dict[str, Callable[..., UnreadCheckpoint]] = {
    "stacks of a known type": known_type,
    "stacks of an unknown type": unknown_type,
    "a layer": layer,
}
