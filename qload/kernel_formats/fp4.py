"""NVFP4 and MXFP4 read alike: four-bit floats, a scale for each group, and for some one more for the tensor.

Every way to store them is read into `Fp4` and written from it, so that the order of a kernel knows no
checkpoint's names.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from qload.devices import LazyCodes
from qload.formats import CTMXFP4Weight, CTNVFP4Weight, ModelOptNVFP4Weight, MXFP4Config, mxfp4, nvfp4
from qload.kernel_formats.integers import Origin, with_origin
from qload.layouts import compressed_tensors
from qload.spec import Layer, Weight, named

BITS = 4
WORDS = compressed_tensors.rows(BITS, True)  # four bytes are a word, whose eight codes lie as theirs


@dataclass(frozen=True)
class Fp4Names:
    """What a type of weight calls its tensors; "" where it has no such one.

    `divides`: whether the second scale is the inverse of a factor.
    """

    group_size: int
    packed: str
    second: str = ""
    inputs: str = ""
    divides: bool = False


NAMES: dict[type[Weight], Fp4Names] = {
    CTNVFP4Weight: Fp4Names(
        nvfp4.GROUP, "weight_packed", "weight_global_scale", "input_global_scale", divides=True
    ),
    ModelOptNVFP4Weight: Fp4Names(nvfp4.GROUP, "weight", "weight_scale_2", "input_scale"),
    CTMXFP4Weight: Fp4Names(mxfp4.GROUP, "weight_packed"),
}


@dataclass(frozen=True, eq=False)
class Fp4:
    """w[n, k] = e2m1[code] * scales[n, k / group_size], times or by the second scale.

    `unpack` makes the codes (K, N), which whoever only asks what fits does not need. `scales` (N, G) are
    float8_e4m3fn, or uint8 exponents (e8m0); `second` and `inputs`, of the activations, fp32 or None.
    """

    names: Fp4Names
    unpack: Callable[[], LazyCodes | Tensor]
    scales: Tensor
    second: Tensor | None
    inputs: Tensor | None
    layer: Layer

    format: ClassVar[str] = "fp4"

    @property
    def source(self) -> str:
        """The format it was read from, at first, for messages."""
        assert isinstance(self.layer.origin, Origin)  # every reader says
        return self.layer.origin.weight_type.format

    def full(self, name: str) -> str:
        """A tensor's name in messages."""
        return named(self.layer.name or self.source, name)


def read(weight: Weight) -> Fp4:
    """A checkpoint's layer."""
    names, held = NAMES[type(weight)], weight.fields()
    return Fp4(
        names,
        lambda: WORDS.packed(_in_words(held[names.packed])).T,
        weight.exponents if isinstance(weight, CTMXFP4Weight) else held["weight_scale"],
        held.get(names.second),
        held.get(names.inputs),
        with_origin(weight),
    )


def back(meant: Fp4, origin: Origin) -> Weight:
    """As the checkpoint had it."""
    names, config = NAMES[origin.weight_type], origin.config
    codes, scales = torch.uint8, meant.scales
    if isinstance(config, MXFP4Config):
        codes, scales = config.codes, scales.view(config.exponents)
    tensors = {
        names.packed: WORDS.pack(meant.unpack().T).view(codes),
        "weight_scale": scales,
        names.second: meant.second,
        names.inputs: meant.inputs,
    }
    held = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    return origin.weight_type(config=origin.config, layer=meant.layer, **held)


def packed_name(weight: Weight) -> str:
    """The tensor of codes, which decide nothing."""
    return NAMES[type(weight)].packed


def _in_words(packed: Tensor) -> Tensor:
    """Bytes (N, K / 2) as int32 words (N, K / 8); groups fill whole words."""
    dense = packed.contiguous()
    aligned = dense if dense.storage_offset() % torch.int32.itemsize == 0 else dense.clone()
    return aligned.view(torch.int32)
