"""GPTQ: integer codes, one scale and zero point per group of inputs.

On disk, for a layer of K inputs and N outputs in G groups, b bits:

    qweight  int32             (K*b/32, N)  codes, packed along K, first row in the low bits
    qzeros   int32             (G, N*b/32)  zero points, packed along N, in the convention of `zeros`
    scales   fp16, bf16, fp32  (G, N)
    g_idx    int32             (K,)         the group of each row; any order (act order)

    w[n, k] = scales[g, n] * (code[k, n] - zero[g, n]),   g = g_idx[k]

Without act order tools may omit `g_idx` or write zeros: the groups are in order then, and a cut of K inside
a group is refused. The shapes of zero points and scales give the bits. Source: gptqmodel 7.7.0,
auto-gptq 0.7.1 and auto-round 0.16.1, bit-equal to all.

The format `gptq` stores a zero point minus one; `spec.zero_point_evidence` tells how zero points of 0 wrap.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

from qload import dtypes, spec
from qload.devices import StoredCodes
from qload.layouts import STORED_MINUS_ONE, ZeroPoints, gptq
from qload.lazy_torch import Tensor, torch
from qload.spec import Layer, Role, TensorSpec
from qload.spec.integers import Integers, IntegerWeight, Origin, from_codes, record_origin
from qload.spec.weight import has_middle_zeros
from qload.spec.zero_point_evidence import ASYMMETRIC, DOUBTFUL, Evidence, EvidencedZeroPoints

BITS = (2, 3, 4, 8)
SCALES = (dtypes.float16, dtypes.bfloat16, dtypes.float32)
INDICES = (dtypes.int32, dtypes.int64, dtypes.int16)


@dataclass(frozen=True)
class GPTQConfig(spec.Grouped, EvidencedZeroPoints):
    """Config of all GPTQ layers of a checkpoint.

    Attributes
    ----------
    bits
        Bits of a code: 2, 3, 4 or 8.
    group_size
        Inputs that share a scale; -1: one group.
    zeros
        Convention of stored zero points; `Stored()` for gptq_v2.
    positional
        Whether the groups of the whole layer are in order; a cut between two groups then cuts the scales too.
        `g_idx` decides, when a layer is loaded or constructed.
    desc_act
        Claim of the config that inputs are in act order; `g_idx` decides.
    indexed
        Whether a stored `g_idx` gives the groups; False: groups are in order; None: by the layer.
    evidence
        Evidence for `zeros`, one of `Evidence`; None: the values were not examined.
    asymmetric
        Whether some zero point is not in the middle of the codes, against the `sym` of the config.
    claimed_bits
        Bits claimed by the config, if the shapes of the layer contradict them.
    """

    name: ClassVar[str] = "gptq"

    bits: int
    group_size: int
    zeros: ZeroPoints = STORED_MINUS_ONE
    positional: bool = False
    desc_act: bool | None = field(default=None, compare=False)  # only a claim
    indexed: bool | None = field(default=True, compare=False)  # storage, not meaning
    claimed_bits: int | None = field(default=None, compare=False)  # only a claim
    evidence: Evidence | None = field(default=None, compare=False, repr=False)
    asymmetric: bool = field(default=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        self.check_bits(self.bits, *BITS)
        self.check_group_size()

    def for_layer(self, headers: spec.LayerHeaders) -> GPTQConfig:
        """Read bits from shapes, and the order of groups from `g_idx`.

        ShapeError if the number of groups contradicts the group size; AmbiguousIndexError for an index of
        zeros with several groups, unless the config denies act order.
        """
        config = replace(self._with_stored_bits(headers), positional=False)
        sizes = headers.sizes(GPTQWeight.tensors(config))
        K, G = sizes["K"], sizes["G"]
        config._check_groups(headers, "scales", sizes)
        g_idx = None if config.indexed is False else headers.facts.get("g_idx")
        if g_idx is None or (G > 1 and not g_idx.any() and config.desc_act is False):
            return replace(config, positional=G > 1, indexed=False)
        if G > 1 and not g_idx.any():
            meaning = "zeros mean 'in order' only where desc_act is false"
            raise headers.ambiguous_index("g_idx", sizes, "row", meaning)
        in_order = config.is_in_order(g_idx, K)
        return replace(config, positional=G > 1 and in_order, indexed=True)

    @property
    def doubt(self) -> str:
        """Warning about zero points of 0 without evidence for their reading."""
        return DOUBTFUL if self.evidence == "none" else ""

    @property
    def denied(self) -> str:
        """Note on zero points off the middle under a config with `sym`."""
        return ASYMMETRIC if self.asymmetric else ""

    def _with_stored_bits(self, headers: spec.LayerHeaders) -> GPTQConfig:
        """Return the config with the bits of all shapes, if these agree on others than claimed."""
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
        """Notes on claimed bits and act order that shapes and `g_idx` contradict."""
        notes = []
        if self.claimed_bits is not None:
            notes.append(f"bits is {self.claimed_bits}, the shapes are of {self.bits} bits and are believed")
        if not self.indexed:
            state = "all zero, and desc_act is false" if "g_idx" in headers.facts else "not stored"
            return (*notes, f"g_idx is {state}: the groups are in order")
        act_order = not self.positional and bool(headers.facts["g_idx"].any())
        if self.desc_act is not None and self.desc_act != act_order:
            order = "in act order" if act_order else "in order"
            notes.append(f"desc_act is {str(self.desc_act).lower()}, g_idx is {order} and is believed")
        return tuple(notes)


@dataclass(frozen=True, eq=False, repr=False)
class GPTQWeight(IntegerWeight):
    """A GPTQ layer, or a share of one.

    w[n, k] = scales[g, n] * (code[k, n] - zero[g, n]), g = g_idx[k], or k / group_size without an index.
    Source: gptqmodel, auto-gptq and auto-round, bit-equal to their files.

    Attributes
    ----------
    qweight
        Codes, packed along K, first row in the low bits: (K * bits / 32, N), int32.
    qzeros
        Zero points, packed along N, in the convention of `config.zeros`: (G, N * bits / 32), int32.
    scales
        (G, N), fp16, bf16 or fp32.
    g_idx
        The group of each input, in any order: (K,), int32, int64 or int16; None: the groups are in order.

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
    codes_field: ClassVar[str] = "qweight"
    example: ClassVar[GPTQConfig] = GPTQConfig(bits=4, group_size=128, positional=True)

    @classmethod
    def tensors(cls, config: GPTQConfig) -> tuple[TensorSpec, ...]:
        """Declare the tensors; groups in order are cut with K, if every cut falls between two of them.

        Without an index every cut has to.
        """
        b, stored = config.bits, config.indexed is not False
        groups = f"K/{config.group_size}^{'|G' * stored}" if config.positional else "G"
        index = TensorSpec("g_idx", INDICES, "K", Role.INDEX, fact=True, index_of="G" if stored else None)
        return (
            TensorSpec("qweight", (dtypes.int32,), f"K*{b}/32 N", Role.WORD),
            TensorSpec("qzeros", (dtypes.int32,), f"{groups} N*{b}/32", Role.WORD),
            TensorSpec("scales", SCALES, f"{groups} N", Role.SCALE),
            replace(index, optional=config.indexed is not True, spent=not stored),
        )

    def groups_of_inputs(self) -> Tensor:
        """Group of each input (K,), from `g_idx` or in order."""
        if self.g_idx is None or not self.config.indexed:
            return self.config.in_order(self.layer.K, self.device)
        return self.g_idx

    def stored(self) -> StoredCodes:
        """Describe the stored order for kernels."""
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
        """Return codes, zero points and scales in plain order, grouped by `g_idx`."""
        bits = self.config.bits
        return spec.Codes(
            bits=bits,
            codes=gptq.rows(bits).packed(self.qweight).T,
            scales=self.scales.float().T,
            zeros=self.config.zeros.read(self.qzeros, gptq.columns(bits)).T,
            k_group=self.groups_of_inputs().long(),
        )

    def to_integers(self) -> Integers:
        """Convert to plain integers: codes, logical zero points, and the group of each row."""
        bits, scales, symmetric = self.config.bits, self.scales, self.is_symmetric()
        if symmetric:  # all zero points share one element
            zeros = scales.new_full((1, 1), 2 ** (bits - 1), dtype=torch.int32).expand(scales.shape)
        else:
            zeros = self.config.zeros.read(self.qzeros, gptq.columns(bits))
        return Integers(
            bits=bits,
            group_size=self.config.group_size,
            unpack=lambda: gptq.rows(bits).packed(self.qweight),
            scales=scales,
            zeros=zeros,
            g_idx=self.groups_of_inputs(),
            layer=record_origin(self, self.g_idx),
            convention=self.config.zeros,
            gptq_words=self.qweight,
            known_symmetric=symmetric,
        )

    def has_ordered_groups(self) -> bool:
        """Return True if the config says groups are in order and the number of groups agrees."""
        config, K = self.config, self.layer.K
        return config.positional and config.group_size > 0 and config.groups(K) == self.scales.shape[0]

    def is_symmetric(self) -> bool:
        """Return True if every word of zero points has all zero points 2**(bits - 1); unpacks nothing."""
        return has_middle_zeros(self.qzeros, self.config.bits, self.config.zeros)

    @classmethod
    def from_integers(
        cls, integers: Integers, origin: Origin | None = None, zeros: ZeroPoints | None = None
    ) -> Self:
        """Convert `integers` exactly; RepackError for short words or zero points beyond the convention.

        `zeros`: convention of stored zero points; None: that of `origin`, else minus one.
        """
        zeros = zeros or (origin.config.zeros if origin else STORED_MINUS_ONE)
        integers.reject("gptq", integers.find_short_words())
        config, qweight = _choose_config(integers, zeros), integers.gptq_words
        if qweight is None:
            qweight = integers.pack_codes("qweight", gptq.rows(integers.bits), integers.unpack())
        return cls(
            config=config,
            qweight=qweight,
            qzeros=integers.pack_zero_points(zeros),
            scales=integers.scales.contiguous(),
            g_idx=None
            if config.indexed is False
            else integers.g_idx.to(integers.origin.index_dtype or torch.int32),
            layer=integers.layer,
        )

    @classmethod
    def from_codes(cls, codes: spec.Codes, scales: Tensor, layer: Layer, config: GPTQConfig) -> Self:
        """Make the weight of a `layer` with `config` of `codes`, and `scales` (G, N) in their own dtype."""
        with_origin = replace(layer, origin=Origin(cls, config))
        integers = from_codes(codes, scales, with_origin, config.group_size)
        return replace(cls.from_integers(integers, zeros=config.zeros), layer=layer)


def _choose_config(integers: Integers, zeros: ZeroPoints) -> GPTQConfig:
    """Return the config of the original GPTQ weight, or one made from the groups."""
    origin = integers.origin
    if isinstance(origin.config, GPTQConfig):
        return replace(origin.config, zeros=zeros)
    several = integers.groups > 1
    size = integers.group_size if several else -1
    return GPTQConfig(integers.bits, size, zeros, positional=several and integers.in_order)


FORMATS = (GPTQWeight,)
METHODS = ()  # read by detect.methods
