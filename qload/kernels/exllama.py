"""ExLlama's shuffled GPTQ: rows of a group together, the codes of a word in the kernel's order.

    qweight  int32             (K*b/32, N)  codes in `layouts.exllama`, rows in the order of q_perm
    qzeros   int32             (G, N*b/32)  as in GPTQ
    scales   fp16, bf16, fp32  (G, N)       as in GPTQ
    g_idx    int32             (K,)         the group of each row of qweight: sorted
    q_perm   int32             (K,)         row i of qweight is input q_perm[i]; absent: in order

Source: formats.md section 2, byte-equal to exllamav2 and vLLM.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from qload import spec
from qload.formats import GPTQConfig, GPTQWeight
from qload.formats.gptq import INDICES, SCALES
from qload.kernels.gptq import config_of
from qload.kernels.permutation import inverse, put_back
from qload.layouts import STORED_MINUS_ONE, ZeroPoints, exllama, gptq
from qload.spec import Role, TensorSpec


@dataclass(frozen=True)
class ExllamaConfig(spec.Config):
    """Bits, and what a stored zero point means."""

    name: ClassVar[str] = "exllama"

    bits: int
    zeros: ZeroPoints = STORED_MINUS_ONE


@dataclass(frozen=True, eq=False, repr=False)
class ExllamaWeight(spec.Weight):
    """A GPTQ weight in the order ExLlama's kernels read."""

    config: ExllamaConfig
    qweight: Tensor
    qzeros: Tensor
    scales: Tensor
    g_idx: Tensor
    q_perm: Tensor | None = None

    format: ClassVar[str] = "exllama"
    example: ClassVar[ExllamaConfig] = ExllamaConfig(bits=4)

    @classmethod
    def tensors(cls, config: ExllamaConfig) -> tuple[TensorSpec, ...]:
        """As GPTQ's, rows permuted, so that K is never cut."""
        b = config.bits
        return (
            TensorSpec("qweight", (torch.int32,), f"K*{b}/32! N", Role.WORD),
            TensorSpec("qzeros", (torch.int32,), f"G N*{b}/32", Role.WORD),
            TensorSpec("scales", SCALES, "G N", Role.SCALE),
            TensorSpec("g_idx", INDICES, "K!", Role.INDEX, fact=True, index_of="G"),
            TensorSpec(
                "q_perm", (torch.int32,), "K!", Role.INDEX, fact=True, optional=True, permutation=True
            ),
        )

    @property
    def q_invperm(self) -> Tensor | None:
        """int32 (K,): input k is row q_invperm[k] of qweight; None where rows are in order."""
        return None if self.q_perm is None else inverse(self.q_perm)

    def codes(self) -> spec.Codes:
        """Codes with every row back at its input."""
        bits = self.config.bits
        return spec.Codes(
            bits=bits,
            codes=put_back(exllama.rows(bits).unpack(self.qweight), self.q_perm).T,
            scales=self.scales.float().T,
            zeros=self.config.zeros.read(self.qzeros, gptq.columns(bits)).T,
            k_group=put_back(self.g_idx, self.q_perm).long(),
        )


def from_gptq(weight: GPTQWeight) -> ExllamaWeight:
    """Rows sorted by group, stable, then each word shuffled; zero points and scales untouched."""
    bits, order = weight.config.bits, torch.argsort(weight.g_idx, stable=True)
    in_order = bool((order[1:] > order[:-1]).all())
    codes = gptq.rows(bits).unpack(weight.qweight)
    return ExllamaWeight(
        config=ExllamaConfig(bits, weight.config.zeros),
        qweight=exllama.rows(bits).pack(codes if in_order else codes[order]),
        qzeros=weight.qzeros,
        scales=weight.scales,
        g_idx=weight.g_idx if in_order else weight.g_idx[order],
        q_perm=None if in_order else order.to(torch.int32),
        layer=weight.layer,
    )


def to_gptq(weight: ExllamaWeight) -> GPTQWeight:
    """The inverse of `from_gptq`, bit for bit."""
    bits, origin = weight.config.bits, weight.layer.origin
    zeros, g_idx = weight.config.zeros, put_back(weight.g_idx, weight.q_perm)
    if isinstance(origin, GPTQConfig):
        config = replace(origin, zeros=zeros)
    else:
        config = config_of(bits, weight.scales.shape[0], g_idx, zeros)
    codes = put_back(exllama.rows(bits).unpack(weight.qweight), weight.q_perm)
    return GPTQWeight(
        config=config,
        qweight=gptq.rows(bits).pack(codes),
        qzeros=weight.qzeros,
        scales=weight.scales,
        g_idx=g_idx,
        layer=weight.layer,
    )
