"""A small checkpoint of a case: two layers that are cut by outputs, two by inputs, and a config."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from qload.conformance.case import ConformanceCase
from qload.errors import ArgumentError
from qload.testing.drawn import DrawnLayer
from qload.testing.layers_of import layer_of
from qload.testing.traits import Traits

BLOCK = "model.layers.0"
COLUMN = (f"{BLOCK}.self_attn.q_proj", f"{BLOCK}.mlp.up_proj")
ROW = (f"{BLOCK}.self_attn.o_proj", f"{BLOCK}.mlp.down_proj")


def layers_of_case(case: ConformanceCase) -> dict[str, DrawnLayer]:
    """The four layers by name, each of other numbers."""
    sizes = ((case.K, case.K), (case.N, case.K), (case.K, case.K), (case.K, case.N))
    return {
        name: layer_of(case.traits, N, K, filling="noise", seed=seed)
        for seed, (name, (N, K)) in enumerate(zip((*COLUMN, *ROW), sizes, strict=True))
    }


def quantization_config(traits: Traits) -> dict[str, Any] | None:
    """What the config of a checkpoint says of layers with these `traits`; None for plain ones.

    ArgumentError for a format whose tool writes none that is known here.
    """
    if traits.format not in _SAID:
        raise ArgumentError("format", f"one of {', '.join(_SAID)} for files", repr(traits.format))
    return _SAID[traits.format](traits)


def write(folder: Path, tensors: Mapping[str, Tensor], case: ConformanceCase, files: int = 1) -> list[Path]:
    """Write `tensors` into so many `files` of a `folder`, with the config of a `case`; return their paths."""
    folder.mkdir(exist_ok=True)
    said: dict[str, Any] = {"model_type": "llama", "hidden_size": case.K, "intermediate_size": case.N}
    said |= {"num_hidden_layers": 1, "num_attention_heads": 8, "torch_dtype": case.dtype}
    quantization = quantization_config(case.traits)
    if quantization is not None:
        said["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(said))
    names = sorted(tensors)
    if files == 1:
        parts = {"model.safetensors": names}
    else:
        parts = {f"model-{at + 1:05}-of-{files:05}.safetensors": names[at::files] for at in range(files)}
        where = {name: file for file, held in parts.items() for name in held}
        index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": where}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for file, held in parts.items():
        save_file({name: tensors[name].contiguous() for name in held}, folder / file)
    return [folder / file for file in parts]


def _gptq(traits: Traits) -> dict[str, Any]:
    return {
        "quant_method": "gptq",
        "bits": traits.bits,
        "group_size": traits.group_size,
        "desc_act": traits.act_order,
        "sym": traits.symmetric,
        "checkpoint_format": "gptq_v2" if traits.zeros == "v2" else "gptq",
    }


def _awq(traits: Traits) -> dict[str, Any]:
    said = {"quant_method": "awq", "bits": traits.bits, "group_size": traits.group_size, "version": "gemm"}
    return {**said, "zero_point": not traits.symmetric}


def _fp8(traits: Traits) -> dict[str, Any]:
    said: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    return {**said, "weight_block_size": [128, 128]} if traits.variant == "block" else said


def _bnb(traits: Traits) -> dict[str, Any]:
    said = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_compute_dtype": traits.dtype}
    double = traits.variant == "double"
    return {**said, "bnb_4bit_quant_type": traits.format[-3:], "bnb_4bit_use_double_quant": double}


_SAID: dict[str, Callable[[Traits], dict[str, Any] | None]] = {
    "unquantized": lambda traits: None,
    "gptq": _gptq,
    "awq": _awq,
    "fp8": _fp8,
    "bnb_nf4": _bnb,
    "bnb_fp4": _bnb,
}
