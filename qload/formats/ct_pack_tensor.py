"""compressed-tensors, pack-quantized with one scale for the tensor: its zero point is a number, not packed.

On disk, for a layer of K inputs and N outputs, b bits, w(K) = K*b/32 or K/(32//b), rounded up:

    weight_packed      int32             (N, w(K))  codes, as in `formats.ct_pack`
    weight_scale       fp16, bf16, fp32  () or (1,)
    weight_zero_point  int8              () or (1,)  signed; asymmetric layers only
    weight_shape       int64             (2,)        N and K, which a short last word hides
    input_scale        fp16, bf16, fp32  () or (1,)  of the activations; static ones only
    input_zero_point   int8              () or (1,)  likewise

    w[n, k] = weight_scale * (code[n, k] - 2**(b-1) - weight_zero_point)

Source: compressed-tensors 0.20.0, bit-equal to it after one rounding to the dtype of the scale.
"""

from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from qload import spec
from qload.errors import ArgumentError, MismatchError
from qload.layouts import compressed_tensors
from qload.spec import Role, TensorSpec

SCALES = (torch.float16, torch.bfloat16, torch.float32)


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
        most = compressed_tensors.most(W, self.bits, self.dense is not False)
        N_said, K = self.shape or (N, most) if fact is None else fact.tolist()
        if N_said != N or K < 1:
            raise MismatchError(
                headers.names.full("weight_shape"),
                "not the shape of this layer",
                f"[{N}, K]",
                f"[{N_said}, {K}]",
            )
        name = headers.names.full("weight_packed")
        dense = compressed_tensors.told(name, [(K, W)], self.bits, self.dense)
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
            codes=compressed_tensors.held(self.weight_packed, K, bits, self.config.dense is not False),
            scales=scales,
            zeros=stored + 2 ** (bits - 1),
            k_group=None,
            n_group=n_group,
        )
