"""compressed-tensors, pack-quantized: integer codes of 2 to 8 bits in words along K.

On disk, for a layer of K inputs and N outputs in G groups, b bits, w(X) = X*b/32 or X/(32//b), rounded up:

    weight_packed      int32             (N, w(K))  codes, in one of the two packings of `layouts.compressed`
    weight_scale       fp16, bf16, fp32  (N, G)
    weight_zero_point  int32             (w(N), G)  zero points, packed along N; asymmetric layers only
    weight_g_idx       int32             (K,)       the group of each input; act order only
    weight_shape       int64             (2,)       N and K, which a short last word hides
    input_scale        fp16, bf16, fp32  () or (1,)  of the activations; static ones only
    input_zero_point   int8              () or (1,)  likewise

    w[n, k] = weight_scale[n, g] * (code[n, k] - zero[n, g]),   g = g_idx[k], or k / g where there is none

A zero point that is not stored is 2**(b-1). The packing changed in version 0.18; the shapes tell which it is,
and for the few that fit both, the version in the config. Source: compressed-tensors
0.14.0 and 0.20.0, bit-equal to both after one rounding to the dtype of the scales.
"""

from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from qload import spec
from qload.devices import StoredCodes
from qload.errors import AmbiguousIndexError, MismatchError, ShapeError
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
            compressed_tensors.most(W, self.bits, self.dense is not False),
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
        return compressed_tensors.told(headers.names.full("weight_packed"), counts, self.bits, self.dense)


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
        codes = compressed_tensors.held(self.weight_packed, K, bits, dense)
        plain = spec.symmetric(bits, codes.T, self.weight_scale.T, groups)
        if zeros is None:
            return plain
        return replace(plain, zeros=compressed_tensors.unpack(zeros.T, N, bits, dense).T)
