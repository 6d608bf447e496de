"""Plain floating point weights.

    weight  fp16, bf16, fp32 or fp64  (N, K)     w[n, k] = weight[n, k]

A vector (N,), such as the weight of a norm, is stored the same way and has no K.

transformers leaves a weight plain that FP8 blocks do not divide, and stores a scale beside it all the same
that it never filled: such a scale is known, and neither applied nor looked at. Source: transformers 5.23.0.
"""

from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from qload import spec
from qload.errors import UnsupportedFormatError
from qload.spec import Role, TensorSpec

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
FREE = "ABCDEFGH"  # letters for the axes of what is not looked at


@dataclass(frozen=True)
class UnquantizedConfig(spec.Config):
    """What is to be known of plain layers.

    Attributes
    ----------
    axes
        2 for a matrix (N, K), 1 for a vector (N,); found in the shape when a layer is loaded or made.
    unused_scale
        The name of a scale that may be stored beside a plain weight and means nothing there; None: of none.
    scale_axes
        How many axes it has; found in its shape.
    """

    name: ClassVar[str] = "unquantized"

    axes: int = 2
    unused_scale: str | None = field(default=None, repr=False)  # of most checkpoints
    scale_axes: int = field(default=2, repr=False, compare=False)

    def for_layer(self, headers: spec.LayerHeaders) -> "UnquantizedConfig":
        """Tells a vector from a matrix."""
        scale = headers.shapes.get(self.unused_scale or "", (1, 1))
        return replace(self, axes=1 if len(headers.shapes["weight"]) == 1 else 2, scale_axes=len(scale))

    def notes(self, headers: spec.LayerHeaders) -> tuple[str, ...]:
        """A scale beside the weight, which is not applied."""
        name = self.unused_scale
        return (f"{name} lies beside a plain weight and is not applied",) if name in headers.shapes else ()


@dataclass(frozen=True, eq=False, repr=False)
class UnquantizedWeight(spec.Weight):
    """A plain weight (N, K), or a vector (N,), such as the weight of a norm.

    Attributes
    ----------
    weight
        (N, K) or (N,), fp16, bf16, fp32 or fp64.
    config
        Need not be given.

    Examples
    --------
    >>> import torch
    >>> from qload import UnquantizedWeight
    >>> weight = UnquantizedWeight(weight=torch.ones(4, 2, dtype=torch.bfloat16))
    >>> weight.shape, weight.dequantize().dtype
    ((4, 2), torch.float32)
    """

    weight: Tensor
    config: UnquantizedConfig = field(default=UnquantizedConfig(), kw_only=True)

    format: ClassVar[str] = "unquantized"
    plain: ClassVar[bool] = True
    example: ClassVar[UnquantizedConfig] = UnquantizedConfig()

    @classmethod
    def tensors(cls, config: UnquantizedConfig) -> tuple[TensorSpec, ...]:
        """One tensor, and beside it perhaps a scale that means nothing."""
        weight = TensorSpec("weight", FLOATS, "N K" if config.axes == 2 else "N", Role.FLOAT)
        if config.unused_scale is None:
            return (weight,)
        dtypes, axes = (*FLOATS, torch.float8_e8m0fnu), " ".join(FREE[: config.scale_axes])
        scale = TensorSpec(config.unused_scale, dtypes, axes, Role.UNUSED, optional=True, spent=True)
        return weight, scale

    @property
    def shape(self) -> tuple[int, ...]:
        """(N, K), or (N,) of a vector."""
        return tuple(self.weight.shape)

    def codes(self) -> spec.Codes:
        """UnsupportedFormatError: a plain weight has no codes."""
        raise UnsupportedFormatError("unquantized", "a plain weight has no codes: take its dequantize()")

    def dequantize(self, dtype: torch.dtype = torch.float32, out: Tensor | None = None) -> Tensor:
        """The weight: (N, K), or (N,) of a vector."""
        return spec.rounded(self.weight, dtype, out)
