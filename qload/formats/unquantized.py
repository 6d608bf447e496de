"""Plain floating point weights.

    weight  fp16, bf16, fp32 or fp64  (N, K)     w[n, k] = weight[n, k]

A vector (N,), such as the weight of a norm, has no K.

transformers leaves a weight plain if FP8 blocks do not divide it, and stores an uninitialized scale beside
it. compressed-tensors stores scales beside the plain weights of a frozen, uncompressed model. Such tensors
are recognised and ignored. Source: transformers 5.23.0 and compressed-tensors 0.20.0.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import islice
from math import prod
from typing import ClassVar

from qload import dtypes, spec
from qload.dtypes import DtypeLike
from qload.errors import ShapeError, UnsupportedFormatError
from qload.lazy_torch import Tensor
from qload.loader import ConfiguredFormat
from qload.spec import Role, TensorSpec

FLOATS = (dtypes.float16, dtypes.bfloat16, dtypes.float32, dtypes.float64)
FLOAT8 = (dtypes.float8_e8m0fnu, dtypes.float8_e4m3fn)
INTEGERS = (dtypes.int8, dtypes.uint8, dtypes.int32, dtypes.int64)
FREE = "ABCDEFGHIJLMOQRSTUVWXYZ"  # letters for the axes of ignored tensors
UNUSED = (*FLOATS, *FLOAT8, *INTEGERS)
MAX_FACTS = 2  # elements of a tensor with the shape of a layer, allowed beside a weight of one element


@dataclass(frozen=True)
class UnquantizedConfig(spec.Config):
    """Config of plain layers.

    Attributes
    ----------
    axes
        2 for a matrix (N, K), 1 for a vector (N,); from the shape when a layer is loaded or constructed.
    unused
        Names of tensors without meaning beside a plain weight.
    unused_because
        The reason, for a note; None: the note has the names alone.
    unused_axes
        Numbers of axes of these tensors, from their shapes.
    """

    name: ClassVar[str] = "unquantized"

    axes: int = 2
    unused: tuple[str, ...] = field(default=(), repr=False)  # of most checkpoints
    unused_because: str | None = field(default=None, repr=False, compare=False)
    unused_axes: tuple[int, ...] = field(default=(), repr=False, compare=False)

    def for_layer(self, headers: spec.LayerHeaders) -> UnquantizedConfig:
        """Tell a vector from a matrix; ShapeError for an unused tensor larger than the weight.

        Such a tensor is the weight, swapped with its scale.
        """
        limit = max(prod(headers.shapes["weight"]), MAX_FACTS)
        for name in self.unused:
            if name in headers.shapes and prod(headers.shapes[name]) > limit:
                full, file = headers.names.full(name), headers.names.file(name)
                raise ShapeError(
                    full, f"at most the {limit} elements of the weight", headers.shapes[name], file
                )
        axes = tuple(len(headers.shapes.get(name, ())) for name in self.unused)
        return replace(self, axes=1 if len(headers.shapes["weight"]) == 1 else 2, unused_axes=axes)

    def notes(self, headers: spec.LayerHeaders) -> tuple[str, ...]:
        """Note on ignored tensors beside the weight."""
        names = [name for name in self.unused if name in headers.shapes]
        if not names:
            return ()
        why = f": {self.unused_because}" if self.unused_because else ""
        lies = "lies" if len(names) == 1 else "lie"
        be = "is" if len(names) == 1 else "are"
        return (f"{' and '.join(names)} {lies} beside a plain weight and {be} not applied{why}",)


@dataclass(frozen=True, eq=False, repr=False)
class UnquantizedWeight(spec.Weight):
    """A plain weight (N, K), or a vector (N,), such as the weight of a norm.

    Attributes
    ----------
    weight
        (N, K) or (N,), fp16, bf16, fp32 or fp64.
    config
        Optional.

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
        """Declare the weight, and unused scales beside it."""
        weight = TensorSpec("weight", FLOATS, "N K" if config.axes == 2 else "N", Role.FLOAT)
        letters = iter(FREE)
        axes = [" ".join(islice(letters, count)) for count in config.unused_axes or (2,) * len(config.unused)]
        unused = zip(config.unused, axes, strict=True)
        return (
            weight,
            *(
                TensorSpec(name, UNUSED, text, Role.UNUSED, optional=True, spent=True)
                for name, text in unused
            ),
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape (N, K), or (N,) of a vector."""
        return tuple(self.weight.shape)

    def codes(self) -> spec.Codes:
        """Raise UnsupportedFormatError: a plain weight has no codes."""
        raise UnsupportedFormatError("unquantized", "a plain weight has no codes: take its dequantize()")

    def dequantize(self, dtype: DtypeLike = dtypes.float32, out: Tensor | None = None) -> Tensor:
        """Return the weight, (N, K), or (N,) of a vector, in `dtype`."""
        return spec.rounded(self.weight, dtype, out)


PLAIN = ConfiguredFormat(UnquantizedWeight, UnquantizedConfig())  # of a checkpoint without a config
FORMATS = (UnquantizedWeight,)
METHODS = ()
