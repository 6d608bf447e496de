"""bitsandbytes int8: one scale for each output.

On disk, for a layer of K inputs and N outputs:

    weight         int8   (N, K)  codes, -127 to 127
    SCB            fp32   (N,)    the greatest absolute value of each output
    weight_format  uint8  ()      the order of the codes: 0, row by row; may be absent

    w[n, k] = (weight[n, k] * SCB[n]) * fp32(1/127)

The two products round in float32, in this order. Source: bitsandbytes 0.50.2, bit-equal to it.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from qload import spec
from qload.errors import UnsupportedFormatError
from qload.spec import Role, TensorSpec

BITS = 8
UNIT = 1 / 127
ORDERS = ("row", "col32", "col_turing", "col_ampere")  # by the value of weight_format


@dataclass(frozen=True)
class BNBConfig(spec.Config):
    """A bitsandbytes int8 config: nothing is left to be said, as the tensors tell all."""

    name: ClassVar[str] = "bitsandbytes int8"

    def for_layer(self, headers: spec.LayerHeaders) -> "BNBConfig":
        """UnsupportedFormatError for the orders of kernels that are no more."""
        spec.check_dtypes(BNBWeight.tensors(self), headers.dtypes, headers.names)
        stored = headers.facts.get("weight_format")
        if stored is not None and bool(stored.any()):
            value = int(stored.max())
            order = ORDERS[value] if value < len(ORDERS) else str(value)
            reason = f"{headers.names.full('weight_format')} is {value}; only 0, row by row, is read"
            remedy = "load it with a bitsandbytes that has this order, and save it row by row"
            raise UnsupportedFormatError(f"bnb_int8 in the order {order}", reason, remedy=remedy)
        return self


@dataclass(frozen=True, eq=False, repr=False)
class BNBWeight(spec.Weight):
    """A bitsandbytes int8 layer, or a share of one.

    w[n, k] = (weight[n, k] * SCB[n]) * fp32(1/127), each product rounded. Source: the files of bitsandbytes,
    to which it is bit-equal.

    Attributes
    ----------
    weight
        Codes, -127 to 127: (N, K), int8.
    SCB
        The greatest absolute value of each output: (N,), fp32.
    """

    config: BNBConfig
    weight: Tensor
    SCB: Tensor

    format: ClassVar[str] = "bnb_int8"
    example: ClassVar[BNBConfig] = BNBConfig()

    @classmethod
    def tensors(cls, config: BNBConfig) -> tuple[TensorSpec, ...]:
        """Every output is on its own, so that every cut is lawful."""
        return (
            TensorSpec("weight", (torch.int8,), "N K", Role.WORD, between=(-127, 127)),
            TensorSpec("SCB", (torch.float32,), "N", Role.SCALE),
            TensorSpec(
                "weight_format", (torch.uint8,), "P", Role.INDEX, fact=True, spent=True, optional=True
            ),
        )

    def codes(self) -> spec.Codes:
        """The codes, one group for each output."""
        return spec.Codes(BITS, self.weight, self.SCB[:, None], None, None, factor=UNIT)
