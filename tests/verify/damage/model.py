"""A whole model in memory: what its tensors are for, by their names, in every format that has models."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

# What holds a layer's codes -> what may scale them.
SCALES = {
    ".qweight": (".scales",),
    ".B": (".s",),
    ".q_weight": (".q_scale_max",),
    ".weight_packed": (".weight_scale",),
    "_blocks": ("_scales",),
    ".weight": (".weight_scale_inv", ".weight_scale", ".weight.absmax", ".SCB", ".weight_scales"),
}
ZEROS = {".qweight": ".qzeros", ".weight_packed": ".weight_zero_point"}


class DoesNotApplyError(Exception):
    """The model has nothing that this damage could be done to; the reason is its text."""


@dataclass
class Model:
    """Tensors by name, and the config."""

    tensors: dict[str, Tensor]
    config: dict[str, Any]

    @classmethod
    def read(cls, folder: Path) -> "Model":
        """A folder of safetensors; what only proves it, as expected values, is no part of it."""
        tensors: dict[str, Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            if file.name != "EXPECTED.safetensors":
                tensors |= load_file(file)
        return cls(tensors, json.loads((folder / "config.json").read_text()))

    def write(self, folder: Path) -> Path:
        """The same as a folder of one file."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: tensor.clone().contiguous() for name, tensor in self.tensors.items()}
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(self.config))
        return folder

    @property
    def quantization(self) -> dict[str, Any]:
        """What the config says of it, or nothing."""
        return self.config.get("quantization_config") or {}

    def codes(self) -> list[str]:
        """Every tensor of codes."""
        return [name for name in self.tensors if self._scales(name) is not None]

    def target(self, projection: str = "", least: int = 0) -> str:
        """The codes of the last layer that has this projection, with so many bytes."""
        found = [name for name in self.codes() if projection in name and self.tensors[name].nbytes >= least]
        if not found:
            raise DoesNotApplyError(f"no codes of {projection or 'any projection'} with {least} bytes")
        return max(found, key=lambda name: (self.tensors[name].nbytes, name))

    def scales(self, codes: str) -> str:
        """What scales these codes."""
        found = self._scales(codes)
        assert found is not None
        return found

    def beside(self, codes: str, field: str) -> str:
        """Another tensor of the same layer."""
        for end in SCALES:
            name = codes.removesuffix(end) + field
            if codes.endswith(end) and name in self.tensors:
                return name
        raise DoesNotApplyError(f"no {field}")

    def zeros(self, codes: str) -> str:
        """The zero points of these codes."""
        end = next(end for end in SCALES if codes.endswith(end))
        if end not in ZEROS:
            raise DoesNotApplyError("no zero points")
        return self.beside(codes, ZEROS[end])

    def like(self, codes: str) -> Iterator[str]:
        """The codes of the same projection in other layers."""
        end = ".".join(codes.split(".")[3:])
        return (name for name in self.codes() if name != codes and name.split(".")[3:] == end.split("."))

    def embedding(self) -> str:
        """The input embedding."""
        return self._one("embed_tokens.weight")

    def head(self) -> str:
        """The output embedding."""
        return self._one("lm_head.weight")

    def _one(self, end: str) -> str:
        found = [name for name in self.tensors if name.endswith(end)]
        if not found or not self.tensors[found[0]].is_floating_point():
            raise DoesNotApplyError(f"no plain {end}")
        return found[0]

    def _scales(self, codes: str) -> str | None:
        plain = self.tensors[codes].dtype in (torch.float32, torch.float16, torch.bfloat16)
        for end, fields in SCALES.items():
            if codes.endswith(end):
                names = (codes.removesuffix(end) + field for field in fields)
                name = next((name for name in names if name in self.tensors), None)
                unused = plain and name is not None and name.endswith("weight_scale_inv")  # by FP8 alone
                return None if unused else name
        return None


def bytes_of(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, in one row; what is written to them is written to it."""
    return tensor.view(-1).view(torch.uint8) if tensor.ndim else tensor.reshape(1).view(torch.uint8)
