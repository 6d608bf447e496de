"""compressed-tensors, pack-quantized: codes in words along K, one scale for each group of inputs.

On disk, for a layer of K inputs and N outputs in G groups, b bits, w(X) = X*b/32 or X/(32//b), rounded up:

    weight_packed      int32             (N, w(K))   codes, in one of the two packings of `layouts`
    weight_scale       fp16, bf16, fp32  (N, G)
    weight_zero_point  int32             (w(N), G)   zero points, packed along N; asymmetric layers only
    weight_g_idx       int32             (K,)        the group of each input; act order only
    weight_shape       int64             (2,)        N and K: a partly filled last word hides K
    input_scale        fp16, bf16, fp32  () or (1,)  of the activations; static ones only
    input_zero_point   int8              () or (1,)  likewise

    w[n, k] = weight_scale[n, g] * (code[n, k] - zero[n, g]),   g = g_idx[k], or k / g without an index

Without stored zero points all are 2**(b-1). The packing changed in version 0.18. The shapes decide between
the two packings, and the version in the config where both fit.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, Self

from qload import devices, dtypes, spec
from qload.devices import StoredCodes
from qload.errors import RepackError
from qload.formats.compressed_tensors import words
from qload.formats.compressed_tensors.words import (
    INDICES,
    INPUT_SCALE,
    INPUT_ZERO_POINT,
    SCALES,
    SHAPE,
    PackedWords,
)
from qload.layouts import compressed_tensors
from qload.lazy_torch import Tensor, torch
from qload.sentences.strided_digits import WHOLE_BITS
from qload.spec import Role, TensorSpec
from qload.spec.integers import (
    UNUSED_BITS,
    Integers,
    IntegerWeight,
    Origin,
    default_zero_points,
    record_origin,
)

FREE_AXES = {"weight_packed": "N W", "weight_scale": "N G", "weight_zero_point": "Z G", "weight_g_idx": "K"}

MISSING_INDEX_REASON = (
    "reason   by the config's actorder any input may be of any group; only this tensor says which\n"
    "  remedy   save the layer with it, or, if the inputs are in order, an actorder of 'weight' or null"
)


@dataclass(frozen=True)
class CTPackConfig(PackedWords, spec.Grouped, spec.Config):
    """Config of pack-quantized layers.

    Attributes
    ----------
    bits
        Bits of a code: 2 to 8.
    group_size
        Inputs that share a scale; -1: one group.
    symmetric
        Whether zero points are optional; for a described layer, whether there are none.
    act_order
        Whether `weight_g_idx` is required.
    dense
        Whether codes straddle words, as in version 0.18 and later; None: unknown.
    groups_lie
        "in order" without an index, "positional" in order with an index, or "anywhere" by the index.
    shape
        (N, K) of the whole layer, if described.
    """

    name: ClassVar[str] = "ct_pack"

    bits: int
    group_size: int
    symmetric: bool = True
    act_order: bool = False
    dense: bool | None = None
    groups_lie: Literal["in order", "positional", "anywhere"] = "in order"
    shape: tuple[int, int] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        self.check_bits(self.bits, *compressed_tensors.BITS)
        self.check_group_size()

    def for_layer(self, headers: spec.LayerHeaders) -> CTPackConfig:
        """Read the packing and the order of groups from shapes, `weight_shape` and `weight_g_idx`.

        ShapeError or MismatchError for a contradiction; AmbiguousIndexError for an index of zeros with
        several groups.
        """
        specs = CTPackWeight.tensors(self)
        sizes = headers.sizes([replace(s, text=FREE_AXES.get(s.name, s.text), index_of=None) for s in specs])
        headers.check_single(("input_scale", "input_zero_point"))
        config = replace(words.for_words(self, headers, sizes), symmetric="Z" not in sizes)
        sizes |= headers.sizes(CTPackWeight.tensors(config)[:1], config.known())
        config._check_groups(headers, "weight_scale", sizes, outputs_first=True)
        K, G, g_idx = sizes["K"], sizes["G"], headers.facts.get("weight_g_idx")
        if g_idx is None:
            return replace(config, group_size=-1) if G == 1 else config
        if G > 1 and not g_idx.any():
            meaning = "zeros can mean groups in order, or group 0 for all"
            raise headers.ambiguous_index("weight_g_idx", sizes, "input", meaning)
        in_order = G > 1 and config.is_in_order(g_idx, K)
        return replace(config, groups_lie="positional" if in_order else "anywhere")


@dataclass(frozen=True, eq=False, repr=False)
class CTPackWeight(IntegerWeight):
    """A pack-quantized layer, or a share of one.

    w[n, k] = weight_scale[n, g] * (code[n, k] - zero[n, g]), g = weight_g_idx[k], or k / group_size
    without an index. Source: compressed-tensors, bit-equal to its files after one rounding.

    Attributes
    ----------
    weight_packed
        Codes in words along K: (N, ceil(K * bits / 32)), or (N, ceil(K / (32 // bits))) before version 0.18,
        int32.
    weight_scale
        (N, G), fp16, bf16 or fp32.
    weight_zero_point
        Zero points, packed along N likewise: (ceil(N * bits / 32), G), int32; None: all are 2**(bits - 1).
    weight_g_idx
        The group of each input: (K,), int32 or int64; None: in order.
    input_scale, input_zero_point
        Of the activations, static ones only: () or (1,), or one per fused part, a float and int8; None: not
        stored.
    """

    config: CTPackConfig
    weight_packed: Tensor
    weight_scale: Tensor
    weight_zero_point: Tensor | None = None
    weight_g_idx: Tensor | None = None
    input_scale: Tensor | None = None
    input_zero_point: Tensor | None = None

    format: ClassVar[str] = "ct_pack"
    example: ClassVar[CTPackConfig] = CTPackConfig(4, 128, symmetric=False, act_order=True)

    @classmethod
    def tensors(cls, config: CTPackConfig) -> tuple[TensorSpec, ...]:
        """Declare the tensors; zero points bind N to whole words, groups without an index bind K."""
        ordered = "1" if config.group_size == -1 else f"K/{config.group_size}^"
        groups = {"in order": ordered, "positional": f"{ordered}|G", "anywhere": "G"}[config.groups_lie]
        bits, dense = config.bits, config.dense is not False
        K, N = (compressed_tensors.stored(dim, bits, dense) for dim in "KN")
        index = TensorSpec(
            "weight_g_idx", INDICES, "K", Role.INDEX, fact=True, index_of="G", reason=MISSING_INDEX_REASON
        )
        return (
            TensorSpec("weight_packed", (dtypes.int32,), f"N {K}", Role.WORD),
            TensorSpec("weight_scale", SCALES, f"N {groups}", Role.SCALE),
            TensorSpec(
                "weight_zero_point", (dtypes.int32,), f"{N} {groups}", Role.WORD, optional=config.symmetric
            ),
            replace(index, optional=not config.act_order),
            SHAPE,
            INPUT_SCALE,
            INPUT_ZERO_POINT,
        )

    def stored(self) -> StoredCodes | None:
        """Describe the stored order for kernels; zero points, which are packed along N, are unpacked.

        None if codes straddle words or the last word is partly filled.
        """
        if self.config.bits not in WHOLE_BITS:
            return None
        packing, zeros = compressed_tensors.rows(self.config.bits, True), self.weight_zero_point
        if not self.weight_packed.is_contiguous() or self.layer.K % packing.granule(1):
            return None
        points = None if zeros is None else zeros.T
        if points is not None:
            points = words.unpack(self.config, points, self.layer.N).T
        index = self.weight_g_idx
        return StoredCodes(
            codes=packing.packed(self.weight_packed),
            scales=self.weight_scale,
            zeros=points,
            zero_rule=None,
            run=self.config.rows_of_a_group(self.layer.K),
            k_group=None if index is None else index.to(torch.int32).contiguous(),
        )

    def codes(self) -> spec.Codes:
        """Return codes, zero points and scales in plain order."""
        (N, K), config, index, zeros = self.shape, self.config, self.weight_g_idx, self.weight_zero_point
        groups = config.in_order(K, self.device) if index is None else index.long()
        codes = words.packed_codes(config, self.weight_packed, K)
        plain = spec.symmetric(config.bits, codes.T, self.weight_scale.T, groups)
        return plain if zeros is None else replace(plain, zeros=words.unpack(config, zeros.T, N).T)

    def to_integers(self) -> Integers:
        """Convert to plain integers.

        RepackError for stored input scales, and for unused bits of words other than 0.
        """
        (N, K), config, name = self.shape, self.config, self.layer.name or self.format
        if self.input_scale is not None or self.input_zero_point is not None:
            reason = "no kernel format of integers has a field for the stored scale of its inputs"
            raise RepackError(name, "other layouts", reason)
        index, zeros, dense = self.weight_g_idx, self.weight_zero_point, config.dense is not False
        for count, stored in ((K, self.weight_packed), (N, None if zeros is None else zeros.T)):
            if stored is None or not compressed_tensors.has_unused_bits(count, config.bits, dense):
                continue
            if not torch.equal(words.pack(config, words.unpack(config, stored, count)), stored):
                raise RepackError(name, "other layouts", UNUSED_BITS)
        scales = self.weight_scale.T.contiguous()
        middle = default_zero_points(config.bits, scales)
        return Integers(
            bits=config.bits,
            group_size=config.group_size,
            unpack=lambda: words.packed_codes(config, self.weight_packed, K).T,
            scales=scales,
            zeros=middle if zeros is None else words.unpack(config, zeros.T, N),
            g_idx=config.in_order(K, scales.device) if index is None else index,
            layer=record_origin(self, index, stores_zeros=zeros is not None),
        )

    def skippable_tensor(self) -> str:
        """Name of the code tensor, whose values affect no refusal; "" if words have unused bits."""
        bits, dense = self.config.bits, self.config.dense is not False
        has_unused = compressed_tensors.has_unused_bits(self.layer.whole[1], bits, dense)
        return "" if has_unused else "weight_packed"

    @classmethod
    def from_integers(cls, integers: Integers, origin: Origin | None = None) -> Self:
        """Convert `integers` exactly, or raise RepackError.

        The result has an index if groups are not in order. It has zero points if some differ from
        2**(bits - 1), or if the source stored them. `origin`: the checkpoint weight to restore, with its
        tensors and packing.
        """
        origin = origin or _choose_origin(integers)
        config, codes = origin.config, integers.unpack()
        bits, dense = integers.bits, config.dense is not False
        if compressed_tensors.has_unused_bits(integers.layer.K, bits, dense):
            packed = words.pack(config, devices.plain(codes).T)
        else:
            packing = compressed_tensors.rows(bits, dense)
            packed = integers.pack_codes("weight_packed", packing, codes.T)
        zeros = words.pack(config, integers.zeros).T if origin.stores_zeros else None
        return cls(
            config=config,
            weight_packed=packed,
            weight_scale=_copy_contiguous(integers.scales.T),
            weight_zero_point=None if zeros is None else _copy_contiguous(zeros),
            weight_g_idx=None if origin.index_dtype is None else integers.g_idx.to(origin.index_dtype),
            layer=integers.layer,
        )

    @classmethod
    def sample_facts(cls, config: CTPackConfig, sizes: dict[str, int]) -> dict[str, Tensor]:
        """Shape for `sizes`, with N and K raised to several words and groups of `config`."""
        for dim, unit in (("N", 16), ("K", 48)):
            sizes[dim] *= 1 if sizes[dim] >= unit else unit
        for letter in sizes.keys() & {"G"}:  # of groups with an index
            sizes[letter] = config.groups(sizes["K"])
        return {"weight_shape": torch.tensor([sizes["N"], sizes["K"]])}


def _choose_origin(integers: Integers) -> Origin:
    """Choose config and optional tensors for integers of another format, or raise RepackError."""
    integers.reject("compressed-tensors", _find_repack_conflict(integers))
    stores_zeros, indexed = integers.origin.stores_zeros or not integers.symmetric, not integers.in_order
    config = CTPackConfig(
        integers.bits,
        integers.group_size if integers.groups > 1 else -1,
        symmetric=not stores_zeros,
        act_order=indexed,
        dense=True,
        groups_lie="anywhere" if indexed else "in order",
        shape=integers.shape,
    )
    return Origin(CTPackWeight, config, torch.int32 if indexed else None, stores_zeros)


def _find_repack_conflict(integers: Integers) -> str | None:
    bits, (lowest, highest), groups = integers.bits, integers.span, integers.groups
    if lowest < 0 or highest >= 2**bits:
        return f"a zero point of {lowest if lowest < 0 else highest} does not fit {bits} bits"
    size, K = integers.group_size, integers.layer.K
    if groups > 1 and (size < 1 or -(-K // size) != groups):
        return f"{groups} groups of K = {K} are not of {size} inputs each"
    return None


def _copy_contiguous(tensor: Tensor) -> Tensor:
    """Copy with the strides of a tensor read from a file; `contiguous()` keeps the stride of an axis of 1."""
    return tensor.clone(memory_format=torch.contiguous_format)
