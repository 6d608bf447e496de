"""compressed-tensors: integer codes in words along K (pack-quantized), and a byte each (int-quantized)."""

from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from qload import spec
from qload.devices import StoredCodes, StoredRows
from qload.errors import AmbiguousIndexError, ArgumentError, MismatchError, ShapeError
from qload.layouts import compressed_tensors
from qload.sentences.strided_digits import WHOLE_BITS
from qload.spec import Role, TensorSpec

SCALES = (torch.float16, torch.bfloat16, torch.float32)
INDICES = (torch.int32, torch.int64)
LOOSE = {"weight_packed": "N W", "weight_scale": "N G", "weight_zero_point": "Z G", "weight_g_idx": "K"}

UNSAID = (
    "reason   by the actorder of the config any input may be of any group: nothing else says of which\n"
    "  remedy   save the layer with it, or, if the inputs lie in order, an actorder of 'weight' or null"
)


@dataclass(frozen=True)
class CTPackConfig(spec.Grouped, spec.Config):
    """What a compressed-tensors config says of pack-quantized layers.

    Attributes
    ----------
    bits
        Of a code: 2 to 8.
    group_size
        Inputs that share a scale; -1: one group.
    symmetric
        Whether zero points need not be stored; once a layer is described, whether none are.
    act_order
        Whether `weight_g_idx` has to be stored.
    dense
        Whether codes straddle words, as they do from version 0.18 on; None where nothing says.
    groups_lie
        "in order" without an index, "positional" in order beside one, or "anywhere" it says.
    shape
        (N, K) of the whole layer, once it is described.
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
        """N and K, as `weight_shape` says."""
        return dict(zip("NK", self.shape, strict=True)) if self.shape else {}

    def for_layer(self, headers: spec.LayerHeaders) -> "CTPackConfig":
        """The packing and the order of groups from shapes and facts.

        ShapeError or MismatchError for what contradicts them; AmbiguousIndexError for an index of zeros where
        there are several groups.
        """
        specs = CTPackWeight.tensors(self)
        sizes = headers.sizes([replace(s, text=LOOSE.get(s.name, s.text), index_of=None) for s in specs])
        N, W, G = sizes["N"], sizes["W"], sizes["G"]
        headers.check_single(("input_scale", "input_zero_point"))
        fact, most = (
            headers.facts.get("weight_shape"),
            compressed_tensors.capacity(W, self.bits, self.dense is not False),
        )
        shape = self.shape or (N, sizes.get("K", most)) if fact is None else tuple(fact.tolist())
        if shape[0] != N or shape[1] < 1 or shape[1] != sizes.get("K", shape[1]):
            raise MismatchError(
                headers.names.full("weight_shape"), "not the shape of this layer", f"[{N}, K]", str([*shape])
            )
        K, g_idx = shape[1], headers.facts.get("weight_g_idx")
        own = replace(self, shape=(N, K), dense=self._packing(headers, K, W, N, sizes.get("Z")))
        own = replace(own, symmetric="Z" not in sizes)
        headers.sizes(CTPackWeight.tensors(own)[:1], own.known())
        if own.groups(K) != G:
            group, (name, text) = self.rows_of_a_group(K), ("weight_scale", f"({N}, {self.groups(K)})")
            hint = f"for K = {K} and a group size of {self.group_size} in the config"
            full, file = headers.names.full(name), headers.names.file(name)
            raise ShapeError(full, f"{text} = (N, K/{group}^)", headers.shapes[name], file, hint)
        if g_idx is None:
            return replace(own, group_size=-1) if G == 1 else own
        if G > 1 and not g_idx.any():
            full, want = headers.names.full("weight_g_idx"), f"the group of each input, 0 to {G - 1}"
            what = "all zero, which has two readings"
            raise AmbiguousIndexError(full, what, want, f"0 for all {K} inputs")
        in_order = G > 1 and bool((g_idx == own.in_order(K, g_idx.device)).all())
        return replace(own, groups_lie="positional" if in_order else "anywhere")

    def _packing(self, headers: spec.LayerHeaders, K: int, W: int, N: int, Z: int | None) -> bool:
        """Whether the words are dense, from the shapes of codes and zero points."""
        counts = [(K, W)] if Z is None else [(K, W), (N, Z)]
        return compressed_tensors.is_dense(headers.names.full("weight_packed"), counts, self.bits, self.dense)


@dataclass(frozen=True, eq=False, repr=False)
class CTPackWeight(spec.Weight):
    """A pack-quantized layer, or a share of one.

    w[n, k] = weight_scale[n, g] * (code[n, k] - zero[n, g]), g = weight_g_idx[k], or k / group_size where
    there is none. Source: the files of compressed-tensors, to which it is bit-equal after one rounding.

    Attributes
    ----------
    weight_packed
        Codes in words along K: (N, ceil(K * bits / 32)), or (N, ceil(K / (32 // bits))) before version 0.18,
        int32.
    weight_scale
        (N, G), fp16, bf16 or fp32.
    weight_zero_point
        Zero points, packed along N alike: (ceil(N * bits / 32), G), int32; None: all are 2**(bits - 1).
    weight_g_idx
        The group of each input: (K,), int32 or int64; None: in order.
    input_scale, input_zero_point
        Of the activations, static ones only: () or (1,), or one a fused part, a float and int8; None: not
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
        """Zero points bind N to whole words; groups bind K, but for those that an index names."""
        ordered = "1" if config.group_size == -1 else f"K/{config.group_size}^"
        groups = {"in order": ordered, "positional": f"{ordered}|G", "anywhere": "G"}[config.groups_lie]
        K, N = (compressed_tensors.stored(dim, config.bits, config.dense is not False) for dim in "KN")
        index = TensorSpec("weight_g_idx", INDICES, "K", Role.INDEX, fact=True, index_of="G", reason=UNSAID)
        return (
            TensorSpec("weight_packed", (torch.int32,), f"N {K}", Role.WORD),
            TensorSpec("weight_scale", SCALES, f"N {groups}", Role.SCALE),
            TensorSpec(
                "weight_zero_point", (torch.int32,), f"{N} {groups}", Role.WORD, optional=config.symmetric
            ),
            replace(index, optional=not config.act_order),
            TensorSpec("weight_shape", INDICES, "2", Role.INDEX, fact=True, spent=True),
            TensorSpec("input_scale", SCALES, "P", Role.SCALE, optional=True, divides=True),
            TensorSpec("input_zero_point", (torch.int8,), "P", Role.WORD, optional=True),
        )

    def stored(self) -> StoredCodes | None:
        """As it lies, zero points as numbers: they are packed the other way than codes.

        None where words hold codes that are not whole, or are short of them.
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
        """Codes, zero points and scales in plain order."""
        (N, K), bits, dense = self.shape, self.config.bits, self.config.dense is not False
        index, zeros = self.weight_g_idx, self.weight_zero_point
        groups = self.config.in_order(K, self.device) if index is None else index.long()
        codes = compressed_tensors.packed_codes(self.weight_packed, K, bits, dense)
        plain = spec.symmetric(bits, codes.T, self.weight_scale.T, groups)
        if zeros is None:
            return plain
        return replace(plain, zeros=compressed_tensors.unpack(zeros.T, N, bits, dense).T)


@dataclass(frozen=True)
class CTPackTensorConfig(spec.Config):
    """What a compressed-tensors config says of such layers; ArgumentError for bits that none has.

    Attributes
    ----------
    bits
        Of a code: 2 to 8.
    symmetric
        Whether the zero point need not be stored.
    dense
        Whether codes straddle words, as they do from version 0.18 on; None where nothing says.
    shape
        (N, K) of the whole layer, once it is described.
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
        """N and K, as `weight_shape` says."""
        return dict(zip("NK", self.shape, strict=True)) if self.shape else {}

    def for_layer(self, headers: spec.LayerHeaders) -> "CTPackTensorConfig":
        """The packing from shapes and `weight_shape`.

        MismatchError for what contradicts them; ShapeError for several scales of one tensor.
        """
        specs = CTPackTensorWeight.tensors(self)
        headers.check_single(tensor.name for tensor in specs if tensor.text == "P")
        sizes = headers.sizes([replace(specs[0], text="N W"), *specs[1:]])
        N, W, fact = sizes["N"], sizes["W"], headers.facts.get("weight_shape")
        most = compressed_tensors.capacity(W, self.bits, self.dense is not False)
        N_said, K = self.shape or (N, most) if fact is None else fact.tolist()
        if N_said != N or K < 1:
            raise MismatchError(
                headers.names.full("weight_shape"),
                "not the shape of this layer",
                f"[{N}, K]",
                f"[{N_said}, {K}]",
            )
        name = headers.names.full("weight_packed")
        dense = compressed_tensors.is_dense(name, [(K, W)], self.bits, self.dense)
        own = replace(self, shape=(N, K), dense=dense)
        headers.sizes(CTPackTensorWeight.tensors(own)[:1], own.known())
        return own


@dataclass(frozen=True, eq=False, repr=False)
class CTPackTensorWeight(spec.Weight):
    """A pack-quantized layer with one scale, or a share of one; fused parts of a scale each keep theirs.

    w[n, k] = weight_scale * (code[n, k] - 2**(bits - 1) - weight_zero_point). Source: the files of
    compressed-tensors, to which it is bit-equal after one rounding.

    Attributes
    ----------
    weight_packed
        Codes in words along K: (N, ceil(K * bits / 32)), or (N, ceil(K / (32 // bits))) before version 0.18,
        int32.
    weight_scale
        () or (1,), or one a fused part, fp16, bf16 or fp32.
    weight_zero_point
        Signed, shaped alike, int8; None: 0.
    input_scale, input_zero_point
        Of the activations, static ones only, shaped alike: a float and int8; None: not stored.
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
        """Words bind cuts of K; a scale binds nothing."""
        half = 2 ** (config.bits - 1)
        K = compressed_tensors.stored("K", config.bits, config.dense is not False)
        zero = TensorSpec("weight_zero_point", (torch.int8,), "P", Role.WORD, between=(-half, half - 1))
        return (
            TensorSpec("weight_packed", (torch.int32,), f"N {K}", Role.WORD),
            TensorSpec("weight_scale", SCALES, "P", Role.SCALE),
            replace(zero, optional=config.symmetric),
            TensorSpec("weight_shape", (torch.int32, torch.int64), "2", Role.INDEX, fact=True, spent=True),
            TensorSpec("input_scale", SCALES, "P", Role.SCALE, optional=True, divides=True),
            TensorSpec("input_zero_point", (torch.int8,), "P", Role.WORD, optional=True),
        )

    def codes(self) -> spec.Codes:
        """Codes that count from 0, and the scale and zero point of each part."""
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


BITS, EIGHT = range(2, 9), 8


@dataclass(frozen=True)
class CTIntConfig(spec.Config):
    """What a compressed-tensors config says of int-quantized layers; ArgumentError for what none can mean.

    Attributes
    ----------
    block
        The (outputs, inputs) that share a scale, -1 for all inputs; None: one scale for the tensor.
    bits
        Of a code: 2 to 8.
    symmetric
        Whether zero points need not be stored.
    static
        Whether the activations' scale has to be.
    """

    name: ClassVar[str] = "ct_int"

    block: tuple[int, int] | None
    bits: int = 8
    symmetric: bool = True
    static: bool = False

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise ArgumentError("ct_int: bits", "2 to 8", str(self.bits))
        if self.block and (self.block[0] < 1 or self.block[1] < -1 or self.block[1] == 0):
            raise ArgumentError("ct_int: block", "(outputs, inputs), each at least 1", str(self.block))

    def for_layer(self, headers: spec.LayerHeaders) -> "CTIntConfig":
        """A group that covers all inputs is -1 from here on; ShapeError for several scales of one tensor."""
        tensors = CTIntWeight.tensors(self)
        K = headers.sizes(tensors[:1])["K"]
        headers.check_single(tensor.name for tensor in tensors if tensor.text == "P")
        one_group = self.block and self.block[0] == 1 and self.block[1] >= K
        return replace(self, block=(1, -1)) if one_group else self

    @property
    def axes(self) -> str:
        """The axes of the scale."""
        if self.block is None:
            return "P"
        rows, columns = self.block
        return f"{'N' if rows == 1 else f'N/{rows}^'} {'1' if columns == -1 else f'K/{columns}^'}"


@dataclass(frozen=True, eq=False, repr=False)
class CTIntWeight(spec.Weight):
    """An int-quantized layer, or a share of one; fused parts of a scale each keep theirs.

    w[n, k] = weight_scale * (weight[n, k] - weight_zero_point). Source: the files of compressed-tensors, to
    which it is bit-equal after one rounding.

    Attributes
    ----------
    weight
        Signed codes, a byte each: (N, K), int8.
    weight_scale
        One for the tensor, () or (1,); one an output, (N, 1); one a group, (N, K / g); or one a block,
        (ceil(N / bn), ceil(K / bk)); fp16, bf16 or fp32.
    weight_zero_point
        Shaped as the scale, int8; None: all are 0.
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
        """Groups bind cuts of K, blocks bind both and seams, short only at the end of the layer."""
        int8, axes, half = (torch.int8,), config.axes, 2 ** (config.bits - 1)
        codes = (-half, half - 1)
        return (
            TensorSpec("weight", int8, "N K", Role.WORD, between=codes),
            TensorSpec("weight_scale", SCALES, axes, Role.SCALE),
            TensorSpec("weight_zero_point", int8, axes, Role.WORD, optional=config.symmetric, between=codes),
            TensorSpec("input_scale", SCALES, "P", Role.SCALE, optional=not config.static, divides=True),
            TensorSpec("input_zero_point", int8, "P", Role.WORD, optional=True),
        )

    def stored(self) -> StoredRows | None:
        """As it lies: eight bits, and no fused parts of a scale each."""
        (N, K), block, zeros = self.shape, self.config.block, self.weight_zero_point
        if self.config.bits != EIGHT or (block is None and len(self.layer.parts) > 1):
            return None
        scales = self.weight_scale.reshape(self.weight_scale.shape[0], -1)
        rows, columns = block or (N, K)
        n_run, k_run = (min(run, size) if run > 0 else size for run, size in ((rows, N), (columns, K)))
        points = None if zeros is None else zeros.reshape(scales.shape)
        return StoredRows(self.weight, scales, max(n_run, 1), max(k_run, 1), points)

    def codes(self) -> spec.Codes:
        """Unsigned codes and zero points, and the groups of outputs and inputs."""
        signed, middle = self.signed(), 2 ** (self.config.bits - 1)
        zeros = torch.zeros_like(signed.scales, dtype=torch.int32) if signed.zeros is None else signed.zeros
        unsigned = self.weight.view(torch.uint8) + middle  # modulo 256, so that no code needs more bytes
        return replace(signed, codes=unsigned, zeros=zeros + middle)

    def signed(self) -> spec.Codes:
        """Codes and zero points as they are stored: no zero points where there are none."""
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
