"""EXL2 in the order of ExLlama's kernels: shuffled words, and a lookup table from rows to groups.

    q_weight     int32         (R, N)    codes, group after group, in `layouts.exl2.kernel_rows`
    q_scale      int32         (G, N/8)  as in EXL2
    q_scale_max  fp16          (G,)      as in EXL2; a kernel takes `divided_scale_max`, 1/256 of it
    q_groups     int16         (2*G,)    as in EXL2
    q_invperm    int32, int16  (K,)      as in EXL2
    q_perm       int32         (K,)      row j of q_weight is input q_perm[j]; kernels take the low 16 bits
    q_group_map  int16         (2*K,)    group of each row and number of rows left in it, both unsigned

All tensors are copies of the checkpoint's, because exllamav2 shuffles q_weight and divides q_scale_max in
place, and does so again if it receives the same tensor twice. Source: exllamav2 b9c025b, byte-equal to it.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from qload import dtypes, spec
from qload.dtypes import DtypeLike
from qload.errors import RepackError
from qload.formats.exl2 import Exl2Config, Exl2Weight, as_positions, codes_of, scale_unit
from qload.layouts.exl2 import START_LIMIT, Exl2Groups
from qload.spec import Role, TensorSpec
from qload.spec.integers import invert_perm, record_origin, unpermute_rows


@dataclass(frozen=True, eq=False, repr=False)
class Exl2KernelWeight(spec.Weight):
    """An EXL2 weight in the order of ExLlama's kernels.

    Source: exllamav2, byte-equal to its tensors.

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
        Row j of q_weight is input q_perm[j]: (K,), int32; kernels take the low 16 bits.
    q_group_map
        Group of each row and number of rows left in it: (2 * K,), int16, both unsigned.
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
        """Declare the tensors of EXL2, the permutation and the group map."""
        return (
            *(tensor for tensor in Exl2Weight.tensors(config) if not tensor.spent),
            TensorSpec("q_perm", (dtypes.int32,), "K!", Role.INDEX, fact=True, permutation=True),
            TensorSpec("q_group_map", (dtypes.int16,), "K*2!", Role.INDEX, fact=True),
        )

    @property
    def divided_scale_max(self) -> Tensor:
        """Scale units of the groups, 1/256 of q_scale_max: (G,), fp16; a new tensor on every access."""
        return scale_unit(self.q_scale_max)

    def codes(self) -> spec.Codes:
        """Return codes and scales in plain order, by the kernel's own q_perm and q_group_map."""
        groups = Exl2Groups.read(self.q_groups, self.q_weight.shape[0])
        group = self.q_group_map[0::2].long() % START_LIMIT
        codes = unpermute_rows(groups.unpack(self.q_weight, shuffle=True), self.q_perm)
        k_group, max_bits = unpermute_rows(group, self.q_perm), int(groups.bits.max())
        return codes_of(groups, codes, k_group, self.q_scale, self.q_scale_max, max_bits)

    def dequantize(self, dtype: DtypeLike = dtypes.float32, out: Tensor | None = None) -> Tensor:
        """Dequantize to (N, K) in `dtype`, rounded to fp16 first as in exllamav2; `out`: the result."""
        return spec.rounded(super().dequantize(torch.float16), dtype, out)


def from_exl2(weight: Exl2Weight) -> Exl2KernelWeight:
    """Shuffle the words of each width; RepackError for groups beyond the limits of ExLlama's kernels."""
    groups = Exl2Groups.read(weight.q_groups, weight.q_weight.shape[0])
    reason = find_unsupported(groups)
    if reason:
        raise RepackError(f"{weight.layer.name or 'layer'}: exl2", "ExLlama's kernels", reason)
    return Exl2KernelWeight(
        config=weight.config,
        q_weight=groups.pack(groups.unpack(weight.q_weight), shuffle=True),
        **_copy_shared_tensors(weight),
        q_perm=invert_perm(as_positions(weight.q_invperm).to(torch.int32)),
        q_group_map=groups.map(),
        layer=record_origin(weight),
    )


def to_exl2(weight: Exl2KernelWeight) -> Exl2Weight:
    """Invert `from_exl2`, bit for bit."""
    groups = Exl2Groups.read(weight.q_groups, weight.q_weight.shape[0])
    return Exl2Weight(
        config=weight.config,
        q_weight=groups.pack(groups.unpack(weight.q_weight, shuffle=True)),
        **_copy_shared_tensors(weight),
        layer=weight.layer,
    )


def _copy_shared_tensors(weight: Exl2Weight | Exl2KernelWeight) -> dict[str, Any]:
    tensors = weight.fields()
    return {name: tensors[name].clone() for name in ("q_scale", "q_scale_max", "q_groups", "q_invperm")}


def find_unsupported(groups: Exl2Groups) -> str | None:
    """Return the reason if ExLlama's kernels cannot read these groups, else None."""
    rows, longest = int(groups.starts[-1]), int(groups.rows.max())
    if bool((groups.bits.diff() > 0).any()):
        return "the widths of its groups rise; kernels count the rows of each width, from 8 bits down to 2"
    if rows > START_LIMIT:
        return f"q_weight has {rows} rows; kernels count starts in 16 bits, up to {START_LIMIT}"
    if longest >= START_LIMIT:
        return f"a group has {longest} rows; kernels count the rest in 16 bits, up to {START_LIMIT - 1}"
    return None
