"""compressed-tensors: codes in words along K (pack-quantized), or a byte each (int-quantized).

pack-quantized, codes of 2 to 8 bits. On disk, for a layer of K inputs and N outputs in G groups, b bits,
w(X) = X*b/32 or X/(32//b), rounded up:

    weight_packed      int32             (N, w(K))   codes, in one of the two packings of `layouts`
    weight_scale       fp16, bf16, fp32  (N, G)
    weight_zero_point  int32             (w(N), G)   zero points, packed along N; asymmetric layers only
    weight_g_idx       int32             (K,)        the group of each input; act order only
    weight_shape       int64             (2,)        N and K: a partly filled last word hides K
    input_scale        fp16, bf16, fp32  () or (1,)  of the activations; static ones only
    input_zero_point   int8              () or (1,)  likewise

    w[n, k] = weight_scale[n, g] * (code[n, k] - zero[n, g]),   g = g_idx[k], or k / g without an index

Without stored zero points all are 2**(b-1). The packing changed in version 0.18. The shapes decide between
the two packings, and the version in the config where both fit. Source: compressed-tensors 0.14.0 and 0.20.0,
bit-equal to both after one rounding to the dtype of the scales.

pack-quantized with one scale for the tensor has weight_scale () or (1,), and as zero point an int8 number:

    w[n, k] = weight_scale * (code[n, k] - 2**(b-1) - weight_zero_point)

int-quantized, signed codes of 2 to 8 bits:

    weight             int8              (N, K)
    weight_scale       fp16, bf16, fp32  () or (1,) or (1, 1); (N, 1); (N, K/g); or (N/bn, K/bk), rounded up
    weight_zero_point  int8              shape of weight_scale; asymmetric layers only
    input_scale        fp16, bf16, fp32  () or (1,)  of the activations; static ones only
    input_zero_point   int8              () or (1,)  likewise

    w[n, k] = weight_scale * (weight[n, k] - weight_zero_point)

`codes()` counts from 0; its zero points are 2**(b-1) higher than the stored ones. Source: compressed-tensors
0.20.0, bit-equal to it after one rounding.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, Self

from qload import devices, dtypes, spec
from qload.devices import StoredCodes, StoredRows
from qload.errors import AmbiguousIndexError, ArgumentError, MismatchError, RepackError, ShapeError
from qload.layouts import compressed_tensors
from qload.lazy_torch import Tensor, torch
from qload.loader import ConfiguredFormat
from qload.sentences import WORD_BITS
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

SCALES = (dtypes.float16, dtypes.bfloat16, dtypes.float32)
INDICES = (dtypes.int32, dtypes.int64)
FREE_AXES = {"weight_packed": "N W", "weight_scale": "N G", "weight_zero_point": "Z G", "weight_g_idx": "K"}

MISSING_INDEX_REASON = (
    "reason   by the config's actorder any input may be of any group; only this tensor says which\n"
    "  remedy   save the layer with it, or, if the inputs are in order, an actorder of 'weight' or null"
)


@dataclass(frozen=True)
class CTPackConfig(spec.Grouped, spec.Config):
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

    def known(self) -> dict[str, int]:
        """Return N and K of `weight_shape`, if known."""
        return dict(zip("NK", self.shape, strict=True)) if self.shape else {}

    def for_layer(self, headers: spec.LayerHeaders) -> CTPackConfig:
        """Read the packing and the order of groups from shapes, `weight_shape` and `weight_g_idx`.

        ShapeError or MismatchError for a contradiction; AmbiguousIndexError for an index of zeros with
        several groups.
        """
        specs = CTPackWeight.tensors(self)
        sizes = headers.sizes([replace(s, text=FREE_AXES.get(s.name, s.text), index_of=None) for s in specs])
        N, W, G = sizes["N"], sizes["W"], sizes["G"]
        headers.check_single(("input_scale", "input_zero_point"))
        fact, capacity = (
            headers.facts.get("weight_shape"),
            compressed_tensors.capacity(W, self.bits, self.dense is not False),
        )
        shape = self.shape or (N, sizes.get("K", capacity)) if fact is None else tuple(fact.tolist())
        if shape[0] != N or shape[1] < 1 or shape[1] != sizes.get("K", shape[1]):
            raise MismatchError(
                headers.names.full("weight_shape"), "not the shape of this layer", f"[{N}, K]", str([*shape])
            )
        K, g_idx = shape[1], headers.facts.get("weight_g_idx")
        config = replace(self, shape=(N, K), dense=self._packing(headers, K, W, N, sizes.get("Z")))
        config = replace(config, symmetric="Z" not in sizes)
        headers.sizes(CTPackWeight.tensors(config)[:1], config.known())
        if config.groups(K) != G:
            group, (name, text) = self.rows_of_a_group(K), ("weight_scale", f"({N}, {self.groups(K)})")
            hint = f"for K = {K} and a group size of {self.group_size} in the config"
            full, file = headers.names.full(name), headers.names.file(name)
            raise ShapeError(full, f"{text} = (N, K/{group}^)", headers.shapes[name], file, hint)
        if g_idx is None:
            return replace(config, group_size=-1) if G == 1 else config
        if G > 1 and not g_idx.any():
            full, want = headers.names.full("weight_g_idx"), f"the group of each input, 0 to {G - 1}"
            what = "all zero, with two readings"
            remedy = "remedy   write the groups out: zeros can mean groups in order, or group 0 for all"
            raise AmbiguousIndexError(full, what, want, f"0 for all {K} inputs", remedy)
        in_order = G > 1 and config.is_in_order(g_idx, K)
        return replace(config, groups_lie="positional" if in_order else "anywhere")

    def _packing(self, headers: spec.LayerHeaders, K: int, W: int, N: int, Z: int | None) -> bool:
        """Return whether the words are dense, by the shapes of codes and zero points."""
        counts = [(K, W)] if Z is None else [(K, W), (N, Z)]
        return compressed_tensors.is_dense(headers.names.full("weight_packed"), counts, self.bits, self.dense)


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
        K, N = (compressed_tensors.stored(dim, config.bits, config.dense is not False) for dim in "KN")
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
            TensorSpec("weight_shape", INDICES, "2", Role.INDEX, fact=True, spent=True),
            TensorSpec("input_scale", SCALES, "P", Role.SCALE, optional=True, divides=True),
            TensorSpec("input_zero_point", (dtypes.int8,), "P", Role.WORD, optional=True),
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
            points = compressed_tensors.unpack(points, self.layer.N, self.config.bits, True).T
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
        (N, K), bits, dense = self.shape, self.config.bits, self.config.dense is not False
        index, zeros = self.weight_g_idx, self.weight_zero_point
        groups = self.config.in_order(K, self.device) if index is None else index.long()
        codes = compressed_tensors.packed_codes(self.weight_packed, K, bits, dense)
        plain = spec.symmetric(bits, codes.T, self.weight_scale.T, groups)
        if zeros is None:
            return plain
        return replace(plain, zeros=compressed_tensors.unpack(zeros.T, N, bits, dense).T)

    def to_integers(self) -> Integers:
        """Convert to plain integers.

        RepackError for stored input scales, and for unused bits of words other than 0.
        """
        (N, K), bits, config = self.shape, self.config.bits, self.config
        name = self.layer.name or self.format
        if self.input_scale is not None or self.input_zero_point is not None:
            reason = "no kernel format of integers has a field for the stored scale of its inputs"
            raise RepackError(name, "other layouts", reason)
        dense, index, zeros = config.dense is not False, self.weight_g_idx, self.weight_zero_point
        for count, stored in ((K, self.weight_packed), (N, None if zeros is None else zeros.T)):
            if stored is None or not _has_unused_bits(count, bits, dense):
                continue
            codes = compressed_tensors.unpack(stored, count, bits, dense)
            if not torch.equal(compressed_tensors.pack(codes, bits, dense), stored):
                raise RepackError(name, "other layouts", UNUSED_BITS)
        scales = self.weight_scale.T.contiguous()
        return Integers(
            bits=bits,
            group_size=config.group_size,
            unpack=lambda: compressed_tensors.packed_codes(self.weight_packed, K, bits, dense).T,
            scales=scales,
            zeros=compressed_tensors.unpack(zeros.T, N, bits, dense)
            if zeros is not None
            else default_zero_points(bits, scales),
            g_idx=config.in_order(K, scales.device) if index is None else index,
            layer=record_origin(self, index, stores_zeros=zeros is not None),
        )

    def skippable_tensor(self) -> str:
        """Name of the code tensor, whose values affect no refusal; "" if words have unused bits."""
        config, K = self.config, self.layer.whole[1]
        return "" if _has_unused_bits(K, config.bits, config.dense is not False) else "weight_packed"

    @classmethod
    def from_integers(cls, integers: Integers, origin: Origin | None = None) -> Self:
        """Convert `integers` exactly, or raise RepackError.

        The result has an index if groups are not in order. It has zero points if some differ from
        2**(bits - 1), or if the source stored them. `origin`: the checkpoint weight to restore, with its
        tensors and packing.
        """
        origin = origin or _choose_origin(integers)
        bits, dense, codes = integers.bits, origin.config.dense is not False, integers.unpack()
        if _has_unused_bits(integers.layer.K, bits, dense):
            words = compressed_tensors.pack(devices.plain(codes).T, bits, dense)
        else:
            words = integers.pack_codes("weight_packed", compressed_tensors.rows(bits, dense), codes.T)
        zeros = compressed_tensors.pack(integers.zeros, bits, dense).T if origin.stores_zeros else None
        return cls(
            config=origin.config,
            weight_packed=words,
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


def _has_unused_bits(count: int, bits: int, dense: bool) -> bool:
    """Return True if the words of `count` codes have bits without a code."""
    return compressed_tensors.words(count, bits, dense) * WORD_BITS != count * bits


def _copy_contiguous(tensor: Tensor) -> Tensor:
    """Copy with the strides of a tensor read from a file; `contiguous()` keeps the stride of an axis of 1."""
    return tensor.clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class CTPackTensorConfig(spec.Config):
    """Config of pack-quantized layers with one scale; ArgumentError for other bits than 2 to 8.

    Attributes
    ----------
    bits
        Bits of a code: 2 to 8.
    symmetric
        Whether the zero point is optional.
    dense
        Whether codes straddle words, as in version 0.18 and later; None: unknown.
    shape
        (N, K) of the whole layer, if described.
    """

    name: ClassVar[str] = "ct_pack_tensor"

    bits: int
    symmetric: bool = True
    dense: bool | None = None
    shape: tuple[int, int] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.bits not in compressed_tensors.BITS:
            raise ArgumentError("ct_pack_tensor: bits", "2 to 8", str(self.bits))

    def known(self) -> dict[str, int]:
        """Return N and K of `weight_shape`, if known."""
        return dict(zip("NK", self.shape, strict=True)) if self.shape else {}

    def for_layer(self, headers: spec.LayerHeaders) -> CTPackTensorConfig:
        """Read the packing from shapes and `weight_shape`.

        MismatchError for a contradiction; ShapeError for several scales of one tensor.
        """
        specs = CTPackTensorWeight.tensors(self)
        headers.check_single(tensor.name for tensor in specs if tensor.text == "P")
        sizes = headers.sizes([replace(specs[0], text="N W"), *specs[1:]])
        N, W, fact = sizes["N"], sizes["W"], headers.facts.get("weight_shape")
        capacity = compressed_tensors.capacity(W, self.bits, self.dense is not False)
        stated_N, K = self.shape or (N, capacity) if fact is None else fact.tolist()
        if stated_N != N or K < 1:
            raise MismatchError(
                headers.names.full("weight_shape"),
                "not the shape of this layer",
                f"[{N}, K]",
                f"[{stated_N}, {K}]",
            )
        name = headers.names.full("weight_packed")
        dense = compressed_tensors.is_dense(name, [(K, W)], self.bits, self.dense)
        config = replace(self, shape=(N, K), dense=dense)
        headers.sizes(CTPackTensorWeight.tensors(config)[:1], config.known())
        return config


@dataclass(frozen=True, eq=False, repr=False)
class CTPackTensorWeight(spec.Weight):
    """A pack-quantized layer with one scale, or a share of one; fused parts keep a scale each.

    w[n, k] = weight_scale * (code[n, k] - 2**(bits - 1) - weight_zero_point). Source: compressed-tensors,
    bit-equal to its files after one rounding.

    Attributes
    ----------
    weight_packed
        Codes in words along K: (N, ceil(K * bits / 32)), or (N, ceil(K / (32 // bits))) before version 0.18,
        int32.
    weight_scale
        () or (1,), or one per fused part, fp16, bf16 or fp32.
    weight_zero_point
        Signed, same shape, int8; None: 0.
    input_scale, input_zero_point
        Of the activations, static ones only, same shape: a float and int8; None: not stored.
    """

    config: CTPackTensorConfig
    weight_packed: Tensor
    weight_scale: Tensor
    weight_zero_point: Tensor | None = None
    input_scale: Tensor | None = None
    input_zero_point: Tensor | None = None

    format: ClassVar[str] = "ct_pack_tensor"
    example: ClassVar[CTPackTensorConfig] = CTPackTensorConfig(4, symmetric=False)

    @classmethod
    def tensors(cls, config: CTPackTensorConfig) -> tuple[TensorSpec, ...]:
        """Declare the tensors; words bind cuts of K."""
        half = 2 ** (config.bits - 1)
        K = compressed_tensors.stored("K", config.bits, config.dense is not False)
        zero = TensorSpec("weight_zero_point", (dtypes.int8,), "P", Role.WORD, between=(-half, half - 1))
        return (
            TensorSpec("weight_packed", (dtypes.int32,), f"N {K}", Role.WORD),
            TensorSpec("weight_scale", SCALES, "P", Role.SCALE),
            replace(zero, optional=config.symmetric),
            TensorSpec("weight_shape", (dtypes.int32, dtypes.int64), "2", Role.INDEX, fact=True, spent=True),
            TensorSpec("input_scale", SCALES, "P", Role.SCALE, optional=True, divides=True),
            TensorSpec("input_zero_point", (dtypes.int8,), "P", Role.WORD, optional=True),
        )

    def codes(self) -> spec.Codes:
        """Return unsigned codes, with a scale and a zero point for each part."""
        (_, K), bits, zeros = self.shape, self.config.bits, self.weight_zero_point
        scales, n_group = self.weight_scale.float().reshape(-1, 1), None
        if len(scales) > 1:
            parts = torch.tensor(self.layer.parts, device=self.device)
            n_group = torch.arange(len(parts), device=self.device).repeat_interleave(parts)
        stored = torch.zeros_like(scales, dtype=torch.int32) if zeros is None else zeros.reshape(-1, 1).int()
        return spec.Codes(
            bits=bits,
            codes=compressed_tensors.packed_codes(
                self.weight_packed, K, bits, self.config.dense is not False
            ),
            scales=scales,
            zeros=stored + 2 ** (bits - 1),
            k_group=None,
            n_group=n_group,
        )

    @classmethod
    def sample_facts(cls, config: CTPackTensorConfig, sizes: dict[str, int]) -> dict[str, Tensor]:
        """Shape for `sizes`, with K raised to several words of a `config`."""
        sizes["K"] *= 1 if sizes["K"] >= 48 else 48
        return {"weight_shape": torch.tensor([sizes["N"], sizes["K"]])}


INT_BITS, BYTE_BITS = range(2, 9), 8


@dataclass(frozen=True)
class CTIntConfig(spec.Config):
    """Config of int-quantized layers; ArgumentError for invalid bits or blocks.

    Attributes
    ----------
    block
        (outputs, inputs) per scale, -1 for all inputs; None: one scale for the tensor.
    bits
        Bits of a code: 2 to 8.
    symmetric
        Whether zero points are optional.
    static
        Whether the activations' scale is required.
    zeros
        "as stored"; or "checked": zero points are optional, and read when a layer is described. If all are 0,
        its config has "0" and loads leave them out, else "as stored".
    vector
        Whether scales of outputs are stored as (N,); set once a layer is described.
    column
        Whether one scale for the tensor is stored as (1, 1); set once a layer is described.
    """

    name: ClassVar[str] = "ct_int"

    block: tuple[int, int] | None
    bits: int = 8
    symmetric: bool = True
    static: bool = False
    zeros: Literal["as stored", "checked", "0"] = field(default="as stored", repr=False)
    vector: bool = field(default=False, compare=False, repr=False)
    column: bool = field(default=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.bits not in INT_BITS:
            raise ArgumentError("ct_int: bits", "2 to 8", str(self.bits))
        if self.block and (self.block[0] < 1 or self.block[1] < -1 or self.block[1] == 0):
            raise ArgumentError("ct_int: block", "(outputs, inputs), each at least 1", str(self.block))

    def for_layer(self, headers: spec.LayerHeaders) -> CTIntConfig:
        """Normalize a group of all inputs to -1; ShapeError for several scales of one tensor."""
        is_column = self.block is None and headers.shapes["weight_scale"] == (1, 1)
        config = replace(self, column=True) if is_column else self
        tensors = CTIntWeight.tensors(config)
        K = headers.sizes(tensors[:1])["K"]
        headers.check_single(tensor.name for tensor in tensors if tensor.text == "P")
        one_group = self.block and self.block[0] == 1 and self.block[1] >= K
        config = replace(config, block=(1, -1)) if one_group else config
        if config.block == (1, -1) and len(headers.shapes["weight_scale"]) == 1:
            config = replace(config, vector=True)
        points = headers.facts.get("weight_zero_point")
        if self.zeros != "checked" or points is None:
            return config
        headers.sizes(CTIntWeight.tensors(config), headers.sizes(tensors[:1]))
        return replace(config, zeros="as stored" if points.any() else "0")

    @property
    def axes(self) -> str:
        """Axis text of the scale."""
        if self.block is None:
            return "P 1" if self.column else "P"
        if self.vector:
            return "N"
        rows, columns = self.block
        return f"{'N' if rows == 1 else f'N/{rows}^'} {'1' if columns == -1 else f'K/{columns}^'}"


@dataclass(frozen=True, eq=False, repr=False)
class CTIntWeight(spec.Weight):
    """An int-quantized layer, or a share of one; fused parts keep a scale each.

    w[n, k] = weight_scale * (weight[n, k] - weight_zero_point). Source: compressed-tensors, bit-equal
    to its files after one rounding.

    Attributes
    ----------
    weight
        Signed codes, a byte each: (N, K), int8.
    weight_scale
        One for the tensor, () or (1,) or (1, 1); per output, (N, 1) or (N,); per group, (N, K / g); or per
        block, (ceil(N / bn), ceil(K / bk)); fp16, bf16 or fp32.
    weight_zero_point
        Shape of the scale, int8; None: all are 0.
    input_scale, input_zero_point
        Of the activations, static ones only: () or (1,), a float and int8; None: not stored.
    """

    config: CTIntConfig
    weight: Tensor
    weight_scale: Tensor
    weight_zero_point: Tensor | None = None
    input_scale: Tensor | None = None
    input_zero_point: Tensor | None = None

    format: ClassVar[str] = "ct_int"
    example: ClassVar[CTIntConfig] = CTIntConfig((1, -1))
    further: ClassVar[tuple[CTIntConfig, ...]] = (CTIntConfig((1, 128)), CTIntConfig((128, 128)))

    @classmethod
    def tensors(cls, config: CTIntConfig) -> tuple[TensorSpec, ...]:
        """Declare the tensors; groups bind cuts of K, blocks bind both axes and the seams of fused layers."""
        int8, axes, half = (dtypes.int8,), config.axes, 2 ** (config.bits - 1)
        codes = (-half, half - 1)
        zero = TensorSpec(
            "weight_zero_point", int8, axes, Role.WORD, optional=config.symmetric, between=codes
        )
        return (
            TensorSpec("weight", int8, "N K", Role.WORD, between=codes),
            TensorSpec("weight_scale", SCALES, axes, Role.SCALE),
            replace(zero, fact=config.zeros != "as stored", spent=config.zeros == "0"),
            TensorSpec("input_scale", SCALES, "P", Role.SCALE, optional=not config.static, divides=True),
            TensorSpec("input_zero_point", int8, "P", Role.WORD, optional=True),
        )

    def stored(self) -> StoredRows | None:
        """Describe the stored order for kernels; None for other bits than 8 or a scale per fused part."""
        (N, K), block, zeros = self.shape, self.config.block, self.weight_zero_point
        if self.config.bits != BYTE_BITS or (block is None and len(self.layer.parts) > 1):
            return None
        scales = self.weight_scale.reshape(self.weight_scale.shape[0], -1)
        rows, columns = block or (N, K)
        n_run, k_run = (min(run, size) if run > 0 else size for run, size in ((rows, N), (columns, K)))
        points = None if zeros is None else zeros.reshape(scales.shape)
        return StoredRows(self.weight, scales, max(n_run, 1), max(k_run, 1), points)

    def codes(self) -> spec.Codes:
        """Return unsigned codes and zero points, with the groups of outputs and inputs."""
        signed, middle = self.signed(), 2 ** (self.config.bits - 1)
        zeros = torch.zeros_like(signed.scales, dtype=torch.int32) if signed.zeros is None else signed.zeros
        unsigned = self.weight.view(torch.uint8) + middle  # modulo 256: one byte per code
        return replace(signed, codes=unsigned, zeros=zeros + middle)

    def signed(self) -> spec.Codes:
        """Return signed codes and zero points, as stored."""
        zeros, device = self.weight_zero_point, self.device
        k_group: Tensor | None = None
        n_group: Tensor | None = None
        if self.config.block is None:
            if self.weight_scale.numel() > 1:
                parts = torch.tensor(self.layer.parts, device=device)
                n_group = torch.arange(parts.numel(), device=device).repeat_interleave(parts)
        else:
            rows, columns = self.config.block
            n_group = torch.arange(self.layer.N, device=device) // rows if rows > 1 else None
            k_group = torch.arange(self.layer.K, device=device) // columns if columns > 0 else None
        scales = self.weight_scale.float().reshape(self.weight_scale.shape[0], -1)
        return spec.Codes(
            bits=self.config.bits,
            codes=self.weight,
            scales=scales,
            zeros=None if zeros is None else zeros.reshape(scales.shape).int(),
            k_group=k_group,
            n_group=n_group,
        )


def dialects(formats: tuple[ConfiguredFormat, ...]) -> tuple[ConfiguredFormat, ...]:
    """int-quantized with one scale per tensor or output, for a config with either kind.

    For a config with groups, one scale per output is a remainder of several scales.
    """
    integers = [
        fmt for fmt in formats if isinstance(fmt.config, CTIntConfig) and fmt.config.block in (None, (1, -1))
    ]
    return tuple(
        replace(fmt, config=replace(fmt.config, block=block))
        for fmt in integers
        for block in (None, (1, -1))
        if isinstance(fmt.config, CTIntConfig)
    )


FORMATS = (CTPackWeight, CTPackTensorWeight, CTIntWeight)
METHODS = ()  # read by detect.methods
