"""What no declaration tells of a layer to be drawn: its facts, from a function for each format that has some.

A function gets the layer's config and the sizes drawn so far, and returns facts by field. It may set the
sizes of free axes that follow from what it returns.
"""

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qload.formats import (
    BNB4Config,
    BNBConfig,
    BNBFP4Weight,
    BNBNF4Weight,
    BNBWeight,
    CTPackConfig,
    CTPackTensorConfig,
    CTPackTensorWeight,
    CTPackWeight,
    Exl2Config,
    Exl2Weight,
    ModelOptAWQConfig,
    ModelOptAWQWeight,
)
from qload.layouts.exl2 import RUN_CODES
from qload.spec import Weight


def _bnb(config: BNB4Config, sizes: dict[str, int]) -> dict[str, Tensor]:
    """A state, a table of 16 values, and quantized scales where the config claims them; all exact."""
    N, K, run = sizes["N"], sizes["K"], 256
    state: dict[str, Any] = {"quant_type": config.quant_type, "blocksize": config.blocksize}
    state |= {"dtype": str(config.dtype).removeprefix("torch."), "shape": [N, K]}
    facts = {"quant_map": torch.arange(16) / 8 - 1}
    if config.double_quant:
        blocks = -(-N * K // config.blocksize)
        sizes["M"] = -(-blocks // run)
        state |= {"nested_blocksize": run, "nested_dtype": "float32", "nested_offset": 0.25}
        facts["absmax"] = (torch.arange(blocks) % 256).to(torch.uint8)
        facts["nested_absmax"] = torch.arange(sizes["M"]) + 1.0
        facts["nested_quant_map"] = torch.arange(256) / 256
    return facts | {"quant_state": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)}


def _bnb_int8(config: BNBConfig, sizes: dict[str, int]) -> dict[str, Tensor]:
    """Scales whose 127th part is a power of two, so that sums are exact."""
    return {"SCB": 127 * 2.0 ** (torch.arange(sizes["N"]) % 4 - 2)}


def _exl2(config: Exl2Config, sizes: dict[str, int]) -> dict[str, Tensor]:
    """Groups of 64 rows, the last perhaps of 32, whose widths fall from 8 bits; the same for the same K."""
    sizes["K"] *= 1 if sizes["K"] % 32 == 0 else 32
    K, G = sizes["K"], -(-sizes["K"] // 64)
    bits = torch.tensor(list(RUN_CODES))[torch.arange(G) * len(RUN_CODES) // G]
    ends = (bits * torch.tensor([64] * (G - 1) + [K - 64 * (G - 1)]) // 32).cumsum(0)
    sizes["G"], sizes["R"] = G, int(ends[-1])
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), ends[:-1]])
    return {
        "q_groups": torch.stack([bits, starts], dim=1).flatten().to(torch.int16),
        "q_scale_max": (2.0 ** (torch.arange(G) % 4 - 10)).half(),  # below 2**-6 is subnormal once divided
        "q_invperm": torch.randperm(K, generator=torch.Generator().manual_seed(K)).to(torch.int32),
    }


def _ct_pack(config: CTPackConfig, sizes: dict[str, int]) -> dict[str, Tensor]:
    """N and K, large enough for several words and groups."""
    for dim, unit in (("N", 16), ("K", 48)):
        sizes[dim] *= 1 if sizes[dim] >= unit else unit
    for letter in sizes.keys() & {"G"}:  # of groups beside an index
        sizes[letter] = config.groups(sizes["K"])
    return {"weight_shape": torch.tensor([sizes["N"], sizes["K"]])}


def _ct_pack_tensor(config: CTPackTensorConfig, sizes: dict[str, int]) -> dict[str, Tensor]:
    """N and K, large enough for several words."""
    sizes["K"] *= 1 if sizes["K"] >= 48 else 48
    return {"weight_shape": torch.tensor([sizes["N"], sizes["K"]])}


def _modelopt_awq(config: ModelOptAWQConfig, sizes: dict[str, int]) -> dict[str, Tensor]:
    """Powers of two that inputs are multiplied by, where the config says that they are."""
    factors = 2.0 ** (torch.arange(sizes["K"]) % 3 - 1)
    return {"pre_quant_scale": factors} if config.scaled_inputs else {}


FACTS: dict[type[Weight], Callable[[Any, dict[str, int]], dict[str, Tensor]]] = {
    BNBNF4Weight: _bnb,
    BNBFP4Weight: _bnb,
    BNBWeight: _bnb_int8,
    CTPackTensorWeight: _ct_pack_tensor,
    CTPackWeight: _ct_pack,
    Exl2Weight: _exl2,
    ModelOptAWQWeight: _modelopt_awq,
}
