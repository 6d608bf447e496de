"""Small handmade checkpoints, plain and GPTQ, for the tests of rules."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from qload.verify import Report

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 8, "desc_act": False, "sym": True}


def model(folder: Path, tensors: dict[str, Tensor], **config: Any) -> Path:
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def gptq(prefix: str = "", *, zero: int = 7) -> dict[str, Tensor]:
    g_idx = torch.arange(16, dtype=torch.int32) // 8
    lead = f"{prefix}." if prefix else ""
    return {
        f"{lead}qweight": torch.zeros(2, 8, dtype=torch.int32),
        f"{lead}qzeros": torch.full((2, 1), 0x11111111 * zero - (zero > 7) * 2**32, dtype=torch.int32),
        f"{lead}scales": torch.ones(2, 8, dtype=torch.float16),
        f"{lead}g_idx": g_idx,
    }


def comfy_convrot(prefix: str, size: int) -> dict[str, Tensor]:
    """Codes of 8 bits with inputs in blocks of `size` turned by a Hadamard matrix."""
    mark = {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": size}
    codes = torch.arange(8 * 32).remainder(101).sub(50).reshape(8, 32)
    return {
        f"{prefix}.weight": codes.to(torch.int8),
        f"{prefix}.weight_scale": torch.full((8, 1), 0.5),
        f"{prefix}.comfy_quant": torch.tensor([*json.dumps(mark).encode()], dtype=torch.uint8),
    }


def plain(*names: str) -> dict[str, Tensor]:
    return {name: torch.ones(4, 4) for name in names}


def rules(report: Report) -> set[str]:
    return {finding.rule for finding in report.findings}
