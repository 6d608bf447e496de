"""Tiny models that see, of Idefics2's shape: a config, and random tensors by their names and sizes."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qload.models.config import text_config

CONFIG: dict[str, Any] = {
    "model_type": "idefics2",
    "image_token_id": 95,
    "tie_word_embeddings": False,
    "vision_config": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 35,
        "patch_size": 7,
    },
    "perceiver_config": {
        "hidden_size": 64,
        "resampler_n_latents": 5,
        "resampler_depth": 2,
        "resampler_n_heads": 4,
        "resampler_head_dim": 8,
        "num_key_value_heads": 2,
    },
    "text_config": {
        "model_type": "mistral",
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "sliding_window": None,
        "rms_norm_eps": 1e-5,
    },
}
VISION, LINK, TEXT = "model.vision_model", "model.connector", "model.text_model"


def sight_shapes() -> dict[str, tuple[int, ...]]:
    """Of each tensor of the tower and the connector."""
    H, inner = 64, 128
    shapes: dict[str, tuple[int, ...]] = {
        f"{VISION}.embeddings.patch_embedding.weight": (32, 3, 7, 7),
        f"{VISION}.embeddings.patch_embedding.bias": (32,),
        f"{VISION}.embeddings.position_embedding.weight": (25, 32),
        f"{LINK}.perceiver_resampler.latents": (5, H),
        f"{LINK}.perceiver_resampler.norm.weight": (H,),
        f"{LINK}.modality_projection.down_proj.weight": (H, inner),
    }
    for name in ("gate", "up"):
        shapes[f"{LINK}.modality_projection.{name}_proj.weight"] = (inner, 32)
    for layer in (f"{VISION}.encoder.layers.{n}" for n in range(2)):
        linears = {f"{layer}.self_attn.{name}_proj": (32, 32) for name in ("q", "k", "v", "out")}
        linears |= {f"{layer}.mlp.fc1": (48, 32), f"{layer}.mlp.fc2": (32, 48)}
        shapes |= {f"{name}.weight": shape for name, shape in linears.items()}
        shapes |= {f"{name}.bias": shape[:1] for name, shape in linears.items()}
    for layer in (f"{LINK}.perceiver_resampler.layers.{n}" for n in range(2)):
        heads = {"q": (32, H), "k": (16, H), "v": (16, H), "o": (H, 32)}
        shapes |= {f"{layer}.self_attn.{name}_proj.weight": shape for name, shape in heads.items()}
        wide = {"gate": (4 * H, H), "up": (4 * H, H), "down": (H, 4 * H)}
        shapes |= {f"{layer}.mlp.{name}_proj.weight": shape for name, shape in wide.items()}
        names = ("input_latents_norm", "input_context_norm", "post_attention_layernorm")
        shapes |= {f"{layer}.{name}.weight": (H,) for name in names}
    norms = [f"{VISION}.encoder.layers.{n}.layer_norm{place}" for n in range(2) for place in (1, 2)]
    both = [f"{norm}.{part}" for norm in [*norms, f"{VISION}.post_layernorm"] for part in ("weight", "bias")]
    return shapes | dict.fromkeys(both, (32,))


def sight(seed: int = 0) -> dict[str, Tensor]:
    """Random tensors of the tower and the connector."""
    draw = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=draw) / math.sqrt(math.prod(shape[1:]) or 1)
        for name, shape in sight_shapes().items()
    }


def text(
    seed: int = 1,
    quantize: Callable[[Tensor], dict[str, Tensor]] = lambda matrix: {"weight": matrix},
) -> dict[str, Tensor]:
    """Random tensors of the text; `quantize`: what each matrix of its layers is stored as."""
    draw, made = torch.Generator().manual_seed(seed), {}
    architecture = text_config(CONFIG).architecture
    for name in architecture.required():
        matrix = architecture.expected(name)
        shape = matrix or architecture.shape(name)
        assert shape is not None
        values = torch.randn(shape, generator=draw) / math.sqrt(shape[-1])
        own = name.replace("model.", f"{TEXT}.", 1)
        if matrix is None:
            made[own] = 1 + values
        elif ".layers." in name:
            made |= {f"{own}.{field}": tensor for field, tensor in quantize(values).items()}
        else:
            made[f"{own}.weight"] = values
    return made


def pictures(seed: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """Pixels of two images and one that fills the batch, their masks, and words with places for both."""
    draw = torch.Generator().manual_seed(seed)
    pixels = torch.randn(1, 3, 3, 28, 21, generator=draw)
    mask = torch.ones(1, 3, 28, 21, dtype=torch.int64)
    pixels[0, 1], mask[0, 1] = 0, 0
    pixels[0, 2, :, 15:], mask[0, 2, 15:] = 0, 0
    ids = torch.randint(0, 95, (17,), generator=draw)
    ids[1:6] = ids[9:14] = 95
    return pixels, mask, ids
