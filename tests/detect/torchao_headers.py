"""Layers and headers of torchao, and mutated headers: `python -m tests.fuzz 1000000 0` tries many of them.

For every header, opening raises only errors of qload, and every layer that opens has the shape of its codes.
"""

import json
import random
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from qload.detect import loader_from_config
from qload.errors import QloadError
from qload.weights import Weights
from tests.support.owners import StorageWithHeader

CONFIG = {"quant_method": "torchao", "quant_type": {"default": {"_type": "FqnToConfig", "_data": {}}}}
N, K = 8, 128
F8, E8 = torch.float8_e4m3fn, torch.float8_e8m0fnu


def value(kind: str, data: Any) -> dict[str, Any]:
    return {"_type": kind, "_data": data}


def described(kind: str, parts: Mapping[str, Tensor], **attributes: Any) -> str:
    """Return the JSON of a tensor in a header."""
    return json.dumps({"_type": kind, "_data": attributes, "_tensor_data_names": list(parts)})


def layer(kind: str, group: int = 32, **changes: Any) -> tuple[str, dict[str, Tensor]]:
    """Return the JSON of a layer of a class, and its parts with drawn codes."""
    at = torch.randint(0, 1 << 20, (N, K), generator=torch.Generator().manual_seed(group))
    groups = torch.arange(N * K // group).reshape(N, K // group)
    bytes_ = (at % 120).to(torch.uint8)
    blocks: dict[str, Any] = {"block_size": [1, group]}
    if kind == "Float8Tensor":
        parts, blocks = {"qdata": bytes_.view(F8), "scale": torch.arange(N)[:, None] + 1.0}, {}
        blocks["block_size"] = [1, K]
    elif kind == "Int8Tensor":
        parts = {"qdata": (at % 251 - 125).to(torch.int8), "scale": torch.arange(N)[:, None] / 4 + 1}
        parts["zero_point"] = torch.zeros(N, 1, dtype=torch.int8)
        blocks["block_size"] = [1, K]
    elif kind == "IntxUnpackedToInt8Tensor":
        parts = {"qdata": (at % 16 - 8).to(torch.int8), "scale": (groups % 5 + 1.0).bfloat16()}
        parts["zero_point"] = (groups % 7 - 3).to(torch.int8)
        blocks["target_dtype"] = value("torch.dtype", "int4")
    elif kind == "Int4Tensor":
        parts = {"qdata": bytes_[:, : K // 2].view(torch.int8), "scale": (groups % 5 + 1.0).T.bfloat16()}
        parts["zero_point"] = (groups % 7 - 3.0).T.bfloat16()
    elif kind == "NVFP4Tensor":
        scales = (torch.arange(N * K // 16).reshape(N, K // 16) % 5 + 1.0).to(F8)
        parts = {"per_tensor_scale": torch.tensor(0.5), "qdata": bytes_[:, : K // 2], "scale": scales}
        blocks = {"block_size": 16, "is_swizzled_scales": False}
    else:
        exponents = (groups % 5 + 125).to(torch.uint8)
        parts = {"qdata": bytes_.view(F8), "scale": exponents.view(E8)}
        blocks = {"block_size": 32, "elem_dtype": value("torch.dtype", "float8_e4m3fn")}
    parts = {name: part.contiguous() for name, part in parts.items()}
    return described(kind, parts, **{**blocks, **changes}), parts


def stored(layers: Mapping[str, tuple[str, Mapping[str, Tensor]]]) -> StorageWithHeader:
    """Return a storage of layers by module."""
    tensors = {
        f"{module}._weight_{name}": part
        for module, (_, parts) in layers.items()
        for name, part in parts.items()
    }
    metadata = {f"{module}.weight": text for module, (text, _) in layers.items()}
    return StorageWithHeader(tensors, metadata | {"tensor_names": json.dumps([*metadata]), "format": "pt"})


KINDS = (
    "Float8Tensor", "Int8Tensor", "IntxUnpackedToInt8Tensor", "Int4Tensor", "NVFP4Tensor", "MXTensor",
)  # fmt: skip
TOKENS = (
    "-1", "0", "1", "2", "3", "16", "32", "64", "128", "1e3", "true", "null", "NaN", "[]", "{}", '""',
    '"int9"', '"int3"', '"Tensor"', '"float8_e5m2"', '"float4_e2m1fn_x2"', "9" * 30, "4611686018427387904",
    "[1, 1, 64]", '"_type":', ",", "}", '"\\ud800"', "[" * 2000, '"' + "x" * 3000 + '"',
)  # fmt: skip


@cache
def whole() -> StorageWithHeader:
    return stored({f"layers.0.{kind.lower()}": layer(kind) for kind in KINDS})


def torchao_mutations(count: int, seed: int = 0) -> Iterator[dict[str, str]]:
    """Yield the metadata of `count` headers, reproducible by seed."""
    chance = random.Random(seed)
    sound = whole().metadata["model.safetensors"]
    for _ in range(count):
        metadata = dict(sound)
        for _ in range(chance.choice((1, 1, 1, 2, 4))):
            name = chance.choice([*metadata])
            text = metadata.pop(name)
            at = chance.randrange(len(text) + 1)
            to = min(len(text), at + chance.choice((0, 1, 1, 2, 4, 20)))
            token = chance.choice(TOKENS) if chance.random() < 0.6 else chr(chance.randrange(32, 300))
            if chance.random() < 0.95:
                name = name if chance.random() < 0.95 else name[: chance.randrange(len(name) + 1)]
                metadata[name] = text[:at] + token + text[to:]
        yield metadata


def try_torchao(metadata: Mapping[str, str]) -> bool:
    """Return whether all layers of a header are read; catch only errors of qload."""
    storage = whole()
    storage.metadata = {"model.safetensors": metadata}
    try:
        weights = Weights(storage, loader=loader_from_config(CONFIG, storage))
        for kind in KINDS:
            found = weights.loader.describe(weights, f"layers.0.{kind.lower()}")
            assert (found.N, found.K) == (N, K)
    except QloadError as error:
        str(error).encode()  # it can be printed
        return False
    return True
