"""EETQ: 8-bit codes for its W8A16 kernel, one scale per output.

On disk, for a layer of K inputs and N outputs, both multiples of 64:

    weight         int8  (K, N)  codes + 128, in the order of `layouts.eetq`; qweight in EETQ's own layers
    weight_scales  fp16  (N,)

    w[n, k] = weight_scales[n] * (byte[n, k] - 128)

Outputs are stored in pairs, hidden by the stored shape: a slice of it has no meaning. The bytes are those of
sm75 and sm80, which are equal; EETQ writes none for sm90. Its 4-bit variant has the same config and is
refused by its shapes. Source: EETQ 465e972, bit-equal to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from qload import configs, dtypes, spec
from qload.devices import StoredCodes
from qload.errors import UnsupportedFormatError
from qload.layouts import eetq
from qload.lazy_torch import Tensor, torch
from qload.loader import ConfiguredFormat
from qload.spec import Role, TensorSpec

BITS = 8


@dataclass(frozen=True)
class EETQConfig(spec.Config):
    """Config of EETQ: empty, because shapes describe the layer."""

    name: ClassVar[str] = "eetq"

    def for_layer(self, headers: spec.LayerHeaders) -> EETQConfig:
        """Check the shapes; UnsupportedFormatError for two codes per byte (two scales per column)."""
        weight, scales = headers.shapes["weight"], headers.shapes["weight_scales"]
        if len(weight) == 2 and scales == (2 * weight[1],) and weight[1]:
            name = headers.names.full("weight")
            raise UnsupportedFormatError(
                "eetq_int4",
                f"{name} has two codes a byte: {weight[1]} columns for {scales[0]} scales",
                remedy="EETQ itself loads it; quantize the model anew with 8 bits",
            )
        return self


@dataclass(frozen=True, eq=False, repr=False)
class EETQWeight(spec.Weight):
    """An EETQ layer, or a share of one, N and K multiples of 64.

    w[n, k] = weight_scales[n] * (byte[n, k] - 128). Source: EETQ, bit-equal to its files.

    Attributes
    ----------
    weight
        Codes + 128, in the order of EETQ's kernel for sm75 and sm80 (`qload.layouts.eetq`): (K, N), int8.
    weight_scales
        (N,), fp16.
    """

    config: EETQConfig
    weight: Tensor
    weight_scales: Tensor

    format: ClassVar[str] = "eetq"
    example: ClassVar[EETQConfig] = EETQConfig()

    @classmethod
    def tensors(cls, config: EETQConfig) -> tuple[TensorSpec, ...]:
        """Declare the tensors; cuts fall at multiples of 64 outputs or inputs, the valid sizes of EETQ."""
        return (
            TensorSpec(
                "weight",
                (dtypes.int8,),
                "K@64 N@64",
                Role.WORD,
                stored=("weight", "qweight"),
                view="N@64/2 K@64*2",
            ),
            TensorSpec("weight_scales", (dtypes.float16,), "N", Role.SCALE),
        )

    def stored(self) -> StoredCodes | None:
        """Describe the stored order for kernels, with four bytes per word; None if unaligned."""
        (K, N), weight = self.weight.shape, self.weight
        if not weight.is_contiguous() or weight.storage_offset() % 4 or not K:
            return None
        words = weight.view(-1).view(torch.int32).view(N // 2, K // 2)
        return StoredCodes(eetq.WORDS.packed(words), self.weight_scales[:, None], None, None, K)

    def codes(self) -> spec.Codes:
        """Return bytes in plain order, with zero points of 128 and one scale per output."""
        scales = self.weight_scales.float()[:, None]
        zeros = torch.full_like(scales, 2 ** (BITS - 1), dtype=torch.int32)
        return spec.Codes(bits=BITS, codes=eetq.unpack(self.weight), scales=scales, zeros=zeros, k_group=None)


VARIANTS = ("eetq (weights int8)",)
INT8 = "int8"


class _EETQ(configs.Section):
    weights: configs.Name = None


def read_eetq(source: configs.FoundConfig) -> configs.Claims:
    """Read the claims of `quant_method: eetq`; only 8-bit weights are supported."""
    section = configs.validate(_EETQ, source)
    weights = section.weights or INT8
    if weights != INT8:
        raise UnsupportedFormatError(
            f"eetq_{weights:.40}", f"the weights of {source.file} are not supported", VARIANTS
        )
    fmt = ConfiguredFormat(EETQWeight, EETQConfig())
    return section.claims(source, "eetq", weights, fmt, bits=8, group_size=-1, sym=True)


FORMATS = (EETQWeight,)
METHODS = (configs.Method(names=("eetq",), read=read_eetq, formats=(EETQWeight,), variants=VARIANTS),)
