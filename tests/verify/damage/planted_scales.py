"""Damage to the sizes of scales, that a model's own values tell of; `planted` has all of it."""

from collections.abc import Callable

import torch
from torch import Tensor

from tests.verify.damage.model import DoesNotApplyError, Model


def scales_inverted(model: Model) -> None:
    _scale(model, [model.target()], lambda scales: torch.where(scales != 0, 1 / scales, scales))


def all_scales_inverted(model: Model) -> None:
    if not model.codes():
        raise DoesNotApplyError("no scales")
    _scale(model, model.codes(), lambda scales: torch.where(scales != 0, 1 / scales, scales))


def scales_times_a_thousand(model: Model) -> None:
    _scale(model, [model.target()], lambda scales: scales * 1000)


def a_third_of_the_scales_zero(model: Model) -> None:
    def change(scales: Tensor) -> Tensor:
        if scales.numel() < 32:
            raise DoesNotApplyError("too few scales")
        flat = scales.flatten().clone()
        flat[::3] = 0
        return flat.reshape(scales.shape)

    _scale(model, [model.target()], change)


def scale_times_256(model: Model) -> None:
    def change(scales: Tensor) -> Tensor:
        if scales.numel() < 8:
            raise DoesNotApplyError("too few scales")
        flat = scales.flatten().clone()
        flat[flat.abs().argsort()[len(flat) * 3 // 4]] *= 256
        return flat.reshape(scales.shape)

    _scale(model, [model.target()], change)


def _scale(model: Model, codes: list[str], change: Callable[[Tensor], Tensor]) -> None:
    """Other scales; of scales that have another beside them, that one."""
    for each in codes:
        name = model.scales(each)
        for outer in (".weight_global_scale", ".weight_scale_2"):
            lead = name.removesuffix(".weight_scale")
            name = lead + outer if lead + outer in model.tensors else name
        scales = model.tensors[name]
        if scales.dtype is torch.uint8 and each.endswith(("_blocks", "_packed")):
            made = change(2.0 ** (scales.float() - 127))
            made = torch.where(made > 0, made.log2().round() + 127, 0).clamp(0, 254)
            model.tensors[name] = made.to(torch.uint8)
        elif scales.dtype is torch.uint8:
            raise DoesNotApplyError("scales that are codes")
        else:
            exact = change(scales.float())
            limit = torch.finfo(scales.dtype).max
            model.tensors[name] = exact.clamp(-limit, limit).to(scales.dtype)
