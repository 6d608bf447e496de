"""Traits of layers: the properties by which layers of a format differ, and their common and odd values.

Torch is not imported, so that tests can be collected by traits.
"""

from dataclasses import astuple, dataclass, replace
from typing import Any

from qload.errors import ArgumentError


@dataclass(frozen=True)
class Contract:
    """The values of the traits of a format: the first of each is common, the others are odd corners.

    Attributes
    ----------
    bits, groups, symmetric, act_order
        As in `Traits`.
    zeros
        Storage of zero points; "" for a format with a single one.
    variants
        Other properties of files; "" for none.
    inputs
        A divisor of the number of inputs for all variants; the common one needs no more than 32.
    """

    bits: tuple[int, ...] = (4,)
    groups: tuple[int, ...] = (0,)
    symmetric: tuple[bool, ...] = (True,)
    act_order: tuple[bool, ...] = (False,)
    zeros: tuple[str, ...] = ("",)
    variants: tuple[str, ...] = ("",)
    inputs: int = 1

    def common(self, format: str) -> "Traits":
        """Return the common traits of a `format`, supported by every kernel."""
        return Traits(format, **{trait: values[0] for trait, values in self._values().items()})

    def corners(self, format: str) -> tuple["Traits", ...]:
        """Return the common traits of a `format`, then variants with one other value each."""
        common = self.common(format)
        listed = [common]
        for trait, values in self._values().items():
            listed += [replace(common, **{trait: value}) for value in values[1:]]
        return tuple(
            replace(traits, symmetric=False) if traits.zeros in WRAPPED else traits for traits in listed
        )

    def _values(self) -> dict[str, tuple[Any, ...]]:
        """The values by name of the trait."""
        return dict(zip(TRAITS, astuple(self)[: len(TRAITS)], strict=True))


@dataclass(frozen=True)
class Traits:
    """The properties of a layer.

    Attributes
    ----------
    format
        The name of a format, as in `qload formats`.
    bits
        Of a code.
    group_size
        The number of inputs, or elements, with one scale; -1: all inputs; 0: fixed by the format.
    symmetric
        Whether every zero point is the middle of the codes.
    act_order
        Whether an index assigns rows to groups in any order.
    zeros
        GPTQ: "v1" stores zero points minus one, "v2" unchanged; "wrapping" is v1 with zero points of 0,
        stored as the largest code.
    variant
        The extent of a scale ("tensor", "channel", "block"), "double" for quantized scales, ggml's type, or
        MLX's mode.
    dtype
        Of activations, and of scales of 16 bits.
    """

    format: str
    bits: int = 4
    group_size: int = 0
    symmetric: bool = True
    act_order: bool = False
    zeros: str = ""
    variant: str = ""
    dtype: str = "float16"

    def words(self) -> str:
        """Return the traits as in ids of cases, such as `gptq.v1.w4.g128.actorder`."""
        common = contract(self.format).common(self.format)
        group = {0: "", -1: "gall"}.get(self.group_size, f"g{self.group_size}")
        symmetry = "" if self.zeros in WRAPPED else "sym" if self.symmetric else "asym"
        parts = [
            self.format,
            self.zeros,
            self.variant,
            f"w{self.bits}",
            group,
            symmetry if self.symmetric != common.symmetric else "",
            "actorder" if self.act_order else "",
            {"float16": "", "bfloat16": "bf16", "float32": "fp32"}.get(self.dtype, self.dtype),
        ]
        return ".".join(part for part in parts if part)


TRAITS = ("bits", "group_size", "symmetric", "act_order", "zeros", "variant")  # in the order of a contract
WRAPPED = ("wrapping",)  # zero points that are never symmetric
GROUPS = (128, 32, 64, -1)
EIGHT_BITS = Contract(bits=(8,))
GGML_TYPES = (
    *("Q4_0", "Q8_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ4_NL", "IQ4_XS", "MXFP4"),
)

CONTRACTS: dict[str, Contract] = {
    "unquantized": Contract(bits=(16,)),
    "gptq": Contract((4, 8, 3, 2), GROUPS, (True, False), (False, True), ("v1", "v2", "wrapping")),
    "awq": Contract((4, 8), GROUPS, (False, True)),
    "marlin": Contract((4, 8), (128, -1)),
    "marlin_24": Contract((4, 8), (128, -1)),
    "exl2": Contract(),
    "eetq": EIGHT_BITS,
    "fp8": Contract(bits=(8,), variants=("block", "channel", "tensor")),
    "bnb_nf4": Contract(groups=(64, 128), variants=("single", "double")),
    "bnb_fp4": Contract(groups=(64, 128), variants=("single", "double")),
    "bnb_int8": EIGHT_BITS,
    "ct_pack": Contract((4, 8), GROUPS, (True, False), (False, True)),
    "ct_pack_tensor": Contract((4, 8), symmetric=(True, False)),
    "ct_int": Contract((8, 4), symmetric=(True, False), variants=("channel", "tensor", "group")),
    "ct_nvfp4": Contract(groups=(16,)),
    "modelopt_nvfp4": Contract(groups=(16,)),
    "ct_mxfp4": Contract(groups=(32,)),
    "mxfp8": Contract(bits=(8,), groups=(32,)),
    "modelopt_awq": Contract(groups=(128, 32)),
    "modelopt_int8": EIGHT_BITS,
    "gguf": Contract(variants=GGML_TYPES, inputs=256),
    "mlx": Contract((4, 8, 2, 3, 5, 6), (64, 32, 128)),
    "mlx_float": Contract(variants=("mxfp4", "nvfp4")),
    "hqq": Contract((4, 8, 2), (64, 128)),
}


def contract(format: str) -> Contract:
    """Return the contract of a `format`, by its name; ArgumentError for an unknown one."""
    if format not in CONTRACTS:
        raise ArgumentError("format", f"one of {', '.join(CONTRACTS)}", repr(format))
    return CONTRACTS[format]
