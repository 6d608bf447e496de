"""Kernels to put on trial: sound ones of plain torch, and the same with one bug each."""

import re
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from qload.conformance import LinearKernelSuite


@dataclass
class Parts:
    """What a kernel reads: codes (N, K), zero points and scales (N, G), the group of each input (K,)."""

    codes: Tensor
    zeros: Tensor | None
    scales: Tensor
    group: Tensor
    lookup: Tensor | None = None

    def weight(self) -> Tensor:
        """(N, K), float32."""
        values = self.codes.float() if self.lookup is None else self.lookup[self.codes.long()].float()
        zeros = 0 if self.zeros is None else self.zeros[:, self.group].float()
        return (values - zeros) * self.scales[:, self.group].float()


class Sound(LinearKernelSuite):
    """Dequantizes to x's type and multiplies in float32, whatever the format."""

    format = "gptq"

    def pack(self, weight: Any) -> Any:
        made = weight.codes()
        N, K = weight.shape
        group = torch.zeros(K, dtype=torch.int64) if made.k_group is None else made.k_group
        n_group = torch.arange(N) if made.n_group is None else made.n_group
        scales, zeros = made.scales[n_group.clamp(max=len(made.scales) - 1)], made.zeros
        if zeros is not None:
            zeros = zeros[n_group.clamp(max=len(zeros) - 1)]
        return Parts(made.plain().clone(), zeros, scales.clone(), group.clone(), made.lookup)

    def gemm(self, x: Tensor, buffers: Any) -> Tensor:
        return (x.float() @ buffers.weight().to(x.dtype).float().T).to(x.dtype)


class Buggy(Sound):
    """One that changes what it reads, for `of` layers alone where it says so."""

    in_order: ClassVar[bool] = True

    def broken(self, parts: Parts) -> Parts:
        raise NotImplementedError

    def pack(self, weight: Any) -> Any:
        return self.broken(super().pack(weight))


def _interleaved(codes: Tensor, order: tuple[int, ...]) -> Tensor:
    """Codes (N, K) with each eight along K in another order."""
    return codes.reshape(codes.shape[0], -1, 8)[:, :, list(order)].reshape(codes.shape)


def _tail(parts: Parts) -> Parts:
    codes, zeros = parts.codes.clone(), parts.zeros
    assert zeros is not None
    codes[-8:, -16:] = zeros[-8:, parts.group[-16:]].to(codes.dtype)
    return replace(parts, codes=codes)


# By name: what becomes of the parts, the class that is named, and the case that shows it.
WEIGHTS: dict[str, tuple[Any, str, str]] = {
    "zero-plus-one": (
        lambda p: replace(p, zeros=p.zeros + 1), "zero-points-one-higher", "gptq.v1.w4.g128.k256n128"),
    "zero-minus-one": (
        lambda p: replace(p, zeros=p.zeros - 1), "zero-points-one-lower", "gptq.v2.w4.g128.k256n128"),
    "zero-missing": (
        lambda p: replace(p, zeros=p.zeros * 0), "zero-points-missing", "gptq.v1.w4.g128.k256n128"),
    "zero-ignored": (
        lambda p: replace(p, zeros=torch.full_like(p.zeros, 8)), "zero-points-ignored",
        "gptq.v1.w4.g128.asym.k256n128"),
    "zero-not-wrapped": (
        lambda p: replace(p, zeros=torch.where(p.zeros == 0, 16, p.zeros)), "zero-points-wrapped",
        "gptq.wrapping.w4.g128.k256n128"),
    "scales-of-the-next-group": (
        lambda p: replace(p, scales=p.scales.roll(1, 1)), "scales-of-another-group",
        "gptq.v1.w4.g32.k256n128"),
    "scales-of-the-next-output": (
        lambda p: replace(p, scales=p.scales.roll(1, 0)), "scales-of-another-output",
        "gptq.v1.w4.g128.k256n128"),
    "scales-missing": (
        lambda p: replace(p, scales=torch.ones_like(p.scales)), "scales-missing", "gptq.v1.w4.g128.k256n128"),
    "scales-read-as-bfloat16": (
        lambda p: replace(p, scales=p.scales.half().view(torch.bfloat16).float()), "scale-type",
        "gptq.v1.w4.g128.k256n128"),
    "order-of-awq": (
        lambda p: replace(p, codes=_interleaved(p.codes, (0, 4, 1, 5, 2, 6, 3, 7))), "code-order",
        "gptq.v1.w4.g128.k256n128"),
    "nibbles-swapped": (
        lambda p: replace(p, codes=_interleaved(p.codes, (1, 0, 3, 2, 5, 4, 7, 6))), "code-order",
        "gptq.v1.w4.g128.k256n128"),
    "act-order-ignored": (
        lambda p: replace(p, group=p.group.sort()[0]), "act-order-ignored",
        "gptq.v1.w4.g128.actorder.k512n256"),
    "outputs-shifted": (
        lambda p: replace(p, codes=p.codes.roll(1, 0), zeros=p.zeros.roll(1, 0), scales=p.scales.roll(1, 0)),
        "outputs-shifted", "gptq.v1.w4.g128.k256n128"),
    "tail-left-out": (_tail, "left-out", "gptq.v1.w4.g128.k256n128"),
}  # fmt: skip


def message(error: BaseException) -> str:
    """Return a failure's own text; "#" for numbers that depend on the order of addition."""
    own, _, _ = str(error).partition("\nassert ")  # pytest adds the expression
    numbers = r"\d+(\.\d+)?(e[-+]\d+)?" if "as far off as rounding" in own else r"\d+\.\d+"
    return re.sub(numbers, "#", own)


def with_bug(name: str) -> Sound:
    """The sound kernel with the bug of this name in its weight."""
    broken = WEIGHTS[name][0]
    return type("Bug", (Buggy,), {"broken": lambda self, parts: broken(parts)})()  # type: ignore[no-any-return]
