"""Every stored and repacked layer in a CUDA graph: the bits of each replay are those outside of it."""

from functools import partial
from typing import Any

import pytest
import torch

from qload.kernel_formats import repack
from qload.kernels.declared import why_not
from qload.testing import assert_same_bits
from tests.gpu.replays import assert_replays
from tests.kernels.captured_layers import LAYERS, loaded, orders
from tests.paths import FIXTURES, cases

pytestmark = pytest.mark.gpu

DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)


def tokens(K: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(3, K, generator=torch.Generator().manual_seed(0)) / 16).to("cuda", dtype)


@DTYPES
@pytest.mark.parametrize("name", LAYERS)
def test_a_captured_linear_has_the_bits_of_one_that_is_not(name: str, dtype: torch.dtype) -> None:
    weight = loaded(FIXTURES / name)
    declares = weight.activations is not None and why_not(weight) is None
    ways: list[Any] = ["declared", "unquantized"] if declares else ["unquantized"]
    for held in orders(weight):
        for activations in ways:
            linear = held.to("cuda").get_linear(activations=activations, maximum="own")
            assert_replays(partial(linear, tokens(weight.shape[1], dtype)))


@DTYPES
@pytest.mark.parametrize("folder", cases("exl2"), ids=lambda folder: folder.name)
def test_exl2_repacked_for_exllama_is_multiplied_as_before(folder: Any, dtype: torch.dtype) -> None:
    weight = loaded(folder).to("cuda")
    linear: Any
    stored: Any
    linear, stored = repack(weight, "exllama").get_linear(), weight.get_linear()
    x = tokens(weight.shape[1], dtype)

    assert type(linear.typed) is type(stored.typed)
    assert_same_bits(linear(x), stored(x))
    assert_replays(partial(linear, x))
