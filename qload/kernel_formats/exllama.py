"""ExLlama's shuffled GPTQ: rows of a group together, the codes of a word in the kernel's order.

    qweight  int32             (K*b/32, N)  codes in `layouts.exllama`, rows in the order of q_perm
    qzeros   int32             (G, N*b/32)  as in GPTQ
    scales   fp16, bf16, fp32  (G, N)       as in GPTQ
    g_idx    int32             (K,)         the group of each row of qweight: sorted
    q_perm   int32             (K,)         row i of qweight is input q_perm[i]; absent: in order

Source: exllamav2 b9c025b and vLLM 0.11.0, byte-equal to both.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from qload import spec
from qload.devices import StoredCodes
from qload.errors import RepackError
from qload.formats.gptq import INDICES, SCALES
from qload.kernel_formats.gptq import size_of, why_not, words
from qload.kernel_formats.plain_integers import Integers, Origin, inverse, put_back, with_origin
from qload.layouts import STORED_MINUS_ONE, ZeroPoints, exllama, gptq
from qload.spec import Role, TensorSpec


@dataclass(frozen=True)
class ExllamaConfig(spec.Config):
    """What is to be known of a weight in ExLlama's order.

    Attributes
    ----------
    bits
        Of a code: 2, 3, 4 or 8.
    zeros
        What a stored zero point means.
    run
        Rows of a group, where a weight's `g_idx` only counts; asked of the index when a weight is made or
        gets another one, whatever is claimed; 0 where its groups have several sizes or another order.
    """

    name: ClassVar[str] = "exllama"

    bits: int
    zeros: ZeroPoints = STORED_MINUS_ONE
    run: int = 0

    def for_layer(self, headers: spec.LayerHeaders) -> "ExllamaConfig":
        """What the index says, whatever was claimed."""
        return replace(self, run=spec.run_of(headers.facts["g_idx"]))


@dataclass(frozen=True, eq=False, repr=False)
class ExllamaWeight(spec.Weight):
    """A GPTQ weight in the order ExLlama's kernels read: rows of a group together, each word shuffled.

    Source: exllamav2 and vLLM, to whose tensors it is byte-equal.

    Attributes
    ----------
    qweight
        Codes, rows in the order of q_perm (`qload.layouts.exllama`): (K * bits / 32, N), int32.
    qzeros
        As in GPTQ: (G, N * bits / 32), int32.
    scales
        As in GPTQ: (G, N), fp16, bf16 or fp32.
    g_idx
        The group of each row of qweight, sorted: (K,), int32, int64 or int16.
    q_perm
        Row i of qweight is input q_perm[i]: (K,), int32; None: in order.
    """

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
        """Where each input lies: input k is row q_invperm[k] of qweight; (K,), int32, None: in order."""
        return None if self.q_perm is None else inverse(self.q_perm)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._count_rows()

    def holding(self, tensors: Mapping[str, Tensor]) -> Self:
        """The same weight holding these `tensors`, not checked again; another index tells another run."""
        twin = super().holding(tensors)
        if torch.compiler.is_compiling() or twin.g_idx is self.g_idx or self.g_idx.is_meta:
            return twin  # of an index without values the one that takes its place is a copy
        if type(twin.g_idx) in (Tensor, torch.nn.Parameter) and not twin.g_idx.is_meta:
            twin._count_rows()
        return twin

    def _count_rows(self) -> None:
        """Have the config say what the index says."""
        run = spec.run_of(self.g_idx)
        if run != self.config.run:
            object.__setattr__(self, "config", replace(self.config, run=run))

    def stored(self) -> StoredCodes | None:
        """As it lies, where rows are in order."""
        bits, groups, run = self.config.bits, self.scales.shape[0], self.config.run
        if self.q_perm is not None:
            return None
        return StoredCodes(
            codes=exllama.rows(bits).packed(self.qweight).T,
            scales=self.scales.T,
            zeros=self.qzeros,
            zero_rule=self.config.zeros.rule(bits),
            run=run if groups > 1 and run > 0 else max(self.layer.K, 1),
            k_group=None if groups == 1 or run > 0 else self.g_idx.to(torch.int32).contiguous(),
        )

    def codes(self) -> spec.Codes:
        """Codes with every row back at its input."""
        bits = self.config.bits
        return spec.Codes(
            bits=bits,
            codes=put_back(exllama.rows(bits).packed(self.qweight), self.q_perm).T,
            scales=self.scales.float().T,
            zeros=self.config.zeros.read(self.qzeros, gptq.columns(bits)).T,
            k_group=put_back(self.g_idx, self.q_perm).long(),
        )


def read(weight: ExllamaWeight) -> Integers:
    """Every row back at its input."""
    bits, zeros = weight.config.bits, weight.config.zeros
    g_idx = put_back(weight.g_idx, weight.q_perm)
    layer = with_origin(weight, weight.g_idx)
    known = layer.origin.config if isinstance(layer.origin, Origin) else None
    return Integers(
        bits=bits,
        group_size=getattr(known, "group_size", None) or size_of(weight.scales.shape[0], g_idx),
        unpack=lambda: put_back(exllama.rows(bits).packed(weight.qweight), weight.q_perm),
        scales=weight.scales,
        zeros=zeros.read(weight.qzeros, gptq.columns(bits)),
        g_idx=g_idx,
        layer=layer,
        convention=zeros,
    )


def write(integers: Integers, zeros: ZeroPoints | None = None) -> ExllamaWeight:
    """Rows sorted by group, stable, then each word shuffled; `zeros`: None for how they were stored."""
    reason, zeros = why_not(integers), zeros or integers.convention
    if reason:
        raise RepackError(integers.source, "exllama", reason)
    codes, g_idx, perm = integers.unpack(), integers.g_idx, None
    order = torch.argsort(g_idx, stable=True)
    if not bool((order[1:] > order[:-1]).all()):
        codes, g_idx, perm = codes[order], g_idx[order], order.to(torch.int32)
    index = torch.int32 if integers.origin.index is None else integers.origin.index
    return ExllamaWeight(
        config=ExllamaConfig(integers.bits, zeros, spec.run_of(g_idx)),
        qweight=integers.packed("qweight", exllama.rows(integers.bits), codes),
        qzeros=words(integers, zeros),
        scales=integers.scales,
        g_idx=g_idx.to(index),
        q_perm=perm,
        layer=integers.layer,
    )
