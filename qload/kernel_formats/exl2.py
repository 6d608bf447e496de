"""EXL2 as ExLlama's kernels read it: the words shuffled, and what they look up for each row written out.

    q_weight     int32         (R, N)    codes, group after group, in `layouts.exl2.kernel_rows`
    q_scale      int32         (G, N/8)  as in EXL2
    q_scale_max  fp16          (G,)      as in EXL2; a kernel takes `divided_scale_max`, 1/256 of it
    q_groups     int16         (2*G,)    as in EXL2
    q_invperm    int32, int16  (K,)      as in EXL2
    q_perm       int32         (K,)      row j of q_weight is input q_perm[j]; kernels take 16 bits of it
    q_group_map  int16         (2*K,)    of each row its group and the rows left in it, 16 bits without a sign

Nothing that is stored is changed or shared: kernels of others shuffle q_weight in place and divide
q_scale_max in place, and do it again to a tensor that they are given twice. Source: exllamav2
b9c025b, byte-equal to it.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from qload import spec
from qload.errors import RepackError
from qload.formats.exl2 import Exl2Config, Exl2Weight, as_positions, codes_of, scale_unit
from qload.kernel_formats.plain_integers import inverse, put_back, with_origin
from qload.layouts.exl2 import START_LIMIT, Exl2Groups
from qload.spec import Role, TensorSpec


@dataclass(frozen=True, eq=False, repr=False)
class Exl2KernelWeight(spec.Weight):
    """An EXL2 weight in the order ExLlama's kernels read.

    Source: exllamav2, to whose tensors it is byte-equal.

    Attributes
    ----------
    q_weight
        Codes, group after group, each word shuffled (`qload.layouts.exl2`): (R, N), int32.
    q_scale
        As in EXL2: (G, N / 8), int32.
    q_scale_max
        As in EXL2: (G,), fp16; a kernel takes `divided_scale_max`.
    q_groups
        As in EXL2: (2 * G,), int16.
    q_invperm
        As in EXL2: (K,), int32 or int16.
    q_perm
        Row j of q_weight is input q_perm[j]: (K,), int32; kernels take 16 bits of it.
    q_group_map
        Of each row its group and the rows left in it: (2 * K,), int16 without a sign.
    """

    config: Exl2Config
    q_weight: Tensor
    q_scale: Tensor
    q_scale_max: Tensor
    q_groups: Tensor
    q_invperm: Tensor
    q_perm: Tensor
    q_group_map: Tensor

    format: ClassVar[str] = "exl2_kernel"
    example: ClassVar[Exl2Config] = Exl2Config()

    @classmethod
    def tensors(cls, config: Exl2Config) -> tuple[TensorSpec, ...]:
        """EXL2's, and the two that kernels look rows up in."""
        stored = [tensor for tensor in Exl2Weight.tensors(config) if not tensor.spent]
        return (
            *stored,
            TensorSpec("q_perm", (torch.int32,), "K!", Role.INDEX, fact=True, permutation=True),
            TensorSpec("q_group_map", (torch.int16,), "K*2!", Role.INDEX, fact=True),
        )

    @property
    def divided_scale_max(self) -> Tensor:
        """What a group's scales count in: (G,), fp16; a new tensor, however often it is asked for."""
        return scale_unit(self.q_scale_max)

    def codes(self) -> spec.Codes:
        """As EXL2's, read from what a kernel reads: q_perm and q_group_map."""
        groups = Exl2Groups.read(self.q_groups, self.q_weight.shape[0])
        group = self.q_group_map[0::2].long() % START_LIMIT
        codes = put_back(groups.unpack(self.q_weight, shuffle=True), self.q_perm)
        k_group, widest = put_back(group, self.q_perm), int(groups.bits.max())
        return codes_of(groups, codes, k_group, self.q_scale, self.q_scale_max, widest)

    def dequantize(self, dtype: torch.dtype = torch.float32, out: Tensor | None = None) -> Tensor:
        """(N, K) with the values that the owner's fp16 has."""
        return spec.rounded(super().dequantize(torch.float16), dtype, out)


def from_exl2(weight: Exl2Weight) -> Exl2KernelWeight:
    """Each width shuffled, rows where they lie; RepackError for what kernels cannot count or expect."""
    groups = Exl2Groups.read(weight.q_groups, weight.q_weight.shape[0])
    reason = why_not(groups)
    if reason:
        raise RepackError(f"{weight.layer.name or 'layer'}: exl2", "ExLlama's kernels", reason)
    return Exl2KernelWeight(
        config=weight.config,
        q_weight=groups.pack(groups.unpack(weight.q_weight), shuffle=True),
        **_unchanged(weight),
        q_perm=inverse(as_positions(weight.q_invperm).to(torch.int32)),
        q_group_map=groups.map(),
        layer=with_origin(weight),
    )


def to_exl2(weight: Exl2KernelWeight) -> Exl2Weight:
    """The inverse of `from_exl2`, bit for bit."""
    groups = Exl2Groups.read(weight.q_groups, weight.q_weight.shape[0])
    return Exl2Weight(
        config=weight.config,
        q_weight=groups.pack(groups.unpack(weight.q_weight, shuffle=True)),
        **_unchanged(weight),
        layer=weight.layer,
    )


def _unchanged(weight: Exl2Weight | Exl2KernelWeight) -> dict[str, Any]:
    """Copies of what kernels read as it is stored."""
    held = weight.fields()
    return {name: held[name].clone() for name in ("q_scale", "q_scale_max", "q_groups", "q_invperm")}


def why_not(groups: Exl2Groups) -> str | None:
    """Why kernels cannot read these groups, or None."""
    height, most = int(groups.starts[-1]), int(groups.rows.max())
    if bool((groups.bits.diff() > 0).any()):
        return "the widths of its groups rise; kernels count the rows of each width, from 8 bits down to 2"
    if height > START_LIMIT:
        return f"q_weight has {height} rows; kernels count starts in 16 bits, up to {START_LIMIT}"
    if most >= START_LIMIT:
        return f"a group has {most} rows; kernels count those left in 16 bits, up to {START_LIMIT - 1}"
    return None
