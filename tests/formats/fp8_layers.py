"""FP8 layers for tests: every finite byte, scales of one's choice, under either name."""

from collections.abc import Mapping

import torch
from torch import Tensor

from qload.formats import Fp8Config, Fp8Weight
from qload.formats.unquantized import UnquantizedConfig, UnquantizedWeight
from qload.loader import ConfiguredFormat, FormatLoader
from qload.loader.source import Nonfinite
from qload.parallel import ALONE, Rank
from qload.storage import MemoryStorage
from qload.weights import Weights

BLOCKS = Fp8Config("block", (128, 128))


def codes(N: int, K: int, seed: int = 0) -> Tensor:
    """e4m3fn (N, K) of random bytes that are numbers."""
    drawn = torch.randint(0, 256, (N, K), generator=torch.Generator().manual_seed(seed))
    return torch.where(drawn & 0x7F == 0x7F, 0, drawn).to(torch.uint8).view(torch.float8_e4m3fn)


def layer(prefix: str, weight: Tensor, scale: Tensor, name: str = "weight_scale") -> dict[str, Tensor]:
    """The tensors of a layer as they are stored."""
    return {f"{prefix}.weight": weight, f"{prefix}.{name}": scale}


def weights(
    tensors: Mapping[str, Tensor],
    config: Fp8Config = Fp8Config(),  # noqa: B008  frozen
    rank: Rank = ALONE,
    dtype: torch.dtype | None = None,
    nonfinite: Nonfinite = "error",
) -> Weights:
    """One rank's view of FP8 layers, and of plain ones beside them."""
    loader = FormatLoader(
        ConfiguredFormat(Fp8Weight, config), ConfiguredFormat(UnquantizedWeight, UnquantizedConfig())
    )
    return Weights(
        MemoryStorage(tensors), loader=loader, process_group=rank, dtype=dtype, nonfinite=nonfinite
    )
