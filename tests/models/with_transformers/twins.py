"""transformers' model of the same tensors: a checkpoint that transformers itself reads, in float32."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

OF_RANGE = 1e-5  # of the logits: how far float32 may be off


def twin(folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any], sees: bool = False) -> Any:
    """The model of plain `tensors`; its own loader stacks what it stacks, and has to find all of them."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: tensor.float().contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors"
    )
    said = {key: value for key, value in config.items() if key != "quantization_config"}
    (folder / "config.json").write_text(json.dumps({**said, "dtype": "float32"}))
    kind = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    how = {"dtype": torch.float32, "attn_implementation": "eager", "output_loading_info": True}
    model, found = kind.from_pretrained(folder, **how)
    wrong = {key: list(found[key]) for key in ("missing_keys", "unexpected_keys", "mismatched_keys")}
    assert not any(wrong.values()), wrong
    return model.eval()


def assert_close(got: Tensor, want: Tensor) -> None:
    """Within float32's share of the range of what is wanted; NaN is not."""
    assert (got - want).abs().max() <= OF_RANGE * (want.max() - want.min())
