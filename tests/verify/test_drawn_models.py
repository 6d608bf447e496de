"""No findings in valid models of any type with a table, in any format, with additional files."""

import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from qload import architecture_of
from qload.architecture.model_tables import TABLES
from qload.verify import verify
from tests.example_counts import at_most
from tests.verify.damage.model import Model
from tests.verify.damage.sound import Quantize
from tests.verify.damage.sound_floats import MORE

WIDTH = 128  # divisible by the groups of every format
CACHE = ("k_scale", "v_scale")
FORMATS = sorted(MORE)


def config_of(kind: str, layers: int) -> dict[str, Any]:
    """Return a tiny config of any type, with matrix sizes for every format."""
    return {
        "model_type": kind, "hidden_size": 2 * WIDTH, "intermediate_size": 2 * WIDTH, "ffn_dim": 2 * WIDTH,
        "moe_intermediate_size": WIDTH, "shared_expert_intermediate_size": WIDTH,
        "intermediate_size_mlp": 2 * WIDTH, "num_hidden_layers": layers, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 96, "num_experts": 3,
        "num_local_experts": 3, "n_routed_experts": 3, "n_shared_experts": 1, "first_k_dense_replace": 1,
        "num_experts_per_tok": 2, "q_lora_rank": WIDTH, "kv_lora_rank": WIDTH, "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64, "v_head_dim": 64, "tie_word_embeddings": False,
    }  # fmt: skip


def of_type(config: dict[str, Any], seed: int) -> Callable[[Quantize, dict[str, Any] | None], Model]:
    """Return a function from a quantizer to a model of this type; linear layers of other sizes stay plain."""

    def make(quantize: Quantize, said: dict[str, Any] | None) -> Model:
        architecture = architecture_of(config)
        assert architecture is not None
        draw = torch.Generator().manual_seed(seed)
        tensors: dict[str, Tensor] = {}
        for name in architecture.required():
            matrix = architecture.expected(name)
            shape = matrix or architecture.shape(name)
            assert shape is not None
            values = torch.randn(shape, generator=draw) * 0.05
            linear = matrix is not None and not matrix[0] % WIDTH and not matrix[1] % WIDTH
            inside = any(part.isdecimal() for part in name.split("."))
            if linear and inside and not name.endswith(".gate"):
                tensors |= {f"{name}.{field}": tensor for field, tensor in quantize(values).items()}
            else:
                own = name if matrix is None else f"{name}.weight"
                tensors[own] = (values if matrix else 1 + values).bfloat16()
        return Model(tensors, config if said is None else {**config, "quantization_config": said})

    return make


def beside(model: Model, cache: bool) -> None:
    """Add scales of the key/value cache to layers with keys."""
    if cache:
        for name in [name for name in model.tensors if ".self_attn.k_proj.weight" in name]:
            lead = name.partition(".k_proj.")[0]
            for scale in CACHE:
                model.tensors[f"{lead}.{scale[0]}_proj.{scale}"] = torch.tensor(0.02)


def consolidate(model: Model, folder: Path) -> None:
    """Write a copy of the weights under the original names, outside the index."""
    others = {name.removeprefix("model."): tensor.clone() for name, tensor in model.tensors.items()}
    save_file(others, folder / "consolidated.safetensors")
    names = dict.fromkeys(model.tensors, "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))


def check(kind: str, form: str, layers: int, seed: int, cache: bool, consolidated: bool) -> None:
    model = MORE[form](make=of_type(config_of(kind, layers), seed))
    beside(model, cache)
    with TemporaryDirectory() as folder:
        path = model.write(Path(folder))
        if consolidated:
            consolidate(model, path)
        report = verify(path)
    assert report.findings == (), f"{kind}, {form}, {layers} layers, seed {seed}"
    assert report.coverage is not None
    assert report.coverage.explained + report.coverage.unread == report.coverage.total


@pytest.mark.parametrize("kind", sorted(TABLES))
def test_a_model_of_each_type_is_clean(kind: str) -> None:
    form = FORMATS[sorted(TABLES).index(kind) % len(FORMATS)]
    check(kind, form, 2, 0, True, False)


DRAWN = (
    st.sampled_from(sorted(TABLES)), st.sampled_from(FORMATS), st.integers(2, 3), st.integers(0, 999),
    st.booleans(), st.booleans(),
)  # fmt: skip


@at_most(6)
@given(*DRAWN)
def test_drawn_models_are_clean(
    kind: str, form: str, layers: int, seed: int, cache: bool, consolidated: bool
) -> None:
    check(kind, form, layers, seed, cache, consolidated)
