"""Checkpoints with tensors of no known format, for tests of unread tensors.

Once a format reads `stacks` or `layer`, another unreadable form replaces it in this module.
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
    """A folder, its unread tensors, and prefixes for requests of them.

    `model`: the folder is a complete model for inference programs. `reason`: a part of the reason.
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
    """Return stacks of FP8 experts with a fourth axis of three parts, and scales under an unknown name."""
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
    """Write a model of a type with a table in qload; the experts of its one sparse layer are `stacks`."""
    make_checkpoint("fp8-block", folder, model="qwen3_moe")
    unread = stacks(seed=seed)
    file = folder / "model.safetensors"
    tensors = {name: each for name, each in load_file(file).items() if not name.startswith(f"{EXPERTS}.")}
    save_file({**tensors, **unread}, file, {"format": "pt"})
    prefixes = (EXPERTS, f"{EXPERTS}.gate_up_proj", f"{EXPERTS}.0.gate_proj")
    return UnreadCheckpoint(folder, unread, prefixes, True, "experts in one tensor")


def unknown_type(folder: Path, seed: int = 0) -> UnreadCheckpoint:
    """Write the same model under a type without a table."""
    made = known_type(folder, seed)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "of_no_table"}))
    return UnreadCheckpoint(folder, made.unread, made.prefixes, False, made.reason)


def unknown_fields(folder: Path, seed: int = 0) -> UnreadCheckpoint:
    """Write a model of a known type; its experts are stacks of bitsandbytes, without a known layout."""
    make_checkpoint("plain", folder, model="qwen3_moe")
    chance = torch.Generator().manual_seed(seed)
    unread = {}
    for name in ("gate_proj", "up_proj", "down_proj"):
        codes = torch.randint(-128, 128, (COUNT, 64, 128), generator=chance)
        unread[f"{EXPERTS}.{name}.weight"] = codes.to(torch.int8)
        unread[f"{EXPERTS}.{name}.SCB"] = torch.rand(COUNT, 64, generator=chance)
    file = folder / "model.safetensors"
    tensors = {name: each for name, each in load_file(file).items() if not name.startswith(f"{EXPERTS}.")}
    save_file({**tensors, **unread}, file, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    method = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": method}))
    return UnreadCheckpoint(folder, unread, (EXPERTS, f"{EXPERTS}.down_proj"), False, "several layers")


def layer(folder: Path, seed: int = 0) -> UnreadCheckpoint:
    """Write a layer of bitsandbytes in the order of a removed kernel, and a plain norm."""
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
    "stacks of unknown fields": unknown_fields,
    "a layer": layer,
}
