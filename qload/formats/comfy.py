"""ComfyUI's formats of its own: codes of four bits with scales of groups.

asym_w4a8_int8. On disk, for a layer of K inputs and N outputs, group size g:

    weight            int8    (N, K/2)  unsigned codes, two a byte, the first in the low bits
    weight_s_rel      e4m3fn  (N, K/g)
    weight_s_channel  fp32    (N,)
    weight_codebook   fp32    (16,)     optional; without it code - 8

    w[n, k] = clamp(round(codebook[code] * s_rel[n, k / g]), -127, 127) * s_channel[n]

awq_w4a16:

    weight        int8              (N, K/2)  likewise
    weight_scale  fp32, bf16, fp16  (K/g, N)
    weight_zeros  fp32, bf16, fp16  (K/g, N)

    w[n, k] = (code - 8) * weight_scale[k / g, n] + weight_zeros[k / g, n]

Source: comfy-kitchen 0.2.40; asym_w4a8_int8 is bit-equal to it. `detect.methods.comfy` reads the marks of
layers. `ComfyStorage` converts the other marked formats to those of other programs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from qload import dtypes, spec
from qload.errors import ShapeError
from qload.layouts import NibblePairs
from qload.lazy_torch import Tensor, torch
from qload.spec import Role, TensorSpec

FLOATS = (dtypes.float32, dtypes.bfloat16, dtypes.float16)
LARGEST, ZERO, MIDDLE = 127, 128, 8  # limits of int8 codes; zero point of 4-bit codes


@dataclass(frozen=True)
class ComfyW4A8Config(spec.Grouped, spec.Config):
    """Config of asym_w4a8_int8; `codebook`: whether `weight_codebook` is stored; None: optional."""

    name: ClassVar[str] = "comfy_w4a8"

    group_size: int
    codebook: bool | None = None

    def __post_init__(self) -> None:
        self.check_group_size()


@dataclass(frozen=True, eq=False, repr=False)
class ComfyW4A8Weight(spec.Weight):
    """A layer of ComfyUI's asym_w4a8_int8, or a share of one.

    w[n, k] = clamp(round(codebook[code] * weight_s_rel[n, k / g]), -127, 127) * weight_s_channel[n]. Source:
    comfy-kitchen, bit-equal to it.

    Attributes
    ----------
    weight
        Unsigned codes, two a byte, the first in the low bits: (N, K / 2), int8.
    weight_s_rel
        (N, K / group_size), float8_e4m3fn.
    weight_s_channel
        (N,), fp32.
    weight_codebook
        Values of the codes: (16,), fp32; None: code - 8.
    """

    config: ComfyW4A8Config
    weight: Tensor
    weight_s_rel: Tensor
    weight_s_channel: Tensor
    weight_codebook: Tensor | None = None

    format: ClassVar[str] = "comfy_w4a8"
    example: ClassVar[ComfyW4A8Config] = ComfyW4A8Config(16)

    @classmethod
    def tensors(cls, config: ComfyW4A8Config) -> tuple[TensorSpec, ...]:
        """Declare the tensors; layers are fused only with equal codebooks."""
        groups = f"N K/{config.group_size}" if config.group_size != -1 else "N 1"
        codebook = TensorSpec(
            "weight_codebook", (dtypes.float32,), "16", Role.SCALE, fact=True, signed=True,
            optional=config.codebook is None,
        )  # fmt: skip
        return (
            TensorSpec("weight", (dtypes.int8,), "N K/2", Role.WORD),
            TensorSpec("weight_s_rel", (dtypes.float8_e4m3fn,), groups, Role.SCALE),
            TensorSpec("weight_s_channel", (dtypes.float32,), "N", Role.SCALE),
            *(() if config.codebook is False else (codebook,)),
        )

    def codes(self) -> spec.Codes:
        """Return the int8 codes, which count from 0, and the scales of the outputs."""
        pairs = NibblePairs(self.weight.view(torch.uint8), high_first=False)
        values = self.weight_codebook
        if values is None:
            values = torch.arange(16.0, device=self.device) - MIDDLE
        groups = self.config.in_order(self.layer.K, self.device)
        relative = spec.Codes(4, pairs, self.weight_s_rel.float(), None, groups, lookup=values).dequantize()
        scales = self.weight_s_channel.float()[:, None]
        return spec.Codes(
            bits=8,
            codes=(relative.round().clamp(-LARGEST, LARGEST) + ZERO).to(torch.uint8),
            scales=scales,
            zeros=torch.full_like(scales, ZERO, dtype=torch.int32),
            k_group=None,
        )

    @classmethod
    def sample_facts(cls, config: ComfyW4A8Config, sizes: dict[str, int]) -> dict[str, Tensor]:
        """Values of the codes: 16 whole numbers."""
        return {} if config.codebook is False else {"weight_codebook": torch.arange(16.0) * 4 - 30}


@dataclass(frozen=True)
class ComfyAWQConfig(spec.Grouped, spec.Config):
    """Config of awq_w4a16; `group_size` 0: read from the shape of the scales."""

    name: ClassVar[str] = "comfy_awq"

    group_size: int = 0

    def __post_init__(self) -> None:
        if self.group_size:
            self.check_group_size()

    def for_layer(self, headers: spec.LayerHeaders) -> ComfyAWQConfig:
        """Read an unknown group size from the shape of the scales; ShapeError if it has none."""
        sizes = headers.sizes(ComfyAWQWeight.tensors(self))
        if self.group_size:
            return self
        if not sizes["G"] or sizes["K"] % sizes["G"]:
            full, file = headers.names.full("weight_scale"), headers.names.file("weight_scale")
            expected = f"(G, {sizes['N']}), with K = {sizes['K']} a multiple of G"
            raise ShapeError(full, expected, headers.shapes["weight_scale"], file)
        return ComfyAWQConfig(sizes["K"] // sizes["G"])


@dataclass(frozen=True, eq=False, repr=False)
class ComfyAWQWeight(spec.Weight):
    """A layer of ComfyUI's awq_w4a16, or a share of one.

    w[n, k] = (code - 8) * weight_scale[k / g, n] + weight_zeros[k / g, n]. Source: comfy-kitchen.

    Attributes
    ----------
    weight
        Unsigned codes, two a byte, the first in the low bits: (N, K / 2), int8.
    weight_scale, weight_zeros
        (K / group_size, N), fp32, bf16 or fp16.
    """

    config: ComfyAWQConfig
    weight: Tensor
    weight_scale: Tensor
    weight_zeros: Tensor

    format: ClassVar[str] = "comfy_awq"
    example: ClassVar[ComfyAWQConfig] = ComfyAWQConfig(64)

    @classmethod
    def tensors(cls, config: ComfyAWQConfig) -> tuple[TensorSpec, ...]:
        """Declare the tensors; cuts of K fall between groups."""
        groups = f"K/{config.group_size} N" if config.group_size else "G N"
        return (
            TensorSpec("weight", (dtypes.int8,), "N K/2", Role.WORD),
            TensorSpec("weight_scale", FLOATS, groups, Role.SCALE),
            TensorSpec("weight_zeros", FLOATS, groups, Role.SCALE, signed=True),
        )

    def codes(self) -> spec.Codes:
        """Return the codes, with zero points of 8, scales, and offsets that are subtracted."""
        scales = self.weight_scale.float().T
        return spec.Codes(
            bits=4,
            codes=NibblePairs(self.weight.view(torch.uint8), high_first=False),
            scales=scales,
            zeros=torch.full_like(scales, MIDDLE, dtype=torch.int32),
            offsets=-self.weight_zeros.float().T,
            k_group=self.config.in_order(self.layer.K, self.device),
        )


FORMATS = (ComfyW4A8Weight, ComfyAWQWeight)
METHODS = ()  # read by detect.methods
