"""Tiny models of any type of transformers as quantized checkpoints, and plain ones of what they mean.

A layer is quantized if its weight is a matrix that a format can hold; embeddings, heads, norms, convolutions
and routers stay plain unless they are asked for. `stacks`: experts in one tensor are FP8 in blocks as well.
"""

import json
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from qload import open_checkpoint
from tests.engines.transformers.models import Stored
from tests.model_tables.build import stored_name, transposed_names
from tests.model_tables.tiny import fill
from tests.models.with_transformers.stored import FORMATS, GROUP, Format, compressed, scales

EXPERTS = 4
PLAIN = ("embed", "lm_head", "conv", "wte", "norm", "router")
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "vocab_size_per_layer_input": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "ffn_hidden_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 96),
    "head_dim": 16,
    "moe_intermediate_size": 32,
    "expert_ffn_hidden_size": 32,
    "shared_expert_intermediate_size": 32,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), EXPERTS),
    **dict.fromkeys(
        ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"), 2
    ),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "first_k_dense_replace"), 1),
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "zero_expert_num": 2,
    "enable_moe_block": True,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
LATENT: dict[str, Any] = {"head_dim": None, "num_key_value_heads": 4}  # the class has a head size of its own
MAMBA: dict[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}
OWN: Mapping[str, dict[str, Any]] = {  # a type's own sizes; None: that of the class
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "layer_types": None,
        "num_hidden_layers": 4,
        "ssm_state_size": 16,
        "mamba_num_heads": 4,
        "mamba_head_dim": 32,
        "n_groups": 2,
        "conv_kernel": 4,
        "expand": 2,
        "chunk_size": 16,
        "moe_shared_expert_intermediate_size": 64,
    },
    "lfm2_moe": {"num_dense_layers": 1, "layer_types": ["conv", "full_attention"]},
    "deepseek_v4": {
        "num_key_value_heads": 1,
        "head_dim": 32,
        "moe_intermediate_size": 64,
        "o_groups": 2,
        "o_lora_rank": 16,
        "index_n_heads": 2,
        "index_head_dim": 32,
        "index_topk": 4,
    },
    **dict.fromkeys(
        (
            "axk1",
            "axk2",
            "bailing_hybrid",
            "deepseek_v2",
            "deepseek_v3",
            "deepseek_v32",
            "dots3_note_text",
            "glm4_moe_lite",
            "glm_moe_dsa",
            "kimi_linear",
            "minicpm3",
            "youtu",
        ),
        LATENT,
    ),
    "longcat_flash": {**LATENT, "num_layers": 2, "qk_head_dim": 32, "head_dim": 16},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"], **MAMBA},
    "jamba": {
        "layer_types": None,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
    },
    "beam": {
        "mlp_layer_types": ["dense", "sparse"],
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "flint": {"mlp_only_layers": [0], "layer_types": ["full_attention", "sliding_attention"]},
    "zaya": {"num_experts_per_tok": 1},
    "bamba": {"attn_layer_indices": [1], **MAMBA},
    "mamba2": {"num_heads": 4, "head_dim": 32, "state_size": 16, "n_groups": 1, "chunk_size": 16},
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"],
        "layer_types": None,
        "mamba_d_state": 16,
        "n_mamba_heads": 4,
        "chunk_size": 16,
        "adapter_rank": 16,
    },
    **{kind: {"intermediate_size": 128} for kind in ("falcon_mamba", "mamba")},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "codegen": {"rotary_dim": 8},
    "gptj": {"rotary_dim": 8},
}


def tiny_config(kind: str) -> Any:
    """A small config of a type, with its first two kinds of layers."""
    default = AutoConfig.for_model(kind)
    known = {*default.to_dict(), *default.attribute_map}
    own = OWN.get(kind, {})
    sizes = {name: size for name, size in {**SIZES, **own}.items() if name in known or name in own}
    kinds = list(dict.fromkeys(getattr(default, "layer_types", None) or ()))
    if "layer_types" not in own and len(kinds) > 1:
        sizes["layer_types"] = kinds[:2]
    return AutoConfig.for_model(kind, **{name: size for name, size in sizes.items() if size is not None})


def tiny_model(config: Any, model_class: Any = AutoModelForCausalLM) -> Any:
    """A model of random weights."""
    model = model_class.from_config(config)
    fill(model, 3)
    return model


