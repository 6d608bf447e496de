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
    UnquantizedConfig,
    UnquantizedWeight,
)
from qload.layouts import STORED_MINUS_ONE, Stored, StoredMinusOneUnmasked
from qload.spec import Config, Weight

ZEROS = st.sampled_from([STORED_MINUS_ONE, Stored(), StoredMinusOneUnmasked()])
GROUPS = st.sampled_from([-1, 32, 48, 128])

CONFIGS: dict[type[Weight], st.SearchStrategy[Config]] = {
    UnquantizedWeight: st.just(UnquantizedConfig()),
    GPTQWeight: st.builds(
        lambda bits, group, zeros: GPTQConfig(bits, group, zeros, positional=group != -1),
        st.sampled_from([2, 3, 4, 8]), GROUPS, ZEROS,
    ),
    AWQWeight: st.builds(AWQConfig, GROUPS),
}  # fmt: skip

every_format = pytest.mark.parametrize("room", FORMATS, ids=lambda room: room.format)


def lawful(config: Config, dim: str, size: int, world: int) -> bool:
    """Whether every cut for `world` ranks is lawful: from formats.md, not from the product."""
    if size % world:
        return False
    share = size // world
    if isinstance(config, GPTQConfig):
        return share % (32 if config.bits == 3 else 32 // config.bits) == 0
    if isinstance(config, AWQConfig):
        if dim == "N":
            return share % 8 == 0
        return config.group_size in (-1, size) or share % config.group_size == 0
    return True


def small_integers(shape: tuple[int, ...]) -> torch.Tensor:
    """Integers from -2 to 2, which float32 multiplies and sums exactly."""
    return (torch.arange(torch.Size(shape).numel()) % 5 - 2).reshape(shape).float()
