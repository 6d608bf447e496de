"""Names of DeepSeek V4 against transformers' own renames: only `nox -s transformers` collects this file."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key

from qload import convert
from qload.architecture.published_names import transformers_name
from qload.testing import assert_same_bits
from tests.conversion.test_published_names import SECTION

CONFIG = {"model_type": "deepseek_v4"}
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 128,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "head_dim": 64,
    "q_lora_rank": 128,
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
    "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
    "mlp_layer_types": ["hash_moe", "moe", "moe"],
    "o_groups": 2,
    "o_lora_rank": 64,
    "index_n_heads": 4,
    "index_head_dim": 32,
    "index_topk": 4,
    "hc_mult": 2,
    "num_nextn_predict_layers": 0,
    "sliding_window": 8,
    "max_position_embeddings": 256,
}
FP8 = (".wq_a.", ".wq_b.", ".attn.wkv.", ".wo_a.", ".wo_b.", ".shared_experts.")  # as published
PUBLISHED_ENDS = {"lm_head.weight": "head.weight", "embed_tokens.weight": "embed.weight"}
TOKENS = torch.arange(40)[None] % SIZES["vocab_size"]


def exponents(*shape: int) -> Tensor:
    return torch.randint(118, 122, shape, dtype=torch.uint8).view(torch.float8_e8m0fnu)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, DeepseekV4ForCausalLM]:
    """A tiny model in the names, dtypes and config of DeepSeek, and transformers' own model of its sizes."""
    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("v4")
    model = DeepseekV4ForCausalLM(DeepseekV4Config(**SIZES))
    model.save_pretrained(folder)
    tensors = {}
    for own, value in load_file(folder / "model.safetensors").items():
        bare = own.removeprefix("model.")
        name = PUBLISHED_ENDS.get(bare, bare).replace(".attn.norm.", ".attn.kv_norm.")
        scale = f"{name.removesuffix('.weight')}.scale"
        if ".experts." in name:
            N, K = value.shape
            tensors[name], tensors[scale] = (
                torch.randint(-128, 128, (N, K // 2)).to(torch.int8),
                exponents(N, K // 32),
            )
        elif any(part in name for part in FP8):
            N, K = value.shape
            tensors[name], tensors[scale] = (
                (value * 100).to(torch.float8_e4m3fn),
                exponents(-(-N // 128), -(-K // 128)),
            )
        else:
            plain = value.ndim == 2 and value.is_floating_point() and "hc_" not in name
            tensors[name] = value.bfloat16() if plain else value
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"dtype": "bfloat16", "expert_dtype": "fp4", "quantization_config": SECTION}
    (folder / "config.json").write_text(json.dumps(config))
    return folder, model


def logits(folder: Path) -> Tensor:
    """Return the logits of transformers' class, which has to find every tensor and no other."""
    model, found = DeepseekV4ForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, output_loading_info=True
    )
    assert not any(found.values()), found
    with torch.no_grad():
        return model.eval()(TOKENS).logits


def test_names_are_those_of_transformers_renames(published: tuple[Path, DeepseekV4ForCausalLM]) -> None:
    folder, model = published
    mapping = get_model_conversion_mapping(model)
    renames = [each for each in mapping if isinstance(each, WeightRenaming)]
    own = model.state_dict()
    names = [name for name in load_file(folder / "model.safetensors") if not name.endswith(".scale")]

    for name in names:
        theirs, _ = rename_source_key(name, renames, [], model.base_model_prefix, own)
        if ".experts." in name:  # joined by a converter after the renames
            theirs = f"{model.base_model_prefix}.{theirs}"
        assert transformers_name(CONFIG, name) == theirs
    assert {transformers_name(CONFIG, name) for name in own if "mlp.experts." not in name} <= own.keys()


@pytest.mark.parametrize("to", [None, "bfloat16"])
def test_transformers_computes_the_same_with_its_own_names(
    published: tuple[Path, DeepseekV4ForCausalLM], to: str | None, tmp_path: Path
) -> None:
    """Test against the logits of the published names, and against those of the dequantized values."""
    source, _ = published

    done = convert(source, tmp_path / "out", to=to, names="transformers")
    convert(source, tmp_path / "plain", to="bfloat16")

    want = logits(tmp_path / "plain")
    assert set(done.counts) == {"bits"}
    assert_same_bits(logits(tmp_path / "out"), want)
    assert_same_bits(logits(source), want)
    assert want.std() > 0