def stored_model(
    model: Any,
    name: str,
    folder: Path,
    *,
    stacks: bool = False,
    also: Iterable[str] = (),
    only: str = "",
) -> Stored:
    """A model as a checkpoint in a format.

    `also`: parts of names of plain layers to quantize as well. `only`: a part of the names of all layers to
    quantize.
    """
    form, draw = {**FORMATS, "nvfp4": NVFP4}[name], torch.Generator().manual_seed(1)
    if not (folder / "plain").exists():
        model.save_pretrained(folder / "plain")
    means: dict[str, Tensor] = {}
    for file in (folder / "plain").glob("*.safetensors"):
        means |= load_file(file)
    config = json.loads((folder / "plain" / "config.json").read_text())
    embeddings = embedding_names(model)
    layers = [
        one.removesuffix(".weight")
        for one, each in means.items()
        if is_quantized(one, each, also) and only in one and (one not in embeddings or also)
    ]
    turned = transposed_names(model)
    beyond = {one for one in means if config.get("zero_expert_num") and is_beyond(one)}
    layers = [prefix for prefix in layers if f"{prefix}.weight" not in beyond]
    tensors = {
        one: each
        for one, each in means.items()
        if one not in beyond and one.removesuffix(".weight") not in layers
    }
    for prefix in layers:
        shape = means[f"{prefix}.weight"].shape
        fields = form.layer(*(shape[::-1] if f"{prefix}.weight" in turned else shape), draw)
        tensors |= {f"{prefix}.{field}": tensor for field, tensor in fields.items()}
    if stacks:
        for one in [one for one, each in tensors.items() if each.ndim == 3 and is_stack(one)]:
            E, *sizes = tensors.pop(one).shape
            experts = [FORMATS["fp8 block"].layer(*sizes, draw) for _ in range(E)]
            for field, suffix in (("weight", ""), ("weight_scale_inv", "_scale_inv")):
                tensors[f"{one}{suffix}"] = torch.stack([expert[field] for expert in experts])
            means[one] = torch.stack([dequantized(expert) for expert in experts])
    plain = sorted(
        one.removesuffix(".weight")
        for one, each in tensors.items()
        if one.endswith(".weight")
        and each.ndim == 2
        and each.dtype.is_floating_point
        and each.dtype.itemsize > 1
    )
    plain = [name for name in plain if not any(f".{name}." in f"{prefix}." for prefix in layers)]
    key = "ignore" if form.section["quant_method"] == "compressed-tensors" else "modules_to_not_convert"
    section = {**form.section, key: plain}
    stored, plain_copy = folder / name / "stored", folder / name / "means"
    write(stored, tensors, {**config, "quantization_config": section})
    with open_checkpoint(stored) as weights:
        for prefix in layers:
            weight, one = weights.get_weights(prefix).dequantize(), f"{prefix}.weight"
            means[one] = weight.T if one in turned else weight
    write(plain_copy, means, config)
    return Stored(stored, plain_copy, type(model))


def embedding_names(model: Any) -> set[str | None]:
    """Return the stored names of the head, and of matrices whose rows are looked up."""
    tables = [each for each in model.modules() if isinstance(each, nn.Embedding)]
    return {stored_name(model, each) for each in (*tables, model.get_output_embeddings()) if each is not None}


def nvfp4(N: int, K: int, generator: torch.Generator) -> Mapping[str, Tensor]:
    """A layer in NVFP4, with a global scale of 2."""
    codes = torch.randint(0, 256, (N, K // 2), generator=generator)
    return {
        "weight_packed": codes.to(torch.uint8),
        "weight_scale": scales((N, K // GROUP), K, 1.5, generator, torch.float8_e4m3fn),
        "weight_global_scale": torch.tensor([2.0]),
    }


NVFP4 = Format(
    compressed(
        "nvfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": GROUP},
    ),
    nvfp4,
)


@cache
def stored_type(kind: str, name: str, stacks: bool = False, also: tuple[str, ...] = ()) -> Stored:
    """A random model of a type in a format, made once in a process."""
    folder = Path(mkdtemp(prefix="qload-type-"))
    return stored_model(tiny_model(tiny_config(kind)), name, folder, stacks=stacks, also=also)


def is_quantized(name: str, tensor: Tensor, also: Iterable[str]) -> bool:
    """Whether a tool quantizes a matrix."""
    N, K = tensor.shape if name.endswith(".weight") and tensor.ndim == 2 else (1, 1)
    fits = N % 8 == 0 and K % GROUP == 0
    inner = name if name.startswith(PLAIN) else name.partition(".")[2]  # without roberta_prelayernorm
    is_plain = any(part in inner for part in PLAIN) and not any(part in name for part in also)
    return fits and not is_plain


def is_beyond(name: str) -> bool:
    """Whether a tensor is of an expert without weights, for which transformers writes the first matrix."""
    number = name.partition(".experts.")[2].partition(".")[0]
    return number.isdigit() and int(number) >= EXPERTS


def is_stack(name: str) -> bool:
    """Whether a tensor of three axes has the matrices of all experts."""
    return "expert" in name or name.endswith(("input_linear.weight", "output_linear.weight"))


def dequantized(layer: Mapping[str, Tensor]) -> Tensor:
    """Values of a layer in FP8 blocks."""
    codes, scales = layer["weight"].float(), layer["weight_scale_inv"]
    N, K = codes.shape
    return codes * scales.repeat_interleave(GROUP, 0)[:N].repeat_interleave(GROUP, 1)[:, :K]


def write(folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    """A checkpoint in one file."""
    folder.mkdir(parents=True)
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
