"""GGUF files of `convert`: names and values by gguf-py. Only `nox -s outsiders` collects this file."""

import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from qload import convert, open_checkpoint
from tests.conversion.drawn_models import FORMATS, MODELS, checkpoint

gguf = pytest.importorskip("gguf")
ARCHITECTURES = {"qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3moe"}
EXPERT = re.compile(r"experts\.(\d+)\.")


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kind", FORMATS)
def test_gguf_py_reads_the_same_values(model: str, kind: str, tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "in", model, kind)
    convert(source, tmp_path / "out", to="gguf")
    read = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "out" / "model.gguf").tensors}
    architecture = ARCHITECTURES.get(model, "llama")
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, 1)

    with open_checkpoint(source) as weights:
        stored = load_file(source / "model.safetensors")
        for prefix in (
            name.removesuffix(".weight_scale") for name in stored if name.endswith("weight_scale")
        ):
            stem, expert = names.get_name(re.sub(r"experts\.\d+", "experts", prefix)), EXPERT.search(prefix)
            tensor = read[f"{stem}.weight"]
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(tensor.shape[::-1])
            if kind == "NVFP4":
                values *= read[f"{stem}.scale"].data.reshape(-1, *(1 for _ in values.shape[1:]))
            wanted = weights.get_weights(prefix).dequantize().numpy()
            if architecture == "llama" and stem.endswith(("attn_q", "attn_k")):
                heads = 4 if stem.endswith("attn_q") else 2
                wanted = wanted.reshape(heads, 2, -1, wanted.shape[1]).swapaxes(1, 2).reshape(wanted.shape)
            assert np.array_equal(values[int(expert[1])] if expert else values, wanted)
