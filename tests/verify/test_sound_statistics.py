"""Unusual statistics of published models: valid values, and no finding of the rules on values."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from qload.layouts.bnb import TABLES
from qload.verify import verify
from tests.paths import FIXTURES
from tests.verify.damage.model import Model
from tests.verify.damage.sound import HIDDEN, MODELS
from tests.verify.damage.sound_floats import MORE

LAST = "model.layers.1."


def deeper(model: Model, layers: int) -> Model:
    """Add layers with the tensors of the first one and a small amount of noise."""
    for layer in range(2, layers):
        for name in [name for name in model.tensors if ".layers.0." in name]:
            noise = 1 + 0.1 * torch.randn(
                model.tensors[name].shape, generator=torch.Generator().manual_seed(layer)
            )
            made = (model.tensors[name].float() * noise).to(model.tensors[name].dtype)
            model.tensors[name.replace(".layers.0.", f".layers.{layer}.")] = made
    model.config["num_hidden_layers"] = layers
    return model


def zero_vocabulary_rows() -> Model:
    """Return a model with zero rows as padding of the vocabulary, at its end and in its middle."""
    model = MODELS["plain"]()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        model.tensors[name][-40:] = 0
        model.tensors[name][100:120] = 0
    return model


def untrained_vocabulary_rows() -> Model:
    """Return a model with the same initial row of the embedding for all untrained tokens."""
    model = MODELS["plain"]()
    embedding = model.tensors["model.embed_tokens.weight"]
    embedding[-40:] = embedding[0].clone()
    return model


def padded_inner_size() -> Model:
    """Return a plain model with 272 neurons more than the 1,024 trained ones in gate, up and down."""
    model, more = MODELS["plain"](), 272
    for name, tensor in list(model.tensors.items()):
        if ".mlp." in name:
            along = int(name.endswith("down_proj.weight"))
            other = (tensor.roll(1, 1 - along) * 0.9).bfloat16()
            shape = (HIDDEN, more) if along else (more, HIDDEN)
            model.tensors[name] = torch.cat([tensor, other, torch.zeros(shape).bfloat16()], along)
    return model


def dead_outputs_of_asymmetric_words() -> Model:
    """Return a model with neurons of zeros, zero points and codes of 0: 3 rows of bytes 0x00."""
    model = MORE["asymmetric"]()
    lead = f"{LAST}mlp.down_proj"
    model.tensors[f"{lead}.weight_packed"][8:11] = 0
    zeros = model.tensors[f"{lead}.weight_zero_point"]
    zeros[1] &= ~0xFFF  # the first three of outputs 8 to 15
    model.tensors[f"{lead}.weight_scale"][8:11] = 1e-7
    return model


def padded_inputs_of_awq() -> Model:
    """Return a model with a group of zero inputs at the end of K, with zero points and codes of 0."""
    model = Model.read(FIXTURES / "awq/model_gemm_g64")
    lead = f"{LAST}mlp.down_proj"
    words, size = model.tensors[f"{lead}.qweight"], model.quantization["group_size"]
    words[-size:] = 0
    model.tensors[f"{lead}.qzeros"][-1] = 0
    model.tensors[f"{lead}.scales"][-1] = 6.6e-7
    return model


def partly_padded_inputs_of_awq() -> Model:
    """Return a model with zero inputs in a group with others: their codes equal the zero points."""
    model = Model.read(FIXTURES / "awq/model_gemm_g64")
    lead = f"{LAST}mlp.down_proj"
    words = model.tensors[f"{lead}.qweight"]
    words[-32:] = model.tensors[f"{lead}.qzeros"][-1]
    return model


def one_huge_weight() -> Model:
    """Return a model with one weight of 150 standard deviations, and the scale of its group."""
    model = MODELS["packed"]()
    scales = model.tensors[f"{LAST}mlp.down_proj.weight_scale"]
    scales[3, 1] *= 60
    return model


def outlier_outputs() -> Model:
    """Return a model with outputs 50 times as large as most."""
    model = MORE["int8"]()
    for name, tensor in model.tensors.items():
        if name.endswith("weight_scale"):
            tensor[::40] *= 50
    return model


def large_queries() -> Model:
    """Return a model with large queries in every layer; a norm of queries permits any size."""
    model = MODELS["packed"]()
    for name, tensor in model.tensors.items():
        if name.endswith("q_proj.weight_scale"):
            tensor *= 60
    return model


def large_keys() -> Model:
    """Return a model with large keys in one-byte codes; a norm of keys permits any size."""
    model = MORE["int8"]()
    for name, tensor in model.tensors.items():
        if name.endswith("k_proj.weight_scale"):
            tensor *= 80
    return model


def small_biases() -> Model:
    """Return a model with untrained small biases of keys, and other biases of zeros."""
    model = MODELS["plain"]()
    for layer in range(2):
        lead = f"model.layers.{layer}.self_attn"
        noise = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(layer))
        model.tensors[f"{lead}.k_proj.bias"] = (noise * 1e-12).bfloat16()
        model.tensors[f"{lead}.q_proj.bias"] = torch.zeros(HIDDEN).bfloat16()
        model.tensors[f"{lead}.v_proj.bias"] = torch.zeros(HIDDEN).bfloat16()
    return model


def norms_of_ones() -> Model:
    model = MODELS["plain"]()
    for name in [name for name in model.tensors if name.endswith("norm.weight")]:
        model.tensors[name].fill_(1)
    return model


def embedding_outliers() -> Model:
    """Return a model with a thousandfold magnitude in a few dimensions, and norms up to 30."""
    model = MODELS["plain"]()
    model.tensors["model.embed_tokens.weight"][:, 7] *= 1000
    model.tensors["model.norm.weight"][5] = 30
    return model


def depth_upscaled() -> Model:
    """Return a deeper model by copies of layers."""
    model = deeper(MODELS["plain"](), 4)
    for name in [name for name in model.tensors if ".layers.0." in name or ".layers.1." in name]:
        for layer in (0, 1):
            if f".layers.{layer}." in name:
                twin = name.replace(f".layers.{layer}.", f".layers.{layer + 2}.")
                model.tensors[twin] = model.tensors[name].clone()
    return model


def shared_block() -> Model:
    """Return a model with one projection shared by all layers; the other projections differ."""
    model = deeper(MODELS["plain"](), 6)
    for layer in range(1, 6):
        for name in ("q", "k", "v", "o"):
            shared = model.tensors[f"model.layers.0.self_attn.{name}_proj.weight"]
            model.tensors[f"model.layers.{layer}.self_attn.{name}_proj.weight"] = shared.clone()
    return model


def experts() -> Model:
    """Return a model with equal initial values of all experts in a layer."""
    model = MODELS["plain"]()
    for layer in range(2):
        for name in ("gate_proj", "up_proj", "down_proj"):
            weight = model.tensors.pop(f"model.layers.{layer}.mlp.{name}.weight")
            for expert in range(4):
                model.tensors[f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight"] = weight.clone()
    return model


def expert_of_no_token() -> Model:
    """Return a model with an expert of small values, the result of weight decay."""
    model = MODELS["packed"]()
    for layer in range(2):
        for name in [name for name in model.tensors if f".layers.{layer}.mlp." in name]:
            for expert in range(3):
                tensor = model.tensors[name].clone()
                small = expert == 2 and layer == 1 and name.endswith("weight_scale")
                other = tensor.roll(expert + 1, 0) if tensor.ndim == 2 else tensor
                made = other * 1e-6 if small else other
                model.tensors[name.replace(".mlp.", f".mlp.experts.{expert}.")] = made
            del model.tensors[name]
    return model


def zero_outputs_of_nested_blocks() -> Model:
    """Return a model with blocks of zeros: their quantized scale is near zero, no code is 1 or -1."""
    model = Model.read(FIXTURES / "bnb/nf4_nested_bf16_storage_128x256")
    name = next(name for name in model.tensors if name.endswith(".weight") and "absmax" not in name)
    stored = model.tensors[name]
    data = stored.view(torch.uint8).flatten()
    zero = TABLES["nf4"].index(0.0)
    data[:256] = zero << 4 | zero
    state = next(name for name in model.tensors if "quant_state" in name)
    offset = json.loads(bytes(model.tensors[state].tolist()))["nested_offset"]
    table = model.tensors[f"{name}.nested_quant_map"]
    largest = model.tensors[f"{name}.nested_absmax"]
    nearest = (table * largest[0] + offset).abs().argmin()
    model.tensors[f"{name}.absmax"][:8] = nearest.to(torch.uint8)
    return model


SOUND: tuple[Callable[[], Model], ...] = (
    zero_vocabulary_rows, untrained_vocabulary_rows, padded_inner_size, dead_outputs_of_asymmetric_words,
    padded_inputs_of_awq, partly_padded_inputs_of_awq, one_huge_weight, outlier_outputs,
    large_queries, large_keys,
    small_biases, norms_of_ones, embedding_outliers, depth_upscaled, shared_block, experts,
    expert_of_no_token, zero_outputs_of_nested_blocks,
)  # fmt: skip


@pytest.mark.parametrize("make", SOUND, ids=lambda make: make.__name__)
def test_what_published_models_are_is_no_damage(make: Callable[[], Model], tmp_path: Path) -> None:
    report = verify(make().write(tmp_path / "model"))

    assert report.layers
    assert report.findings == ()


@pytest.mark.parametrize("name", sorted(set(MORE) - set(MODELS)))
def test_a_sound_model_of_each_format_is_clean(name: str, tmp_path: Path) -> None:
    report = verify(MORE[name]().write(tmp_path / "model"))

    assert report.findings == ()
    assert report.coverage is not None
    assert report.coverage.explained == report.coverage.total
