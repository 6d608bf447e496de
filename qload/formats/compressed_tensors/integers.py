"""compressed-tensors, int-quantized: signed codes of 2 to 8 bits, a byte each.

On disk, for a layer of K inputs and N outputs:

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
from typing import ClassVar, Literal

from qload import dtypes, spec
from qload.devices import StoredRows
from qload.errors import ArgumentError
from qload.formats.compressed_tensors.words import INPUT_SCALE, INPUT_ZERO_POINT, SCALES
from qload.lazy_torch import Tensor, torch
from qload.spec import Role, TensorSpec
from qload.spec.blocks import block_groups, block_rows

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
            replace(INPUT_SCALE, optional=not config.static),
            INPUT_ZERO_POINT,
        )

    def stored(self) -> StoredRows | None:
        """Describe the stored order for kernels; None for other bits than 8 or a scale per fused part."""
        zeros = self.weight_zero_point
        if self.config.bits != BYTE_BITS:
            return None
        scales = self.weight_scale.reshape(self.weight_scale.shape[0], -1)
        points = None if zeros is None else zeros.reshape(scales.shape)
        return block_rows(self.layer, self.weight, scales, self.config.block, points)

    def codes(self) -> spec.Codes:
        """Return unsigned codes and zero points, with the groups of outputs and inputs."""
        signed, middle = self.signed(), 2 ** (self.config.bits - 1)
        zeros = torch.zeros_like(signed.scales, dtype=torch.int32) if signed.zeros is None else signed.zeros
        unsigned = self.weight.view(torch.uint8) + middle  # modulo 256: one byte per code
        return replace(signed, codes=unsigned, zeros=zeros + middle)

    def signed(self) -> spec.Codes:
        """Return signed codes and zero points, as stored."""
        zeros = self.weight_zero_point
        n_group, k_group = block_groups(self.layer, self.config.block, self.device)
        scales = self.weight_scale.float().reshape(self.weight_scale.shape[0], -1)
        return spec.Codes(
            bits=self.config.bits,
            codes=self.weight,
            scales=scales,
            zeros=None if zeros is None else zeros.reshape(scales.shape).int(),
            k_group=k_group,
            n_group=n_group,
        )
