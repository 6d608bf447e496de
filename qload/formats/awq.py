"""AWQ, the GEMM layout: 4-bit codes packed along N in an interleaved order, groups in order.

On disk, for a layer of K inputs and N outputs, group size g:

    qweight  int32             (K, N/8)    codes, packed along N, even columns of eight first
    qzeros   int32             (K/g, N/8)  zero points as they are, packed alike
    scales   fp16, bf16, fp32  (K/g, N)

    w[n, k] = scales[k / g, n] * (code[k, n] - zero[k / g, n])

There is no group index, so a cut of K inside a group is refused. Source: formats.md section 3,
bit-equal to autoawq and gptqmodel.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from qload import spec
from qload.errors import ArgumentError
from qload.layouts import Stored, awq
from qload.spec import Role, TensorSpec

BITS = 4
SCALES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class AWQConfig(spec.Config):
    """`group_size` -1: one group, which every rank keeps whole."""

    name: ClassVar[str] = "awq"

    group_size: int
    bits: int = BITS

    def __post_init__(self) -> None:
        if self.bits != BITS:
            raise ArgumentError("awq: bits", str(BITS), str(self.bits))
        if self.group_size != -1 and self.group_size < 1:
            raise ArgumentError("awq: group_size", "-1 or at least 1", str(self.group_size))

    def study(self, seen: spec.Seen) -> "AWQConfig":
        """One group that covers all of K is -1 from here on: there is nothing to cut."""
        whole = seen.shapes["qweight"][:1] == (self.group_size,)
        return replace(self, group_size=-1) if whole else self


@dataclass(frozen=True, eq=False, repr=False)
class AWQWeight(spec.Weight):
    """An AWQ GEMM layer, or a share of one."""

    config: AWQConfig
    qweight: Tensor
    qzeros: Tensor
    scales: Tensor

    format: ClassVar[str] = "awq"
    example: ClassVar[AWQConfig] = AWQConfig(group_size=128)

    @classmethod
    def tensors(cls, config: AWQConfig) -> tuple[TensorSpec, ...]:
        """Scales and zero points follow K, so that they bind its cuts."""
        groups = "1" if config.group_size == -1 else f"K/{config.group_size}"
        return (
            TensorSpec("qweight", (torch.int32,), "K N/8", Role.WORD),
            TensorSpec("qzeros", (torch.int32,), f"{groups} N/8", Role.WORD),
            TensorSpec("scales", SCALES, f"{groups} N", Role.SCALE),
        )

    def codes(self) -> spec.Codes:
        """Codes, zero points and scales in plain order."""
        packing, K = awq.columns(BITS), self.qweight.shape[0]
        group = K if self.config.group_size == -1 else self.config.group_size
        return spec.Codes(
            bits=BITS,
            codes=packing.unpack(self.qweight).T,
            scales=self.scales.float().T,
            zeros=Stored().read(self.qzeros, packing).T,
            k_group=torch.arange(K, device=self.qweight.device) // group,
        )
