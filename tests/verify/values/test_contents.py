"""Of a small tensor numpy finds what the accumulators find of a large one."""

from random import Random

import pytest
import torch
from torch import Tensor

from qload.verify.values.contents import (
    ContentsAccumulator,
    NumbersAccumulator,
    small_contents,
    small_numbers,
)

FLOATS = (
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
)  # fmt: skip
LENGTHS = (1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 64, 255, 256, 257, 300, 511, 512, 513, 1000, 2048, 5000)
CASES = 60  # of each dtype


def drawn(random: Random, dtype: torch.dtype) -> Tensor:
    """Random bytes; or one byte, a word, a block stored twice, a hole, or values as weights have them."""
    size = random.choice(LENGTHS) * dtype.itemsize
    data = torch.randint(0, 256, (size,), generator=torch.Generator().manual_seed(random.randrange(2**31)))
    data, shape = data.to(torch.uint8), random.randrange(6)
    if shape == 0:
        data[:] = int(data[0])
    elif shape == 1:
        data = data[:8].repeat(size // 8 + 1)[:size].clone()
    elif shape == 2 and size > 700:
        data[256:512] = data[:256]
    elif shape == 3 and size > 700:
        data[random.randrange(300) :][:400] = random.choice([0, 255, 7])
    elif shape == 4 and dtype.is_floating_point and dtype.itemsize > 1:
        return torch.randn(size // dtype.itemsize).to(dtype)
    return data.contiguous().view(dtype)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.uint8, torch.int32], ids=str)
def test_the_bytes_are_the_same(dtype: torch.dtype) -> None:
    random = Random(1)
    for _ in range(CASES):
        tensor, streamed = drawn(random, dtype), ContentsAccumulator()
        streamed.add(tensor)

        assert small_contents(tensor) == streamed.finish()


@pytest.mark.parametrize("fully", [False, True], ids=["some", "fully"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_numbers_are_the_same(dtype: torch.dtype, fully: bool) -> None:
    random, exponents = Random(2), dtype is torch.float8_e8m0fnu
    for _ in range(CASES):
        tensor, streamed = drawn(random, dtype), NumbersAccumulator(fully=fully, exponents=exponents)
        streamed.add(tensor)
        found = repr(small_numbers(tensor, exponents=exponents, fully=fully))  # in which NaN equals NaN

        assert found.replace("-0.0", "0.0") == repr(streamed.finish()).replace("-0.0", "0.0")
