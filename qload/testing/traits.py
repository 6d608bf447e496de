"""What sets one layer of a format apart from another, and what of it a kernel is expected to take.

Names and numbers alone: torch is not imported, so that tests can be collected by them.
"""

from dataclasses import dataclass, replace

from qload.errors import ArgumentError


@dataclass(frozen=True)
class Contract:
    """What the layers of a format may differ in; of each the first is common, the others are odd corners.

    Attributes
    ----------
    bits, groups, symmetric, act_order
        As `Traits` has them.
    zeros
        How zero points are stored; "" where a format has one way.
    variants
        What else its files say; "" where it is nothing.
    """

    bits: tuple[int, ...] = (4,)
    groups: tuple[int, ...] = (0,)
    symmetric: tuple[bool, ...] = (True,)
    act_order: tuple[bool, ...] = (False,)
    zeros: tuple[str, ...] = ("",)
    variants: tuple[str, ...] = ("",)

    def common(self, format: str) -> "Traits":
        """The layer of a `format` that every kernel takes."""
        return Traits(
            format,
            self.bits[0],
            self.groups[0],
            self.symmetric[0],
            self.act_order[0],
            self.zeros[0],
            self.variants[0],
        )

    def corners(self, format: str) -> tuple["Traits", ...]:
        """Layers of a `format` that differ from the common one in one thing each, that one first."""
        own, found = self.common(format), [self.common(format)]
        found += [replace(own, bits=bits) for bits in self.bits[1:]]
        found += [replace(own, group_size=group) for group in self.groups[1:]]
        found += [replace(own, symmetric=symmetric) for symmetric in self.symmetric[1:]]
        found += [replace(own, act_order=order) for order in self.act_order[1:]]
        found += [replace(own, zeros=zeros, symmetric=zeros not in WRAPPED) for zeros in self.zeros[1:]]
        return (*found, *(replace(own, variant=variant) for variant in self.variants[1:]))


@dataclass(frozen=True)
class Traits:
    """What sets a layer apart.

    Attributes
    ----------
    format
        The name of a format, as `qload formats` lists them.
    bits
        Of a code.
    group_size
        Inputs, or elements, that share a scale; -1: one group of all inputs; 0: the format says.
    symmetric
        Whether every zero point is the middle of the codes.
    act_order
        Whether the rows of groups lie anywhere, as an index says.
    zeros
        GPTQ: "v1" stores zero points minus one, "v2" as they are; "wrapping" is v1 with zero points of 0,
        which are stored as the largest code.
    variant
        What shares a scale ("tensor", "channel", "block"), or whether scales are quantized ("double").
    dtype
        Of the activations, and of scales that are stored in 16 bits.
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
        """As case identifiers say it, such as `gptq.v1.w4.g128.actorder`."""
        common = contract(self.format).common(self.format)
        group = {0: "", -1: "gall"}.get(self.group_size, f"g{self.group_size}")
        odd = "" if self.zeros in WRAPPED else "sym" if self.symmetric else "asym"
        parts = [
            self.format,
            self.zeros,
            self.variant,
            f"w{self.bits}",
            group,
            odd if self.symmetric != common.symmetric else "",
            "actorder" if self.act_order else "",
            {"float16": "", "bfloat16": "bf16", "float32": "fp32"}.get(self.dtype, self.dtype),
        ]
        return ".".join(part for part in parts if part)


WRAPPED = ("wrapping",)  # zero points that are not symmetric whatever else is said
GROUPS = (128, 32, 64, -1)
BYTES = Contract(bits=(8,))

CONTRACTS: dict[str, Contract] = {
    "unquantized": Contract(bits=(16,)),
    "gptq": Contract((4, 8, 3, 2), GROUPS, (True, False), (False, True), ("v1", "v2", "wrapping")),
    "awq": Contract((4, 8), GROUPS, (False, True)),
    "marlin": Contract((4, 8), (128, -1)),
    "marlin_24": Contract((4, 8), (128, -1)),
    "exl2": Contract(),
    "eetq": BYTES,
    "fp8": Contract(bits=(8,), variants=("block", "channel", "tensor")),
    "bnb_nf4": Contract(groups=(64, 128), variants=("single", "double")),
    "bnb_fp4": Contract(groups=(64, 128), variants=("single", "double")),
    "bnb_int8": BYTES,
    "ct_pack": Contract((4, 8), GROUPS, (True, False), (False, True)),
    "ct_pack_tensor": Contract((4, 8), symmetric=(True, False)),
    "ct_int": Contract((8, 4), symmetric=(True, False), variants=("channel", "tensor", "group")),
    "ct_nvfp4": Contract(groups=(16,)),
    "modelopt_nvfp4": Contract(groups=(16,)),
    "ct_mxfp4": Contract(groups=(32,)),
    "mxfp8": Contract(bits=(8,), groups=(32,)),
    "modelopt_awq": Contract(groups=(128, 32)),
}


def contract(format: str) -> Contract:
    """What layers of the `format` of this name may differ in, or ArgumentError."""
    if format not in CONTRACTS:
        raise ArgumentError("format", f"one of {', '.join(CONTRACTS)}", repr(format))
    return CONTRACTS[format]
