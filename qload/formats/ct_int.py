"""compressed-tensors, int-quantized: signed codes, a byte each, whatever their bits.

On disk, for a layer of K inputs and N outputs:

    weight             int8              (N, K)      signed codes of 2 to 8 bits
    weight_scale       fp16, bf16, fp32  see below
    weight_zero_point  int8              as weight_scale; asymmetric layers only
    input_scale        fp16, bf16, fp32  () or (1,)  of the activations; static ones only
    input_zero_point   int8              () or (1,)  likewise

    w[n, k] = weight_scale * (weight[n, k] - weight_zero_point)

The scale is one for the tensor, () or (1,); one an output, (N, 1); one a group of g inputs, (N, K/g); or one
a block, (N/bn, K/bk), both rounded up. `codes()` counts from 0, so that zero points are 2**(b-1) higher than
they are stored. Source: compressed-tensors 0.20.0, bit-equal to it after one rounding.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from qload import spec
from qload.devices import StoredRows
from qload.errors import ArgumentError
from qload.spec import Role, TensorSpec

SCALES = (torch.float16, torch.bfloat16, torch.float32)
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
