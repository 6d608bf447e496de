"""The table of formats that every contract test runs over: a line each for how its config is drawn."""

import pytest
import torch
from hypothesis import strategies as st

from qload.formats import (
    FORMATS,
    AWQConfig,
    AWQWeight,
    GPTQConfig,
    GPTQWeight,
    Marlin24Config,
    Marlin24Weight,
    MarlinConfig,
    MarlinWeight,
    UnquantizedConfig,
    UnquantizedWeight,
)
from qload.layouts import STORED_MINUS_ONE, Stored, StoredMinusOnePerField, StoredMinusOneUnmasked
from qload.spec import Config, Weight

ZEROS = st.sampled_from([STORED_MINUS_ONE, Stored(), StoredMinusOnePerField(), StoredMinusOneUnmasked()])
GROUPS = st.sampled_from([-1, 32, 48, 128])

CONFIGS: dict[type[Weight], st.SearchStrategy[Config]] = {
    UnquantizedWeight: st.just(UnquantizedConfig()),
    GPTQWeight: st.builds(
        lambda bits, group, zeros: GPTQConfig(bits, group, zeros, positional=group != -1),
        st.sampled_from([2, 3, 4, 8]), GROUPS, ZEROS,
    ),
    AWQWeight: st.builds(AWQConfig, GROUPS, st.sampled_from([4, 8])),
    MarlinWeight: st.builds(MarlinConfig, GROUPS, st.sampled_from([4, 8])),
    Marlin24Weight: st.builds(Marlin24Config, GROUPS, st.sampled_from([4, 8])),
}  # fmt: skip

every_format = pytest.mark.parametrize("room", FORMATS, ids=lambda room: room.format)


def lawful(config: Config, dim: str, size: int, world: int) -> bool:
    """Whether every cut for `world` ranks is lawful: from formats.md, not from the product."""
    if size % world:
        return False
    share = size // world
    if isinstance(config, GPTQConfig):
        return share % (32 if config.bits == 3 else 32 // config.bits) == 0
    granules = {
        AWQConfig: (32 // getattr(config, "bits", 4), 1),
        MarlinConfig: (64, 16),
        Marlin24Config: (64, 32),
    }
    if type(config) in granules:
        N, K = granules[type(config)]
        if dim == "N":
            return share % N == 0
        return share % K == 0 and (config.group_size in (-1, size) or share % config.group_size == 0)
    return True


def small_integers(shape: tuple[int, ...]) -> torch.Tensor:
    """Integers from -2 to 2, which float32 multiplies and sums exactly."""
    return (torch.arange(torch.Size(shape).numel()) % 5 - 2).reshape(shape).float()
