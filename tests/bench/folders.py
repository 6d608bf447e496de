"""Folders of many tensors, or of many bytes, for what has to be linear in either.

The tensors of `sparse` take no room on disk: a file is its header and a hole.
"""

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch

Stored = tuple[str, tuple[int, ...]]  # dtype, as headers have it, and shape
BYTES = {"F8_E4M3": 1, "BF16": 2, "F16": 2, "F32": 4, "I32": 4}

BLOCK = 128
FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "weight_block_size": [BLOCK, BLOCK],
    "activation_scheme": "dynamic",
}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": BLOCK, "version": "gemm", "zero_point": True}
EXPERTS = 256
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def fp8(prefix: str, N: int = BLOCK, K: int = BLOCK) -> Iterator[tuple[str, Stored]]:
    """A layer of blocks of FP8."""
    yield f"{prefix}.weight", ("F8_E4M3", (N, K))
    yield f"{prefix}.weight_scale_inv", ("F32", (-(-N // BLOCK), -(-K // BLOCK)))


def experts(count: int) -> Iterator[tuple[str, Stored]]:
    """So many tensors, named as DeepSeek V3's are: attention, norms, experts; the last layer is cut short."""
    plain = [
        ("model.embed_tokens.weight", ("BF16", (BLOCK, BLOCK))),
        ("lm_head.weight", ("BF16", (BLOCK, BLOCK))),
        ("model.norm.weight", ("BF16", (BLOCK,))),
    ]
    layers = (stored for layer in itertools.count() for stored in _layer(f"model.layers.{layer}"))
    return itertools.islice(itertools.chain(plain, layers), count)


def _layer(prefix: str) -> Iterator[tuple[str, Stored]]:
    for norm in (
        "input_layernorm",
        "post_attention_layernorm",
        "self_attn.q_a_layernorm",
        "self_attn.kv_a_layernorm",
    ):
        yield f"{prefix}.{norm}.weight", ("BF16", (BLOCK,))
    for name in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"):
        yield from fp8(f"{prefix}.self_attn.{name}")
    yield f"{prefix}.mlp.gate.weight", ("BF16", (EXPERTS, BLOCK))
    yield f"{prefix}.mlp.gate.e_score_correction_bias", ("F32", (EXPERTS,))
    modules = ["shared_experts", *(f"experts.{expert}" for expert in range(EXPERTS))]
    for module in modules:
        for name in PROJECTIONS:
            yield from fp8(f"{prefix}.mlp.{module}.{name}")


def sparse(
    folder: Path, tensors: Iterable[tuple[str, Stored]], shards: int, config: Mapping[str, Any]
) -> int:
    """Write a sharded checkpoint of these tensors, all of them zero; how many there are."""
    listed = list(tensors)
    width = -(-len(listed) // shards)
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        mine = listed[shard * width : (shard + 1) * width]
        weight_map.update(dict.fromkeys((name for name, _ in mine), file))
        head, size = header(mine)
        with (folder / file).open("wb") as stream:
            stream.write(head)
            stream.truncate(len(head) + size)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps({"quantization_config": dict(config)}))
    return len(listed)


def header(tensors: Iterable[tuple[str, Stored]]) -> tuple[bytes, int]:
    """A safetensors header, and the bytes of data that it promises."""
    entries, at = {}, 0
    for name, (dtype, shape) in tensors:
        end = at + prod(shape) * BYTES[dtype]
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text, at


def awq(K: int, N: int, prefix: str) -> Iterator[tuple[str, Stored]]:
    """A layer of AWQ."""
    yield f"{prefix}.qweight", ("I32", (K, N // 8))
    yield f"{prefix}.qzeros", ("I32", (K // BLOCK, N // 8))
    yield f"{prefix}.scales", ("F16", (K // BLOCK, N))


def noise(folder: Path, layers: int, *, width: int = 4096, inner: int = 14336) -> int:
    """Write a random AWQ model, a file for each layer; its bytes.

    Words and zero points are noise, scales are from 0.01 to 0.02.
    """
    weight_map, total = {}, 0
    files = [f"model-{layer + 1:05}-of-{layers:05}.safetensors" for layer in range(layers)]
    for layer, file in enumerate(files):
        prefix = f"model.layers.{layer}"
        attention = (awq(width, width, f"{prefix}.self_attn.{name}_proj") for name in "qkvo")
        grown = (awq(width, inner, f"{prefix}.mlp.{name}_proj") for name in ("gate", "up"))
        norms = [
            (f"{prefix}.{name}_layernorm.weight", ("F16", (width,))) for name in ("input", "post_attention")
        ]
        mine = list(itertools.chain(*attention, *grown, awq(inner, width, f"{prefix}.mlp.down_proj"), norms))
        weight_map.update(dict.fromkeys((name for name, _ in mine), file))
        head, size = header(mine)
        with (folder / file).open("wb") as stream:
            stream.write(head)
            for _, (dtype, shape) in mine:
                stream.write(_drawn(dtype, shape))
        total += len(head) + size
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps({"quantization_config": AWQ, "num_hidden_layers": layers}))
    return total


def _drawn(dtype: str, shape: tuple[int, ...]) -> memoryview:
    if dtype == "F16":
        return memoryview((torch.rand(shape) * 0.01 + 0.01).half().numpy()).cast("B")
    return memoryview(torch.randint(0, 256, (prod(shape) * BYTES[dtype],), dtype=torch.uint8).numpy())
