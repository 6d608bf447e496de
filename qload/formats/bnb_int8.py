"""bitsandbytes int8: one byte per element, one scale per output.

On disk, for a layer of K inputs and N outputs:

    weight         int8   (N, K)  codes, -127 to 127
    SCB            fp32   (N,)    the largest absolute value of each output
    weight_format  uint8  ()      order of the codes: 0, row by row; optional

    w[n, k] = (weight[n, k] * SCB[n]) * fp32(1/127)

The two products are rounded to float32, in this order. Source: bitsandbytes 0.50.2, bit-equal to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from qload import dtypes, spec
from qload.errors import UnsupportedFormatError
from qload.lazy_torch import Tensor, torch
from qload.loader import ConfiguredFormat
from qload.spec import Role, TensorSpec

INT8_BITS = 8
UNIT = 1 / 127
ORDERS = ("row", "col32", "col_turing", "col_ampere")  # by the value of weight_format


@dataclass(frozen=True)
class BNBConfig(spec.Config):
    """Config of bitsandbytes int8: empty, because the tensors describe themselves."""

    name: ClassVar[str] = "bitsandbytes int8"

    def for_layer(self, headers: spec.LayerHeaders) -> BNBConfig:
        """Check the order of codes; UnsupportedFormatError for the orders of former kernels."""
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

    w[n, k] = (weight[n, k] * SCB[n]) * fp32(1/127), each product rounded. Source: bitsandbytes,
    bit-equal to its files.

    Attributes
    ----------
    weight
        Codes, -127 to 127: (N, K), int8.
    SCB
        The largest absolute value of each output: (N,), fp32.
    """

    config: BNBConfig
    weight: Tensor
    SCB: Tensor

    format: ClassVar[str] = "bnb_int8"
    example: ClassVar[BNBConfig] = BNBConfig()

    @classmethod
    def tensors(cls, config: BNBConfig) -> tuple[TensorSpec, ...]:
        """Declare independent outputs and inputs: every cut is lawful."""
        return (
            TensorSpec("weight", (dtypes.int8,), "N K", Role.WORD, between=(-127, 127)),
            TensorSpec("SCB", (dtypes.float32,), "N", Role.SCALE),
            TensorSpec(
                "weight_format", (dtypes.uint8,), "P", Role.INDEX, fact=True, spent=True, optional=True
            ),
        )

    def codes(self) -> spec.Codes:
        """Return the codes, one group for each output."""
        return spec.Codes(INT8_BITS, self.weight, self.SCB[:, None], None, None, factor=UNIT)

    @classmethod
    def sample_facts(cls, config: BNBConfig, sizes: dict[str, int]) -> dict[str, Tensor]:
        """Scales for a `config` and `sizes`: 127 times a power of two, so that sums are exact."""
        return {"SCB": 127 * 2.0 ** (torch.arange(sizes["N"]) % 4 - 2)}


def dialects(formats: tuple[ConfiguredFormat, ...]) -> tuple[ConfiguredFormat, ...]:
    """bitsandbytes int8: its tensors tell it from 4 bits."""
    return (ConfiguredFormat(BNBWeight, BNBConfig()),)


FORMATS = (BNBWeight,)
METHODS = ()  # read by detect.methods
