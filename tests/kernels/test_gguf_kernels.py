"""Blocks of GGUF multiplied by the kernels of strips: the CUDA module computed by hand stands in."""

import pytest
import torch

from qload.formats import GGUFConfig, GGUFWeight
from qload.kernel_formats import repack
from qload.kernels.cuda.linear import linear
from qload.layouts.ggml_grids import sample_blocks
from qload.storage import BLOCK_TYPES
from qload.testing import assert_sums_exactly
from tests.kernels.cuda_by_hand import Hand
from tests.kernels.cuda_layers import AMPERE, HOPPER, _operators, hand

__all__ = ["_operators", "hand"]  # fixtures


@pytest.mark.parametrize(("chip", "many"), [(HOPPER, "many"), (AMPERE, "mma")], ids=["hopper", "ampere"])
@pytest.mark.parametrize(("M", "is_many"), [(1, False), (100, True)])
@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "MXFP4", "NVFP4"])
def test_blocks_are_multiplied_by_the_kernels_of_strips(
    hand: Hand, kind: str, M: int, is_many: bool, many: str
) -> None:
    stored = BLOCK_TYPES[kind]
    blocks = sample_blocks(kind, 72, 256 // stored.elements, stored.nbytes)
    weight = GGUFWeight(config=GGUFConfig(kind), blocks=blocks)
    packed = repack(weight, "strips")

    assert_sums_exactly(lambda x: linear(x, packed), weight, torch.float16, M=M)

    assert hand.called == [many if is_many else "decode"]
