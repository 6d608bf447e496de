"""GPTQ: integer codes, one scale and zero point per group of inputs.

On disk, for a layer of K inputs and N outputs in G groups, b bits:

    qweight  int32             (K*b/32, N)  codes, packed along K, first row in the low bits
    qzeros   int32             (G, N*b/32)  zero points, packed along N, in the convention of `zeros`
    scales   fp16, bf16, fp32  (G, N)
    g_idx    int32             (K,)         the group of each row; any order (act order)

    w[n, k] = scales[g, n] * (code[k, n] - zero[g, n]),   g = g_idx[k]

Without act order tools may leave `g_idx` out, or write zeros: then the groups lie in order, and a cut of K
inside a group is refused. Bits are what the shapes of zero points and scales say. Source: gptqmodel 7.7.0,
auto-gptq 0.7.1 and auto-round 0.16.1, bit-equal to all.
"""

from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from qload import spec
from qload.devices import StoredCodes
from qload.errors import AmbiguousIndexError, ShapeError
from qload.layouts import STORED_MINUS_ONE, ZeroPoints, gptq
from qload.spec import Role, TensorSpec

BITS = (2, 3, 4, 8)
SCALES = (torch.float16, torch.bfloat16, torch.float32)
INDICES = (torch.int32, torch.int64, torch.int16)


@dataclass(frozen=True)
class GPTQConfig(spec.Grouped, spec.Config):
    """What a GPTQ checkpoint's config says of all its layers.

    Attributes
    ----------
    bits
        Of a code: 2, 3, 4 or 8.
    group_size
        Inputs that share a scale; -1: one group.
    zeros
        What a stored zero point means; gptq_v2 stores them as they are (`Stored()`).
    positional
        Whether the groups of the whole layer lie in order, so that a cut between two groups cuts the scales
        too; found in `g_idx` when a layer is loaded or made.
    desc_act
        Whether inputs are in act order, as the config claims; `g_idx` is believed.
    indexed
        Whether `g_idx` is stored and says the groups; False: they lie in order; None: as the layer has it.
    claimed_bits
        Where the shapes of a layer say other bits than the config, what the config says.
    """

    name: ClassVar[str] = "gptq"

    bits: int
    group_size: int
    zeros: ZeroPoints = STORED_MINUS_ONE
    positional: bool = False
    desc_act: bool | None = field(default=None, compare=False)  # only a claim
    indexed: bool | None = field(default=True, compare=False)  # how it is stored, not what it means
    claimed_bits: int | None = field(default=None, compare=False)  # only a claim

    def __post_init__(self) -> None:
        self.check_bits(self.bits, *BITS)
        self.check_group_size()

    def for_layer(self, headers: spec.LayerHeaders) -> "GPTQConfig":
        """Bits from shapes; positional or not, from `g_idx`.

        ShapeError where the number of groups contradicts the group size; AmbiguousIndexError for an index of
        zeros where there are several groups, unless the config denies act order.
        """
        own = self._believed(headers)
        sizes = headers.sizes(GPTQWeight.tensors(replace(own, positional=False)))
        K, G, N = sizes["K"], sizes["G"], sizes["N"]
        group, groups = own.rows_of_a_group(K), own.groups(K)
        if groups != G:
            raise ShapeError(
                headers.names.full("scales"),
                f"({groups}, {N}) = (K/{group}^, N)",
                headers.shapes["scales"],
                headers.names.file("scales"),
                f"for K = {K} and a group size of {self.group_size} in the config",
            )
        g_idx = None if own.indexed is False else headers.facts.get("g_idx")
        if g_idx is None or (G > 1 and not g_idx.any() and own.desc_act is False):
            return replace(own, positional=G > 1, indexed=False)
        if G > 1 and not g_idx.any():
            raise AmbiguousIndexError(
                headers.names.full("g_idx"),
                "all zero, which has two readings",
                f"the group of each row, 0 to {G - 1}",
                f"0 for all {K} rows",
                "remedy   write the groups out: zeros mean 'in order' only where desc_act is false",
            )
        in_order = bool((g_idx == own.in_order(K, g_idx.device)).all())
        return replace(own, positional=G > 1 and in_order, indexed=True)

    def _believed(self, headers: spec.LayerHeaders) -> "GPTQConfig":
        """With the bits that all shapes agree on, whatever the config says."""
        codes, zeros, scales = (headers.shapes.get(name, ()) for name in ("qweight", "qzeros", "scales"))
        if len(codes) != 2 or len(zeros) != 2 or len(scales) != 2 or not all((*zeros, *scales)):
            return self
        bits, rest = divmod(32 * zeros[1], scales[1])
        if rest or bits == self.bits or bits not in BITS or codes[0] * 32 % bits:
            return self
        K, g_idx = codes[0] * 32 // bits, headers.facts.get("g_idx")
        agree = codes[1] == scales[1] and zeros[0] == scales[0] == self.groups(K)
        if not agree or (g_idx is not None and len(g_idx) != K):
            return self
        return replace(self, bits=bits, claimed_bits=self.bits)

    def notes(self, headers: spec.LayerHeaders) -> tuple[str, ...]:
        """Bits are what shapes say, and act order is what `g_idx` says, whatever the config claims."""
        said = []
        if self.claimed_bits is not None:
            said.append(f"bits is {self.claimed_bits}, the shapes are of {self.bits} bits and are believed")
        if not self.indexed:
            found = "all zero, and desc_act is false" if "g_idx" in headers.facts else "not stored"
            return (*said, f"g_idx is {found}: the groups lie in order")
        act_order = not self.positional and bool(headers.facts["g_idx"].any())
        if self.desc_act is not None and self.desc_act != act_order:
            found = "in act order" if act_order else "in order"
            said.append(f"desc_act is {str(self.desc_act).lower()}, g_idx is {found} and is believed")
        return tuple(said)


