"""AWQ, the GEMM layout: codes packed along N in an interleaved order, groups in order.

On disk, for a layer of K inputs and N outputs, group size g, b bits:

    qweight  int32             (K, N*b/32)    codes, packed along N, even columns of a word first
    qzeros   int32             (K/g, N*b/32)  zero points as they are, packed alike
    scales   fp16, bf16, fp32  (K/g, N)

    w[n, k] = scales[k / g, n] * (code[k, n] - zero[k / g, n])

`zero_point: false` says that the zero points are 2**(b-1) and may be left out; where they are stored
they are believed. There is no group index, so a cut of K inside a group is refused. Source: formats.md
section 3, bit-equal to autoawq and gptqmodel for 4 bits, to vLLM for 8.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from qload import spec
from qload.devices import StoredCodes
from qload.layouts import Stored, awq
from qload.spec import Role, TensorSpec

BITS = (4, 8)
SCALES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class AWQConfig(spec.Grouped, spec.Config):
    """`group_size` -1: one group, which every rank keeps whole. `zero_point`: whether qzeros are stored."""

    name: ClassVar[str] = "awq"

    group_size: int
    bits: int = 4
    zero_point: bool = True

    def __post_init__(self) -> None:
        self.check_bits(self.bits, *BITS)
        self.check_group_size()

    def for_layer(self, headers: spec.LayerHeaders) -> "AWQConfig":
        """One group that covers all of K is -1 from here on: there is nothing to cut."""
        stored = self.zero_point or "qzeros" in headers.shapes
        return replace(self.one_group(sum(headers.shapes["qweight"][:1])), zero_point=stored)


@dataclass(frozen=True, eq=False, repr=False)
class AWQWeight(spec.Weight):
    """An AWQ GEMM layer, or a share of one."""

    config: AWQConfig
    qweight: Tensor
    scales: Tensor
    qzeros: Tensor | None = None

    format: ClassVar[str] = "awq"
    example: ClassVar[AWQConfig] = AWQConfig(group_size=128)

    @classmethod
    def tensors(cls, config: AWQConfig) -> tuple[TensorSpec, ...]:
        """Scales and zero points follow K, so that they bind its cuts."""
        groups = "1" if config.group_size == -1 else f"K/{config.group_size}"
        words, optional = f"N/{32 // config.bits}", not config.zero_point
        return (
            TensorSpec("qweight", (torch.int32,), f"K {words}", Role.WORD),
            TensorSpec("qzeros", (torch.int32,), f"{groups} {words}", Role.WORD, optional=optional),
            TensorSpec("scales", SCALES, f"{groups} N", Role.SCALE),
        )

    def stored(self) -> StoredCodes:
        """As it lies."""
        packing, K = awq.columns(self.config.bits), self.qweight.shape[0]
        return StoredCodes(
            codes=packing.packed(self.qweight).T,
            scales=self.scales.T,
            zeros=self.qzeros,
            zero_rule=Stored().rule(packing.bits),
            run=max(K // max(self.scales.shape[0], 1), 1),
            zero_order=packing.codes,
        )

    def codes(self) -> spec.Codes:
        """Codes, zero points and scales in plain order."""
        bits, K = self.config.bits, self.qweight.shape[0]
        packing = awq.columns(bits)
        codes = packing.packed(self.qweight)
        plain = spec.symmetric(bits, codes, self.scales, self.config.in_order(K, self.qweight.device))
        return plain if self.qzeros is None else replace(plain, zeros=Stored().read(self.qzeros, packing).T)
