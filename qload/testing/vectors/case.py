"""A case before it is written: its files as bytes, and what it means."""

import json
from dataclasses import dataclass, field
from typing import Any, Literal

from safetensors.torch import save
from torch import Tensor

LAYER = "layer"


@dataclass(frozen=True)
class Content:
    """One case.

    Attributes
    ----------
    id, format, flags, comment
        As in the manifest.
    config
        Of `config.json`, under `quantization_config`.
    tensors
        By name after the layer's.
    shape
        (N, K).
    expected
        (N, K) float32; None: the case has to be refused.
    split, world
        Along which axis how many ranks share it.
    raw
        Files that replace those that `config` and `tensors` make, or lie beside them.
    disputed
        Whether programs in use read it differently.
    """

    id: str
    format: str
    flags: tuple[str, ...]
    comment: str
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    shape: tuple[int, int]
    expected: Tensor | None = None
    split: Literal["N", "K"] | None = None
    world: int = 1
    raw: dict[str, bytes] = field(default_factory=dict)
    disputed: bool = False

    def files(self) -> dict[str, bytes]:
        """The checkpoint, by file name."""
        named = {f"{LAYER}.{name}": tensor.contiguous() for name, tensor in self.tensors.items()}
        config = json.dumps({"quantization_config": self.config}, indent=2, sort_keys=True) + "\n"
        return {"config.json": config.encode(), "model.safetensors": save(named), **self.raw}

    def meaning(self) -> bytes | None:
        """The file with what it means."""
        return None if self.expected is None else save({"weight": self.expected.contiguous()})
