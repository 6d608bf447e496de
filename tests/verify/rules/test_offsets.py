"""Zero points that are floats, or quotients of an offset and a scale: MLX, quanto and HQQ."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qload.verify import verify
from tests.verify.damage.model import Model
from tests.verify.damage.sound import SHAPES, Quantize, modelled

pytestmark = pytest.mark.usefixtures("seen_texts")

TOP = 15  # the largest code of four bits


def settings(**texts: str) -> dict[str, Tensor]:
    return {name: torch.tensor(list(text.encode()), dtype=torch.uint8) for name, text in texts.items()}


def mlx(bits: int, size: int) -> tuple[Quantize, dict[str, Any]]:
    """MLX's rule: the weight of a group that is farthest from 0 has the code 0, and is the bias."""

    def quantize(weight: Tensor) -> dict[str, Tensor]:
        groups, top = weight.reshape(len(weight), -1, size), 2**bits - 1
        low, high = groups.amin(2, True), groups.amax(2, True)
        step = ((high - low) / top).clamp(min=1e-7)
        edge, step = torch.where(-low > high, low, high), torch.where(-low > high, step, -step)
        count = (edge / step).round()
        scales = torch.where(count == 0, step, edge / count)
        biases = torch.where(count == 0, 0, edge)
        codes = ((groups - biases) / scales).round().clamp(0, top).long()
        fields = codes.reshape(len(weight), -1, 32 // bits) << torch.arange(0, 32, bits)
        scales, biases = (each[..., 0].bfloat16() for each in (scales, biases))
        return {"weight": fields.sum(2).to(torch.uint32), "scales": scales, "biases": biases}

    return quantize, {"quant_method": "mlx", "bits": bits, "group_size": size}


def affine(groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes of four bits, scales, and zero points of groups (G, size), by their range."""
    low, high = groups.amin(1, True), groups.amax(1, True)
    scales = ((high - low) / TOP).clamp(min=1e-5)
    zeros = -low / scales
    return (groups / scales + zeros).round().clamp(0, TOP).to(torch.uint8), scales, zeros


def quanto() -> tuple[Quantize, dict[str, Any]]:
    """A group for each output, in two blocks of rows; the shift is the zero point times the scale."""

    def quantize(weight: Tensor) -> dict[str, Tensor]:
        codes, scales, zeros = affine(weight)
        low, high = codes.chunk(2)
        shifts = (scales * zeros).bfloat16()
        data = {"weight._data._data": low | high << 4}
        return {**data, "weight._scale": scales.bfloat16(), "weight._shift": shifts}

    return quantize, {"quant_method": "quanto", "weights": "int4"}


def hqq() -> tuple[Quantize, dict[str, Any]]:
    """Groups of 64 inputs, in two blocks of rows, with their settings."""

    def quantize(weight: Tensor) -> dict[str, Tensor]:
        codes, scales, zeros = affine(weight.reshape(-1, 64))
        high, low = codes.chunk(2)
        numbers = {"shape": weight.shape, "nbits": [4], "axis": [1], "group_size": [64]}
        stated = {name: torch.tensor(value, dtype=torch.int64) for name, value in numbers.items()}
        stated |= settings(packing="4bit_u8", compute_dtype="torch.float16")
        return {"W_q": high << 4 | low, "scale": scales.half(), "zero": zeros.half(), **stated}

    return quantize, {"quant_method": "hqq"}


FORMATS: dict[str, tuple[Quantize, dict[str, Any]]] = {
    "mlx 4, 32": mlx(4, 32),
    "mlx 4, 64": mlx(4, 64),
    "mlx 2, 32": mlx(2, 32),
    "quanto": quanto(),
    "hqq": hqq(),
}
OFFSETS = {"mlx": "biases", "quanto": "weight._shift", "hqq": "zero"}
DAMAGES = ("one step higher", "one step lower", "negated")


def damaged(model: Model, field: str) -> dict[str, str]:
    """Damage the offsets of all layers, in turn in each way; return the damage of each tensor.

    One group of each layer gets a scale of 0.
    """
    damages = {}
    for at, name in enumerate(name for name in model.tensors if name.endswith(f".{field}")):
        prefix, offsets, damage = name.removesuffix(field), model.tensors[name], DAMAGES[at % len(DAMAGES)]
        scales = [prefix + each for each in ("scales", "weight._scale") if prefix + each in model.tensors]
        step = model.tensors[scales[0]] if scales else 1
        if isinstance(step, Tensor):
            step[0, 0] = 0
        changed = {DAMAGES[0]: offsets + step, DAMAGES[1]: offsets - step, DAMAGES[2]: -offsets}
        model.tensors[name], damages[name] = changed[damage], damage
    return damages


def findings(model: Model, folder: Path) -> dict[str, str]:
    """Map each tensor that the rule names to the remedy."""
    report = verify(model.write(folder / "model"))
    return {each.tensor or "": each.remedy for each in report.findings if each.rule == "zero-point-mean"}


@pytest.mark.parametrize("name", FORMATS)
def test_shifted_and_negated_offsets_are_named(name: str, tmp_path: Path) -> None:
    model = modelled(*FORMATS[name])
    damages = damaged(model, OFFSETS[name.split()[0]])

    found = findings(model, tmp_path)

    assert found.keys() == damages.keys()
    assert len(found) == 2 * len(SHAPES)
    higher = 1 if name.startswith("mlx") else 0  # biases are added, and a higher one is a lower zero point
    for tensor, damage in damages.items():
        if damage in DAMAGES[:2]:
            side = "higher" if DAMAGES.index(damage) != higher else "lower"
            assert f" zero points 1 {side}" in found[tensor]
            assert (f"write {tensor} for" in found[tensor]) == (name != "hqq")


def strange(weight: Tensor) -> Tensor:
    """Return weights with outliers, with a mean for each input, and with outputs of almost one weight."""
    means = torch.randn(weight.shape[1], generator=torch.Generator().manual_seed(1))
    constant = 1 + torch.arange(weight.shape[1]) % 2 * 1e-3
    cubes, shifted = weight[8:] ** 3 / 0.05**2, weight[8:] + 0.05 * means
    rows = torch.arange(len(shifted))[:, None] < len(shifted) // 2
    return torch.cat([constant.expand(8, -1), torch.where(rows, cubes, shifted)])


@pytest.mark.parametrize("name", FORMATS)
def test_sound_offsets_are_not_accused(name: str, tmp_path: Path) -> None:
    quantize, section = FORMATS[name]

    assert findings(modelled(lambda weight: quantize(strange(weight)), section), tmp_path) == {}
