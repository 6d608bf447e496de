"""Makers of small draft models for speculative decoding, one for each kind, for a target of `CONFIG`."""

from typing import Any

import torch
from torch import Tensor

from tests.verify.rules.test_architecture import CONFIG, LATENT, whole

Case = tuple[dict[str, Tensor], dict[str, Any]]
H, VOCABULARY, DRAFT = 16, 20, 12
IDS = torch.arange(VOCABULARY)[torch.arange(VOCABULARY) % 5 < 3]  # of the target, in the draft's vocabulary
ONE = {**CONFIG, "num_hidden_layers": 1}
SMALL = {**ONE, "draft_vocab_size": DRAFT}


def layer(lead: str) -> dict[str, Tensor]:
    """Return the first layer of a Llama under another name."""
    return {
        name.replace("model.layers.0.", lead): tensor
        for name, tensor in whole().items()
        if name.startswith("model.layers.0.")
    }


def eagle(lead: str = "", *, embedding: bool = True) -> dict[str, Tensor]:
    """Return a layer without its first norm, and the projection for two joined vectors."""
    tensors = {
        name: each for name, each in layer(f"{lead}layers.0.").items() if "input_layernorm" not in name
    }
    tensors |= {f"{lead}fc.weight": torch.randn(H, 2 * H), f"{lead}fc.bias": torch.randn(H)}
    return tensors | ({f"{lead}embed_tokens.weight": torch.randn(VOCABULARY, H)} if embedding else {})


def eagle3(lead: str) -> dict[str, Tensor]:
    """Return attention over two vectors, a head over a smaller vocabulary, and maps of the vocabularies."""
    tensors = layer(lead)
    for name in ("q_proj", "k_proj", "v_proj"):
        full = f"{lead}self_attn.{name}.weight"
        tensors[full] = torch.randn(tensors[full].shape[0], 2 * H)
    return {
        **tensors,
        f"{lead}hidden_norm.weight": torch.randn(H),
        "fc.weight": torch.randn(H, 3 * H),
        "norm.weight": torch.randn(H),
        "lm_head.weight": torch.randn(DRAFT, H),
        "d2t": IDS - torch.arange(DRAFT),
        "t2d": torch.zeros(VOCABULARY, dtype=torch.bool).index_fill(0, IDS, value=True),
    }


def nextn(number: int) -> dict[str, Tensor]:
    """Return a multi-token prediction layer alone, with a separate head and embedding."""
    lead = f"model.layers.{number}."
    tensors = {
        name.replace("model.layers.1.", lead): tensor
        for name, tensor in whole(**LATENT).items()
        if name.startswith("model.layers.1.")
    }
    return {
        **tensors,
        **{f"{lead}{name}.weight": torch.randn(H) for name in ("enorm", "hnorm", "shared_head.norm")},
        f"{lead}eh_proj.weight": torch.randn(H, 2 * H),
        f"{lead}shared_head.head.weight": torch.randn(VOCABULARY, H),
        f"{lead}embed_tokens.weight": torch.randn(VOCABULARY, H),
    }


def mtp() -> dict[str, Tensor]:
    vectors = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    return {
        **layer("mtp.layers.0."),
        **{f"mtp.{name}.weight": torch.randn(H) for name in vectors},
        "mtp.fc.weight": torch.randn(H, 2 * H),
    }


def dflash(vectors: int) -> dict[str, Tensor]:
    """Return a layer, and a projection of several hidden states."""
    return {
        **layer("layers.0."),
        "fc.weight": torch.randn(H, vectors * H),
        "hidden_norm.weight": torch.randn(H),
        "norm.weight": torch.randn(H),
    }


def medusa(heads: int = 2) -> dict[str, Tensor]:
    """Return heads under the names of FasterDecoding/Medusa."""
    tensors = {}
    for head in range(heads):
        tensors[f"medusa_head.{head}.0.linear.weight"] = torch.randn(H, H)
        tensors[f"medusa_head.{head}.0.linear.bias"] = torch.randn(H)
        tensors[f"medusa_head.{head}.1.weight"] = torch.randn(VOCABULARY, H)
    return tensors


def medusa_of_vllm(heads: int = 2) -> dict[str, Tensor]:
    """Return heads under the names of vLLM's Medusa."""
    return {
        **{f"blocks.{head}.layers.0.weight": torch.randn(H, H) for head in range(heads)},
        **{f"lm_heads.{head}.weight": torch.randn(VOCABULARY, H) for head in range(heads)},
    }


def mlp_speculator(inner: int = 8) -> dict[str, Tensor]:
    """Return an embedding, a projection and a head of two predicted tokens."""
    tensors = {}
    for token, inputs in enumerate((H, inner)):
        tensors |= {
            f"speculator.emb.{token}.weight": torch.randn(VOCABULARY, inner),
            f"speculator.proj.{token}.weight": torch.randn(inner, inputs),
            f"speculator.ln.{token}.weight": torch.randn(inner),
            f"speculator.head.{token}.weight": torch.randn(VOCABULARY, inner),
        }
    return tensors


def gptq_of(prefix: str, N: int, K: int) -> dict[str, Tensor]:
    """Return a GPTQ layer of 4 bits in groups of 8."""
    return {
        f"{prefix}.qweight": torch.randint(2**31, (K // 8, N), dtype=torch.int32),
        f"{prefix}.qzeros": torch.full((K // 8, N // 8), 0x77777777, dtype=torch.int32),
        f"{prefix}.scales": torch.ones(K // 8, N, dtype=torch.float16),
        f"{prefix}.g_idx": torch.arange(K, dtype=torch.int32) // 8,
    }
