"""Of a small tensor numpy finds what the accumulators find of a large one."""

from itertools import groupby
from random import Random

import pytest
import torch
from torch import Tensor

from qload.verify.values.contents import (
    BLOCK_BYTES,
    MAX_RUNS,
    Contents,
    ContentsAccumulator,
    NumbersAccumulator,
    Repeats,
    Run,
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


def contents(data: bytes, digest: bytes) -> Contents:
    """Return the contents of bytes, by the definition of each field."""
    starts = range(0, len(data) - BLOCK_BYTES + 1, BLOCK_BYTES)
    runs, at = [], 0
    for byte, members in groupby(data):
        length = len(list(members))
        if any(at <= start and start + BLOCK_BYTES <= at + length for start in starts):
            runs.append(Run(at, length, byte))
        at += length
    last: dict[bytes, int] = {}
    pairs = []
    for start in starts:
        block = data[start : start + BLOCK_BYTES]
        if block[8:] != block[:-8]:
            if block in last:
                pairs.append((last[block], start))
            last[block] = start
    has_word = len(data) >= 16 and data[8:] == data[:-8]
    return Contents(
        nbytes=len(data),
        digest=digest,
        word=int.from_bytes(data[:8], "little", signed=True) if has_word else None,
        byte=data[0] if len(set(data)) == 1 else None,
        runs=tuple(sorted(runs, key=lambda run: -run.length)[:MAX_RUNS]),
        repeats=Repeats(len(pairs), len(starts), *pairs[0]) if pairs else None,
    )


def test_contents_are_those_of_their_definition_whatever_the_pieces() -> None:
    """Draw blocks of few kinds, so that runs and repeated blocks have neighbours of each kind."""
    random = Random(3)
    kinds = [bytes([byte]) * BLOCK_BYTES for byte in (0, 0, 7, 255)]
    kinds += [bytes(range(8)) * 32, bytes([9]) * 100 + bytes([7]) * 156]
    kinds += [random.randbytes(BLOCK_BYTES) for _ in range(3)]
    for _ in range(300):
        drawn = b"".join(random.choices(kinds[: random.randint(1, len(kinds))], k=random.randint(0, 30)))
        data = drawn + random.choice([b"", random.randbytes(50), drawn[: random.randrange(256)]]) or b"\0"
        tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        streamed, at = ContentsAccumulator(), 0
        while at < len(data):
            size = random.choice([1, 8, 255, 256, 1000, 5000])
            streamed.add(tensor[at : at + size])
            at += size

        found = streamed.finish()

        assert found == contents(data, found.digest)
        assert small_contents(tensor) == found
