"""Scales of zero: lawful over codes that mean zeros, a finding over codes that differ, in blocks too."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qload.verify import verify
from tests.verify.checkpoints import model, rules

pytestmark = pytest.mark.usefixtures("seen_texts")

SIZE = 128
LAYER = "model.layers.0.mlp.up_proj"


def block_fp8(N: int, K: int, scale: str) -> dict[str, Tensor]:
    """Normal weights in FP8, a scale for each block of 128 by 128, the last of which may be short."""
    weight = torch.randn(N, K, generator=torch.Generator().manual_seed(0)) * 0.05
    scales = torch.ones(-(-N // SIZE), -(-K // SIZE))
    for n in range(scales.shape[0]):
        for k in range(scales.shape[1]):
            block = weight[n * SIZE : (n + 1) * SIZE, k * SIZE : (k + 1) * SIZE]
            scales[n, k] = block.abs().max() / 448
            block /= scales[n, k]
    return {f"{LAYER}.weight": weight.to(torch.float8_e4m3fn), f"{LAYER}.{scale}": scales}


FP8 = {"quant_method": "fp8", "weight_block_size": [SIZE, SIZE], "activation_scheme": "dynamic"}
NUMBERS = {
    "num_bits": 8,
    "type": "float",
    "strategy": "block",
    "block_structure": [SIZE, SIZE],
    "symmetric": True,
}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": NUMBERS}},
}
DIALECTS: dict[str, tuple[str, dict[str, Any]]] = {
    "fp8": ("weight_scale_inv", FP8),
    "compressed-tensors": ("weight_scale", COMPRESSED),
}


def scales_lost(weight: Tensor, scales: Tensor) -> None:
    """A quarter of the scales are zero, over the codes that were there."""
    scales[::2, ::2] = 0


def test_zero_scales_of_either_sign_are_a_finding_and_offsets_of_zero_are_not(tmp_path: Path) -> None:
    words = torch.randint(-(2**31), 2**31, (64, 16), generator=torch.Generator().manual_seed(0))
    tensors = {f"{LAYER}.weight": words.to(torch.int32).view(torch.uint32)}
    section = {"group_size": 64, "bits": 4, "mode": "affine"}
    for lost, kept in (("scales", "biases"), ("biases", "scales")):
        tensors[f"{LAYER}.{lost}"] = torch.zeros(64, 2)
        tensors[f"{LAYER}.{kept}"] = torch.linspace(-0.01, 0.01, 128).reshape(64, 2)
        folder = tmp_path / lost
        folder.mkdir()
        found = rules(verify(model(folder, tensors, quantization=section)))
        assert ("scale-value" in found) == (lost == "scales")


def zeros(weight: Tensor, scales: Tensor) -> None:
    """The same blocks hold zeros alone."""
    scales[::2, ::2] = 0
    weight.view(torch.uint8)[:SIZE, :SIZE] = weight.view(torch.uint8)[:SIZE, 2 * SIZE : 3 * SIZE] = 0
    weight.view(torch.uint8)[2 * SIZE :, :SIZE] = weight.view(torch.uint8)[
        2 * SIZE :, 2 * SIZE : 3 * SIZE
    ] = 0


def zeros_of_both_signs(weight: Tensor, scales: Tensor) -> None:
    """The same, and every other zero is a negative one."""
    zeros(weight, scales)
    for n, k in ((0, 0), (0, 2), (2, 0), (2, 2)):
        weight.view(torch.uint8)[n * SIZE : (n + 1) * SIZE, k * SIZE : (k + 1) * SIZE : 2] = 0x80


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(
    ("change", "found"), [(scales_lost, {"value-outlier"}), (zeros, set()), (zeros_of_both_signs, set())]
)
def test_scales_of_blocks_may_be_zero_over_zeros_alone(
    change: Callable[[Tensor, Tensor], None], found: set[str], dialect: str, tmp_path: Path
) -> None:
    scale, config = DIALECTS[dialect]
    tensors = block_fp8(3 * SIZE - 28, 4 * SIZE, scale)
    change(tensors[f"{LAYER}.weight"], tensors[f"{LAYER}.{scale}"])

    report = verify(model(tmp_path, tensors, quantization_config=config))

    assert rules(report) == found
    assert [finding.tensor for finding in report.findings] == [f"{LAYER}.{scale}"] * len(found)


def test_rows_that_are_constant_and_differ_from_each_other_are_codes_that_differ(tmp_path: Path) -> None:
    tensors = block_fp8(2 * SIZE, 4 * SIZE, "weight_scale_inv")
    tensors[f"{LAYER}.weight"][:SIZE, :SIZE] = torch.arange(SIZE).float()[:, None].to(torch.float8_e4m3fn)
    tensors[f"{LAYER}.weight_scale_inv"][0, 0] = 0

    report = verify(model(tmp_path, tensors, quantization_config=FP8))

    assert [(finding.rule, finding.message) for finding in report.findings] == [
        (
            "value-outlier",
            f"{LAYER}.weight_scale_inv: 12.5% of the scales are zero, and the codes of their groups differ",
        )
    ]
