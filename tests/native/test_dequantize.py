"""What codes mean, computed natively: the bits of torch's float32, rounded once."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from qload import native
from qload.devices import meaning_of
from qload.formats import FORMATS
from qload.layouts import ClippedCodes, NibblePairs, Packing, awq, compressed_tensors, gptq, marlin
from qload.sentences.strided_digits import WHOLE_BITS
from qload.spec import Codes
from qload.testing import assert_same_bits
from qload.testing.strategies import layers
from tests.format_cases import CONFIGS
from tests.native.memory import GUARD, each_isa, few, guarded, isas, offsets, placed, threads

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
PACKINGS = {
    **{f"gptq {bits}": gptq.rows(bits) for bits in (2, 3, 4, 8)},
    **{f"awq {bits}": awq.columns(bits) for bits in (4, 8)},
    **{f"marlin {bits}": marlin.rows(bits) for bits in (4, 8)},
    **{f"compressed {bits}": compressed_tensors.rows(bits, dense=True) for bits in (2, 3, 4, 5, 6, 7, 8)},
}


def floats(*shape: int) -> Tensor:
    """Scales of every size: in bfloat16 and float16 some round up, some down, some to zero or infinity."""
    bits = torch.randint(0, 2**16, shape, dtype=torch.int32) & ~0x0080  # never all exponent bits: no NaN
    return (bits << 16).view(torch.float32) * torch.linspace(0.9, 1.1, max(1, shape[-1]))[: shape[-1]]


@st.composite
def meanings(draw: Any, bits: int, N: int, K: int) -> dict[str, Any]:
    """Everything about a weight but its codes."""
    torch.manual_seed(draw(st.integers(0, 999)))
    size = draw(st.sampled_from([1, 3, 8, 16, 32, 64, max(K, 1)]))
    groups = -(-K // size) if K else 1
    grouped = draw(st.sampled_from(["in order", "any order", "one"]))
    k_group = torch.arange(K) // size
    if grouped == "any order":
        k_group = k_group[torch.randperm(K)]
    rows = draw(st.sampled_from(["each", "one", "by index"]))
    tables = {"each": N, "one": 1, "by index": 2}[rows]
    shape = (tables, groups if grouped != "one" else 1)
    zeros = torch.randint(0, 2**bits + 1, shape, dtype=torch.int32) if draw(st.booleans()) else None
    return {
        "scales": floats(*shape).to(draw(st.sampled_from(DTYPES))).float(),
        "zeros": zeros,
        "k_group": None if grouped == "one" else k_group,
        "n_group": torch.randint(0, 2, (N,)) if rows == "by index" else None,
        "lookup": floats(2**bits) if draw(st.booleans()) else None,
        "divide": draw(st.booleans()),
        "factor": draw(st.sampled_from([1.0, 1 / 127])),
    }


def check(codes: Codes, dtype: torch.dtype, count: int) -> None:
    """Numbers bit for bit, and NaN where there is NaN: which NaN, torch leaves to its own vector code."""

    def bits() -> Tensor:
        values = codes.dequantize(dtype)
        return torch.where(values.isnan(), 7, values)

    each_isa(bits, count)


@pytest.mark.parametrize("name", PACKINGS)
@few
@given(data=st.data(), count=threads, offset=offsets, dtype=st.sampled_from(DTYPES))
def test_from_words(name: str, data: Any, count: int, offset: int, dtype: torch.dtype) -> None:
    packing: Packing = PACKINGS[name]
    K, N = (packing.granule(axis) * data.draw(st.integers(0, 5)) for axis in (0, 1))
    words = packing.pack(torch.randint(0, 2**packing.bits, (K, N), dtype=torch.int32))
    packed = packing.packed(placed(words, offset))
    if data.draw(st.booleans()):
        packed = packed[torch.randperm(K)]

    check(Codes(packing.bits, packed.T, **data.draw(meanings(packing.bits, N, K))), dtype, count)
    check(Codes(packing.bits, packed, **data.draw(meanings(packing.bits, K, N))), dtype, count)


@given(data=st.data(), count=threads, dtype=st.sampled_from(DTYPES), high=st.booleans(), N=st.integers(0, 9))
def test_from_pairs(data: Any, count: int, dtype: torch.dtype, high: bool, N: int) -> None:
    half = data.draw(st.integers(0, 300))
    pairs = NibblePairs(torch.randint(0, 256, (N, half + 3), dtype=torch.uint8)[:, 2 : half + 2], high)

    check(Codes(4, pairs, **data.draw(meanings(4, N, 2 * half))), dtype, count)


@given(
    data=st.data(), count=threads, dtype=st.sampled_from(DTYPES), N=st.integers(0, 9), K=st.integers(0, 600)
)
def test_from_bytes(data: Any, count: int, dtype: torch.dtype, N: int, K: int) -> None:
    codes = torch.randint(0, 256, (N, K + 1), dtype=torch.uint8)[:, 1:]

    check(Codes(8, codes, **data.draw(meanings(8, N, K))), dtype, count)


@given(count=threads, offset=offsets, dtype=st.sampled_from(DTYPES), step=st.integers(0, 9))
def test_nothing_around_the_values_is_written(count: int, offset: int, dtype: torch.dtype, step: int) -> None:
    N, K = 5, 131
    codes = Codes(8, torch.randint(0, 256, (N, K), dtype=torch.uint8), floats(N, 1).abs(), None, None)
    for isa in isas():
        with native.using(isa, count), guarded((N, K + step), dtype, offset) as around:
            around.view(torch.uint8).fill_(0x5A)
            codes.dequantize(out=around[:, :K])
            rest = around[:, K:].contiguous().view(torch.uint8)
            assert bool((rest == 0x5A).all())
            assert_same_bits(around[:, :K], codes.dequantize(dtype))
    assert offset < GUARD


def test_large_tensors_go_past_the_caches() -> None:
    torch.manual_seed(1)
    pairs = NibblePairs(torch.randint(0, 256, (512, 2048), dtype=torch.uint8), high_first=True)
    codes = Codes(4, pairs, floats(512, 64), None, torch.arange(4096) // 64, floats(16))

    for dtype in DTYPES:
        check(codes, dtype, 2)
        check(replace(codes, codes=gptq.rows(4).packed(pairs.bytes.view(torch.int32)).T), dtype, 2)


@pytest.mark.parametrize("weight_type", FORMATS, ids=lambda weight_type: weight_type.format)
@few
@given(data=st.data(), dtype=st.sampled_from(DTYPES))
def test_every_format(weight_type: Any, data: Any, dtype: torch.dtype) -> None:
    weight = data.draw(layers(weight_type, CONFIGS[weight_type])).weight()

    each_isa(lambda: weight.dequantize(dtype).nan_to_num(7), 2)
    each_isa(lambda: weight.dequantize(out=torch.empty(weight.shape, dtype=dtype)).nan_to_num(7), 2)


@pytest.mark.parametrize("name", PACKINGS)
@few
@given(data=st.data(), count=threads, offset=offsets, dtype=st.sampled_from(DTYPES))
def test_words_that_hold_more_than_there_is(
    name: str, data: Any, count: int, offset: int, dtype: torch.dtype
) -> None:
    packing: Packing = PACKINGS[name]
    K, N = (packing.granule(axis) * data.draw(st.integers(1, 5)) for axis in (0, 1))
    packed = packing.packed(packing.pack(torch.randint(0, 2**packing.bits, (K, N), dtype=torch.int32)))
    shape = (data.draw(st.integers(1, K)), data.draw(st.integers(1, N)))
    clipped = ClippedCodes(replace(packed, words=placed(packed.words, offset)), shape)

    codes = Codes(packing.bits, clipped.T, **data.draw(meanings(packing.bits, *clipped.T.shape)))
    check(codes, dtype, count)
    assert torch.equal(codes.plain(), packed.plain().T[: shape[1], : shape[0]])
    if packing.bits in WHOLE_BITS or packing.pattern.startswith("(kp"):
        out = torch.empty(codes.codes.shape, dtype=dtype)
        assert meaning_of(codes) is None or clipped.T.dequantize(meaning_of(codes), out)  # type: ignore[arg-type]
