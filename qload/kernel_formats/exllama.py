"""GPTQ in the order of ExLlama's kernels: rows sorted by group, the codes of each word shuffled.

    qweight  int32             (K*b/32, N)  codes in `layouts.exllama`, rows in the order of q_perm
    qzeros   int32             (G, N*b/32)  as in GPTQ
    scales   fp16, bf16, fp32  (G, N)       as in GPTQ
    g_idx    int32             (K,)         group of each row of qweight, sorted
    q_perm   int32             (K,)         row i of qweight is input q_perm[i]; absent: no permutation

Source: exllamav2 b9c025b and vLLM 0.11.0, byte-equal to both.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from qload import dtypes, spec
from qload.devices import StoredCodes
from qload.formats.gptq import BITS, INDICES, SCALES
from qload.layouts import STORED_MINUS_ONE, ZeroPoints, exllama, gptq
from qload.spec import Role, TensorSpec
from qload.spec.integers import Integers, Origin, invert_perm, record_origin, unpermute_rows


@dataclass(frozen=True)
class ExllamaConfig(spec.Config):
    """Config of a weight in ExLlama's order.

    Attributes
    ----------
    bits
        Bits of a code: 2, 3, 4 or 8.
    zeros
        Stored form of the zero points.
    run
        Rows of each group; 0 for groups of several sizes or out of order. Always computed from the weight's
        `g_idx`; a value passed in is replaced.

    Raises
    ------
    ArgumentError
        For other bits.
    """

    name: ClassVar[str] = "exllama"

    bits: int
    zeros: ZeroPoints = STORED_MINUS_ONE
    run: int = 0

    def __post_init__(self) -> None:
        self.check_bits(self.bits, *BITS)

    def for_layer(self, headers: spec.LayerHeaders) -> "ExllamaConfig":
        """Compute `run` from the stored index."""
        return replace(self, run=spec.run_of(torch.as_tensor(headers.facts["g_idx"])))


@dataclass(frozen=True, eq=False, repr=False)
class ExllamaWeight(spec.Weight):
    """A GPTQ weight in the order of ExLlama's kernels: rows sorted by group, each word shuffled.

    Source: exllamav2 and vLLM, byte-equal to their tensors.

    Attributes
    ----------
    qweight
        Codes, rows in the order of q_perm (`qload.layouts.exllama`): (K * bits / 32, N), int32.
    qzeros
        As in GPTQ: (G, N * bits / 32), int32.
    scales
        As in GPTQ: (G, N), fp16, bf16 or fp32.
    g_idx
        Group of each row of qweight, sorted: (K,), int32, int64 or int16.
    q_perm
        Row i of qweight is input q_perm[i]: (K,), int32; None: no permutation.
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
        """Declare the tensors of GPTQ and the permutation, because of which K is never cut."""
        b = config.bits
        return (
            TensorSpec("qweight", (dtypes.int32,), f"K*{b}/32! N", Role.WORD),
            TensorSpec("qzeros", (dtypes.int32,), f"G N*{b}/32", Role.WORD),
            TensorSpec("scales", SCALES, "G N", Role.SCALE),
            TensorSpec("g_idx", INDICES, "K!", Role.INDEX, fact=True, index_of="G"),
            TensorSpec(
                "q_perm", (dtypes.int32,), "K!", Role.INDEX, fact=True, optional=True, permutation=True
            ),
        )

    @property
    def q_invperm(self) -> Tensor | None:
        """Row of each input in qweight: (K,), int32; None: no permutation."""
        return None if self.q_perm is None else invert_perm(self.q_perm)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._update_run()

    def holding(self, tensors: Mapping[str, Tensor]) -> Self:
        """Replace `tensors` without another check; a new index gives a new `run`."""
        twin = super().holding(tensors)
        if torch.compiler.is_compiling() or twin.g_idx is self.g_idx or self.g_idx.is_meta:
            return twin  # the new index of a weight on `meta` is a copy of the former one
        if type(twin.g_idx) in (Tensor, torch.nn.Parameter) and not twin.g_idx.is_meta:
            twin._update_run()
        return twin

    def _update_run(self) -> None:
        """Set `run` of the config from the index."""
        run = spec.run_of(self.g_idx)
        if run != self.config.run:
            object.__setattr__(self, "config", replace(self.config, run=run))

    def stored(self) -> StoredCodes | None:
        """Describe the stored order for kernels; None for permuted rows."""
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
        """Return codes, scales and zero points in the order of inputs."""
        bits = self.config.bits
        return spec.Codes(
            bits=bits,
            codes=unpermute_rows(exllama.rows(bits).packed(self.qweight), self.q_perm).T,
            scales=self.scales.float().T,
            zeros=self.config.zeros.read(self.qzeros, gptq.columns(bits)).T,
            k_group=unpermute_rows(self.g_idx, self.q_perm).long(),
        )


def to_integers(weight: ExllamaWeight) -> Integers:
    """Convert to plain integers, in the order of inputs."""
    bits, zeros = weight.config.bits, weight.config.zeros
    g_idx = unpermute_rows(weight.g_idx, weight.q_perm)
    layer = record_origin(weight, weight.g_idx)
    config = layer.origin.config if isinstance(layer.origin, Origin) else None
    group_size = getattr(config, "group_size", None)
    if not group_size:  # the largest group
        group_size = int(torch.bincount(g_idx.long()).max()) if weight.scales.shape[0] > 1 else -1
    return Integers(
        bits=bits,
        group_size=group_size,
        unpack=lambda: unpermute_rows(exllama.rows(bits).packed(weight.qweight), weight.q_perm),
        scales=weight.scales,
        zeros=zeros.read(weight.qzeros, gptq.columns(bits)),
        g_idx=g_idx,
        layer=layer,
        convention=zeros,
    )


def from_integers(integers: Integers, zeros: ZeroPoints | None = None) -> ExllamaWeight:
    """Sort rows by group, stably, and shuffle each word; exact, or RepackError.

    `zeros`: convention of the stored zero points; None: that of the source.
    """
    zeros = zeros or integers.convention
    integers.reject("exllama", integers.find_short_words())
    codes, g_idx, perm = integers.unpack(), integers.g_idx, None
    order = torch.argsort(g_idx, stable=True)
    if not bool((order[1:] > order[:-1]).all()):
        codes, g_idx, perm = codes[order], g_idx[order], order.to(torch.int32)
    return ExllamaWeight(
        config=ExllamaConfig(integers.bits, zeros, spec.run_of(g_idx)),
        qweight=integers.pack_codes("qweight", exllama.rows(integers.bits), codes),
        qzeros=integers.pack_zero_points(zeros),
        scales=integers.scales,
        g_idx=g_idx.to(integers.origin.index_dtype or torch.int32),
        q_perm=perm,
        layer=integers.layer,
    )
