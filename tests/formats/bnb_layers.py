"""bitsandbytes layers of four bits that are small enough to check in your head."""

import json
from typing import Any

import torch
from torch import Tensor

from qload.formats import BNB4Config, BNBFP4Weight, BNBNF4Weight
from qload.loader import ConfiguredFormat, FormatLoader
from qload.parallel import Rank
from qload.storage import MemoryStorage
from qload.weights import Weights

LOADER = FormatLoader(
    ConfiguredFormat(BNBNF4Weight, BNB4Config("nf4")), ConfiguredFormat(BNBFP4Weight, BNB4Config("fp4"))
)


def blob(state: Any) -> Tensor:
    """A state as it is stored; bytes as they are."""
    return torch.tensor(list(state if isinstance(state, bytes) else json.dumps(state).encode())).byte()


def layer(
    N: int, K: int, block: int, *, kind: str = "nf4", prefix: str = "a", **more: Any
) -> dict[str, Tensor]:
    """Codes 0, 1, 2, ... in order, a table where a code means itself, scales 1, 10, 100, 1000 in turn."""
    codes = torch.arange(N * K + N * K % 2) % 16
    blocks = -(-N * K // block)
    state = {"quant_type": kind, "blocksize": block, "dtype": "float32", "shape": [N, K], **more}
    tensors = {
        "weight": (codes[::2] << 4 | codes[1::2]).byte()[:, None],
        "weight.absmax": torch.tensor([1.0, 10.0, 100.0, 1000.0])[torch.arange(blocks) % 4],
        "weight.quant_map": torch.arange(16.0),
        f"weight.quant_state.bitsandbytes__{kind}": blob(state),
    }
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}


def nested(N: int, K: int, block: int, *, prefix: str = "a", offset: float = 0.5) -> dict[str, Tensor]:
    """All codes 1; scale i is i + 1, a thousand times that from the fourth on, and `offset` more."""
    blocks = -(-N * K // block)
    state = {"nested_blocksize": 3, "nested_dtype": "float32", "nested_offset": offset}
    tensors = layer(N, K, block, prefix=prefix, **state)
    tensors[f"{prefix}.weight"].fill_(0x11)
    tensors[f"{prefix}.weight.absmax"] = torch.arange(1, blocks + 1).byte()
    tensors[f"{prefix}.weight.nested_absmax"] = 1000.0 ** (torch.arange(-(-blocks // 3)) % 8)
    tensors[f"{prefix}.weight.nested_quant_map"] = torch.arange(256.0)
    return tensors


def weights(tensors: dict[str, Tensor], rank: Rank | None = None) -> Weights:
    return Weights(MemoryStorage(tensors), loader=LOADER, process_group=rank)


def whole(tensors: dict[str, Tensor], prefix: str = "a") -> Any:
    return weights(tensors).get_weights(prefix)
