"""Blocks of GGUF on a device: the kernels of strips multiply them, within the derived bound."""

from typing import Any

import pytest
import torch

from qload.formats import GGUFConfig, GGUFWeight
from qload.kernel_formats import repack, restore
from qload.kernels import cuda
from qload.kernels.cuda.linear import able
from qload.layouts.ggml_grids import sample_blocks
from qload.storage import BLOCK_TYPES
from qload.testing import assert_same_bits, assert_sums_exactly, assert_within_bound
from tests.gpu.layers import DTYPES, inputs

pytestmark = pytest.mark.gpu


def layer(kind: str, N: int, K: int) -> GGUFWeight:
    """Build a layer of random codes, and scales that are powers of two; NVFP4 has a second scale."""
    stored = BLOCK_TYPES[kind]
    blocks = sample_blocks(kind, N, K // stored.elements, stored.nbytes)
    scale = torch.tensor([0.3]) if kind == "NVFP4" else None
    return GGUFWeight(config=GGUFConfig(kind), blocks=blocks, scale=scale).to("cuda")


@DTYPES
@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "MXFP4", "NVFP4"])
@pytest.mark.parametrize(("N", "K"), [(320, 1152), (200, 2880)])
@pytest.mark.parametrize("M", [1, 8, 17, 64, 300])
def test_blocks_are_multiplied_by_the_kernels_of_strips(
    kind: str, N: int, K: int, M: int, dtype: torch.dtype
) -> None:
    weight = layer(kind, N, K)
    packed = repack(weight, "strips")
    linear: Any = packed.get_linear(dtype=dtype)
    x = inputs(M, weight, dtype)

    assert_same_bits(restore(packed).fields()["blocks"], weight.blocks)
    assert {*able(x, linear.typed)} > {"large"}  # and kernels that do not dequantize
    assert_same_bits(linear(x), cuda.linear(x, linear.typed))
    assert_within_bound(linear, weight, x)
    if kind != "NVFP4":  # products with its second scale are no whole numbers
        assert_sums_exactly(linear, weight, dtype, M=M)
