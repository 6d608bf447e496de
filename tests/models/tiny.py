"""Tiny random Llamas: of two layers, four heads of queries over two of keys, and a vocabulary of 32."""

from typing import Any

import torch
from torch import Tensor

from qload import DefaultWeightsLoader, MemoryStorage, Weights
from qload.models import Decoder, load_model
from qload.parallel import ALONE, ProcessGroup

H, INNER, VOCAB, HEADS, KV_HEADS, HEAD, POSITIONS = 32, 48, 32, 4, 2, 8, 64
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": H,
    "intermediate_size": INNER,
    "vocab_size": VOCAB,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
    "num_hidden_layers": 2,
    "max_position_embeddings": POSITIONS,
    "eos_token_id": None,
    "torch_dtype": "float32",
}


def tensors(seed: int = 0) -> dict[str, Tensor]:
    """All tensors of the model, as a checkpoint names them; float32."""
    generator = torch.Generator().manual_seed(seed)
    rows, keys = HEADS * HEAD, KV_HEADS * HEAD
    layer = {
        "self_attn.q_proj": (rows, H), "self_attn.k_proj": (keys, H), "self_attn.v_proj": (keys, H),
        "self_attn.o_proj": (H, rows), "mlp.gate_proj": (INNER, H), "mlp.up_proj": (INNER, H),
        "mlp.down_proj": (H, INNER), "input_layernorm": (H,), "post_attention_layernorm": (H,),
    }  # fmt: skip
    layers = range(CONFIG["num_hidden_layers"])
    shapes = {f"model.layers.{n}.{name}": shape for n in layers for name, shape in layer.items()}
    shapes |= {"model.embed_tokens": (VOCAB, H), "model.norm": (H,), "lm_head": (VOCAB, H)}
    return {
        f"{name}.weight": torch.randn(shape, generator=generator) * (0.3 if len(shape) > 1 else 1.0)
        for name, shape in shapes.items()
    }


def model(group: ProcessGroup = ALONE, seed: int = 0, **said: Any) -> Decoder:
    """The model, or a rank's share of it; `said`: keys of its config that are different."""
    weights = Weights(MemoryStorage(tensors(seed)), loader=DefaultWeightsLoader(), process_group=group)
    return load_model(weights, {**CONFIG, **said})
