"""EXL2 layers of any groups, and what they mean by numpy's half precision: a second reading of the format."""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from qload.formats import Exl2Config, Exl2Weight
from qload.loader import ConfiguredFormat, FormatLoader
from qload.parallel import Rank
from qload.storage import MemoryStorage
from qload.weights import Weights


class Drawn(NamedTuple):
    """Tensors as stored, and what they were made of: codes (K, N) in stored order, bits and group of rows."""

    tensors: dict[str, Tensor]
    codes: np.ndarray[Any, Any]
    bits: list[int]
    group: list[int]

    def weight(self, **changes: Tensor) -> Exl2Weight:
        return Exl2Weight(config=Exl2Config(), **{**self.tensors, **changes})

    def named(self, prefix: str) -> dict[str, Tensor]:
        return {f"{prefix}.{name}": tensor for name, tensor in self.tensors.items()}

    def meaning(self) -> Tensor:
        """(N, K): every step in fp16, as numpy rounds it."""
        words = self.tensors["q_scale"].numpy().astype(np.int64)
        shifts = 4 * np.arange(8)
        fields = (words[:, :, None] >> shifts & 15).reshape(words.shape[0], -1)
        unit = self.tensors["q_scale_max"].numpy() / np.float16(256)
        scales = ((fields + 1) ** 2).astype(np.float16) * unit[:, None]
        middle = 2 ** (np.array(self.bits) - 1)
        stored = (self.codes - middle[:, None]).astype(np.float16) * scales[self.group]
        assert stored.dtype == np.float16
        return torch.from_numpy(stored[self.tensors["q_invperm"].numpy()].astype(np.float32)).T


def draw(*groups: tuple[int, int], N: int = 32, seed: int = 0, largest: float = 0.5) -> Drawn:
    """Groups of (bits, rows), rows in any order, every code and scale."""
    rng = np.random.default_rng(seed)
    K = sum(rows for _, rows in groups)
    codes, words, starts = [], [], [0]
    for bits, rows in groups:
        codes.append(rng.integers(0, 2**bits, (rows, N)))
        words.append(stream(codes[-1], bits))
        starts.append(starts[-1] + words[-1].shape[0])
    pairs = np.array([[bits, start] for (bits, _), start in zip(groups, starts, strict=False)])
    tensors = {
        "q_weight": torch.from_numpy(np.concatenate(words)),
        "q_scale": torch.from_numpy(rng.integers(-(2**31), 2**31, (len(groups), N // 8)).astype(np.int32)),
        "q_scale_max": torch.from_numpy((largest * (1 + rng.random(len(groups)))).astype(np.float16)),
        "q_groups": torch.from_numpy(pairs.astype(np.uint16).view(np.int16).flatten()),
        "q_invperm": torch.from_numpy(rng.permutation(K).astype(np.int32)),
    }
    bits_of_rows = [bits for bits, rows in groups for _ in range(rows)]
    group = [g for g, (_, rows) in enumerate(groups) for _ in range(rows)]
    return Drawn(tensors, np.concatenate(codes), bits_of_rows, group)


def stream(codes: np.ndarray[Any, Any], bits: int) -> np.ndarray[Any, Any]:
    """Codes (rows, N) -> words (rows * bits / 32, N): the bits of a column one after another."""
    rows, N = codes.shape
    each = (codes[:, None, :] >> np.arange(bits)[:, None] & 1).reshape(rows * bits // 32, 32, N)
    return (each << np.arange(32)[:, None]).sum(1).astype(np.uint32).view(np.int32)


def weights(tensors: dict[str, Tensor], rank: Rank | None = None) -> Weights:
    loader = FormatLoader(ConfiguredFormat(Exl2Weight, Exl2Config()))
    return Weights(MemoryStorage(tensors), loader=loader, process_group=rank)
