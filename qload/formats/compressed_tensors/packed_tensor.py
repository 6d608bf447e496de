"""compressed-tensors, pack-quantized: codes in words along K, one scale for the tensor.

On disk, for a layer of K inputs and N outputs, b bits, w(K) words as in `packed`:

    weight_packed      int32             (N, w(K))   codes, in one of the two packings of `layouts`
    weight_scale       fp16, bf16, fp32  () or (1,)
    weight_zero_point  int8              () or (1,)  signed; asymmetric layers only
    weight_shape       int32, int64      (2,)        N and K: a partly filled last word hides K
    input_scale        fp16, bf16, fp32  () or (1,)  of the activations; static ones only
    input_zero_point   int8              () or (1,)  likewise

    w[n, k] = weight_scale * (code[n, k] - 2**(b-1) - weight_zero_point)
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

from qload import dtypes, spec
from qload.errors import ArgumentError
from qload.formats.compressed_tensors import words
from qload.formats.compressed_tensors.words import INPUT_SCALE, INPUT_ZERO_POINT, SCALES, SHAPE, PackedWords
from qload.layouts import compressed_tensors
from qload.lazy_torch import Tensor, torch
from qload.spec import Role, TensorSpec
from qload.spec.blocks import part_index


@dataclass(frozen=True)
class CTPackTensorConfig(PackedWords, spec.Config):
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

    def for_layer(self, headers: spec.LayerHeaders) -> CTPackTensorConfig:
        """Read the packing from shapes and `weight_shape`.

        MismatchError for a contradiction; ShapeError for several scales of one tensor.
        """
        specs = CTPackTensorWeight.tensors(self)
        headers.check_single(tensor.name for tensor in specs if tensor.text == "P")
        sizes = headers.sizes([replace(specs[0], text="N W"), *specs[1:]])
        config = words.for_words(self, headers, sizes)
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
            SHAPE,
            INPUT_SCALE,
            INPUT_ZERO_POINT,
        )

    def codes(self) -> spec.Codes:
        """Return unsigned codes, with a scale and a zero point for each part."""
        config, zeros = self.config, self.weight_zero_point
        scales = self.weight_scale.float().reshape(-1, 1)
        stored = torch.zeros_like(scales, dtype=torch.int32) if zeros is None else zeros.reshape(-1, 1).int()
        return spec.Codes(
            bits=config.bits,
            codes=words.packed_codes(config, self.weight_packed, self.layer.K),
            scales=scales,
            zeros=stored + 2 ** (config.bits - 1),
            k_group=None,
            n_group=part_index(self.layer, self.device),
        )

    @classmethod
    def sample_facts(cls, config: CTPackTensorConfig, sizes: dict[str, int]) -> dict[str, Tensor]:
        """Shape for `sizes`, with K raised to several words of a `config`."""
        sizes["K"] *= 1 if sizes["K"] >= 48 else 48
        return {"weight_shape": torch.tensor([sizes["N"], sizes["K"]])}
