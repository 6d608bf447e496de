"""A checkpoint in pieces that fit in little memory, however large its tensors are."""

from collections.abc import Iterator

import torch
from torch import Tensor

from qload.formats.unquantized import FLOATS
from qload.loader import FormatLoader, LayerDescription, Part
from qload.loader.cuts import granule
from qload.spec import TensorSpec, Weight
from qload.storage import WeightStorage
from qload.storage import rows as rows
from qload.verify.window import WindowSource
from qload.weights import Weights

OUTPUTS = 1 << 20  # elements of a dequantized run, which with its working copies takes some 32 MiB


def values(storage: WeightStorage, name: str, spec: TensorSpec | None) -> Iterator[tuple[int, Tensor]]:
    """Yield runs of a tensor as comparable floats; nothing for integers.

    Bytes of a tensor declared as exponents are E8M0 floats.
    """
    dtype = storage.info(name).dtype
    exponents = spec is not None and spec.is_exponents
    if not dtype.is_floating_point and not exponents:
        return
    for start, run in rows(storage, name):
        floats = run.view(torch.float8_e8m0fnu) if exponents else run
        yield start, floats if dtype in FLOATS else floats.float()


def outputs(weights: Weights, loader: FormatLoader, layer: LayerDescription) -> Iterator[tuple[int, Weight]]:
    """A layer in runs of outputs: (first output, their typed weight)."""
    block = granule(layer, "N") or layer.N
    step = max(1, OUTPUTS // max(1, layer.K) // block) * block
    source = WindowSource(weights)
    for start in range(0, layer.N, step):
        part = Part(layer.prefix, start, min(start + step, layer.N))
        yield start, loader.load(source, [part], None)