@dataclass(frozen=True, eq=False, repr=False)
class GPTQWeight(spec.Weight):
    """A GPTQ layer, or a share of one.

    w[n, k] = scales[g, n] * (code[k, n] - zero[g, n]), g = g_idx[k], or k / group_size where there is none.
    Source: the files of gptqmodel, auto-gptq and auto-round, to which it is bit-equal.

    Attributes
    ----------
    qweight
        Codes, packed along K, first row in the low bits: (K * bits / 32, N), int32.
    qzeros
        Zero points, packed along N, in the convention of `config.zeros`: (G, N * bits / 32), int32.
    scales
        (G, N), fp16, bf16 or fp32.
    g_idx
        The group of each input, in any order: (K,), int32, int64 or int16; None: the groups lie in order.

    Examples
    --------
    >>> import torch
    >>> from qload import GPTQConfig, GPTQWeight
    >>> weight = GPTQWeight(
    ...     config=GPTQConfig(bits=4, group_size=32),
    ...     qweight=torch.full((4, 8), 0x76543210, dtype=torch.int32),  # the codes 0 to 7
    ...     qzeros=torch.zeros(1, 1, dtype=torch.int32),  # 0 on disk is a zero point of 1
    ...     scales=torch.full((1, 8), 0.5).half(),
    ...     g_idx=torch.zeros(32, dtype=torch.int32),
    ... )
    >>> weight.shape, weight.dequantize()[0, :8]
    ((8, 32), tensor([-0.5000,  0.0000,  0.5000,  1.0000,  1.5000,  2.0000,  2.5000,  3.0000]))
    """

    config: GPTQConfig
    qweight: Tensor
    qzeros: Tensor
    scales: Tensor
    g_idx: Tensor | None = None

    format: ClassVar[str] = "gptq"
    example: ClassVar[GPTQConfig] = GPTQConfig(bits=4, group_size=128, positional=True)

    @classmethod
    def tensors(cls, config: GPTQConfig) -> tuple[TensorSpec, ...]:
        """Groups are cut with K where they lie in order and every cut falls between two of them.

        Without an index every cut has to.
        """
        b, stored = config.bits, config.indexed is not False
        groups = f"K/{config.group_size}^{'|G' * stored}" if config.positional else "G"
        index = TensorSpec("g_idx", INDICES, "K", Role.INDEX, fact=True, index_of="G" if stored else None)
        return (
            TensorSpec("qweight", (torch.int32,), f"K*{b}/32 N", Role.WORD),
            TensorSpec("qzeros", (torch.int32,), f"{groups} N*{b}/32", Role.WORD),
            TensorSpec("scales", SCALES, f"{groups} N", Role.SCALE),
            replace(index, optional=config.indexed is not True, spent=not stored),
        )

    def groups_of_inputs(self) -> Tensor:
        """The group of each input (K,), as `g_idx` says or in order."""
        if self.g_idx is None or not self.config.indexed:
            return self.config.in_order(self.layer.K, self.device)
        return self.g_idx

    def stored(self) -> StoredCodes:
        """As it lies."""
        bits, size, groups = self.config.bits, self.config.group_size, self.scales.shape[0]
        in_runs = self.config.positional or groups == 1
        return StoredCodes(
            codes=gptq.rows(bits).packed(self.qweight).T,
            scales=self.scales.T,
            zeros=self.qzeros,
            zero_rule=self.config.zeros.rule(bits),
            run=size if self.config.positional and size > 0 else max(self.layer.K, 1),
            k_group=None if in_runs else self.groups_of_inputs().to(torch.int32).contiguous(),
        )

    def codes(self) -> spec.Codes:
        """Codes, zero points and scales in plain order, grouped by `g_idx`."""
        bits = self.config.bits
        return spec.Codes(
            bits=bits,
            codes=gptq.rows(bits).packed(self.qweight).T,
            scales=self.scales.float().T,
            zeros=self.config.zeros.read(self.qzeros, gptq.columns(bits)).T,
            k_group=self.groups_of_inputs().long(),
        )
