"""The fixtures of quantized inputs, as the programs that own the schemes made them."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from qload.detect import loader_from_config
from qload.kernels.bounds import exact, product
from qload.loader import FormatLoader
from qload.spec import ActivationScheme, Weight
from qload.storage import MemoryStorage
from qload.weights import Weights
from tests.paths import FIXTURES

PREFIX = "model.layers.0.mlp.down_proj"
FOLDERS = sorted((FIXTURES / "activations").iterdir())


@dataclass(frozen=True)
class Case:
    """A layer, and what its owner's code makes of inputs x."""

    tensors: dict[str, Tensor]
    config: dict[str, Any]
    owner: dict[str, Tensor]

    @property
    def loader(self) -> FormatLoader:
        return loader_from_config(self.config)

    @property
    def weights(self) -> Weights:
        return Weights(MemoryStorage(self.tensors), loader=self.loader)

    @property
    def weight(self) -> Weight:
        return self.weights.get_weights(PREFIX)

    @property
    def scheme(self) -> ActivationScheme:
        scheme = self.weight.activations
        assert scheme is not None
        return scheme

    @property
    def stored(self) -> tuple[Tensor | None, Tensor | None]:
        """The scale and the zero point that the layer stores."""
        fields, scheme = self.weight.fields(), self.scheme
        return fields.get(scheme.scale or ""), fields.get(scheme.zero_point or "")

    @property
    def x(self) -> Tensor:
        return self.owner["x"]

    @property
    def bias(self) -> Tensor:
        return self.tensors[f"{PREFIX}.bias"]


def read(folder: Path) -> Case:
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    owner = load_file(folder / "expected" / "expected.safetensors")
    return Case(load_file(folder / "model.safetensors"), config, owner)


def named(name: str) -> Case:
    return read(FIXTURES / "activations" / name)


def distance(got: Tensor, x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    """|got - (x w^T + bias)| in units of what float32 can cost: K products and sums, and the bias."""
    want = product(exact(x), w, bias)
    return (got.double() - want.value).abs() / want.error
