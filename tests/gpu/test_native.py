"""Every native CUDA routine against the torch reference: bits where bits are promised, one rounding else."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qload.devices import cuda
from qload.devices.cuda_stored import dequantize_stored
from qload.kernel_formats import repack
from qload.layouts import awq, exllama, gptq, marlin
from qload.layouts.packing import Packing
from qload.sentences import Digit
from qload.sentences.strided_digits import axis_digits, in_common
from qload.spec import Weight
from qload.testing import assert_same_bits, layers
from tests.format_cases import CONFIGS, every_format

pytestmark = pytest.mark.gpu
few = settings(max_examples=10)
DEVICE = "cuda"
GUARD = 64  # elements on either side that nobody may touch

PACKINGS = {
    2: {"gptq": gptq.rows(2), "exllama": exllama.rows(2)},
    4: {"gptq": gptq.rows(4), "awq": awq.columns(4), "exllama": exllama.rows(4), "marlin": marlin.rows(4)},
    8: {"gptq": gptq.rows(8), "awq": awq.columns(8), "marlin": marlin.rows(8)},
}
MOVES = [
    pytest.param(bits, source, target, id=f"{bits} bits {source} to {target}")
    for bits, packings in PACKINGS.items()
    for source in packings
    for target in packings
    if source != target
]
SHAPES = [(16, 64), (48, 192), (256, 512), (112, 320), (1024, 1088)]
DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32], ids=["float16", "bfloat16", "float32"]
)


def drawn(bits: int, K: int, N: int) -> Tensor:
    return torch.randint(2**bits, (K, N), dtype=torch.int32, generator=torch.Generator().manual_seed(K + N))


def guarded(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A tensor between two guard zones, and all of its memory."""
    memory = torch.full((torch.Size(shape).numel() + 2 * GUARD,), -7, device=DEVICE, dtype=dtype)
    return memory[GUARD:-GUARD].view(shape), memory


def digits_of(source: Packing, target: Packing, K: int, N: int) -> list[Digit]:
    found = in_common(axis_digits(source.codes, (K, N)), axis_digits(target.codes, (K, N)))
    assert found is not None
    return found


@pytest.mark.parametrize(("bits", "source", "target"), MOVES)
@pytest.mark.parametrize(("K", "N"), SHAPES)
def test_a_move_has_the_bits_of_unpack_and_pack(bits: int, source: str, target: str, K: int, N: int) -> None:
    codes, one, other = drawn(bits, K, N), PACKINGS[bits][source], PACKINGS[bits][target]
    words, want = one.pack(codes).to(DEVICE), other.pack(codes)
    out, memory = guarded(tuple(want.shape), torch.int32)

    assert cuda.move(words, out, bits, digits_of(one, other, K, N))

    assert_same_bits(out.cpu(), want)
    assert bool((memory[:GUARD] == -7).all() and (memory[-GUARD:] == -7).all())


@pytest.mark.parametrize(("bits", "source", "target"), MOVES)
def test_rows_in_any_order_are_gathered_on_the_way(bits: int, source: str, target: str) -> None:
    K, N = 96, 192
    codes, one, other = drawn(bits, K, N), PACKINGS[bits][source], PACKINGS[bits][target]
    perm = torch.randperm(K, generator=torch.Generator().manual_seed(0))
    want = other.pack(codes[perm])
    words = one.pack(codes).to(DEVICE)
    got = torch.empty_like(want, device=DEVICE)

    assert cuda.repack(one.packed(words)[perm.to(DEVICE)], other, got)

    assert_same_bits(got.cpu(), want)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32], ids=str)
@pytest.mark.parametrize(("K", "N"), [(33, 65), (7, 128), (64, 96), (1, 1), (100, 36)])
def test_any_strides_are_followed(dtype: torch.dtype, K: int, N: int) -> None:
    whole = torch.arange(2 * K * 3 * N).reshape(2 * K, 3 * N).to(dtype).to(DEVICE)
    out, memory = guarded((N, K), dtype)

    assert cuda.move(whole, out, 8 * dtype.itemsize, [Digit(K, 2 * 3 * N, 1), Digit(N, 3, K)])

    assert_same_bits(out, whole[::2, ::3].T.clone(memory_format=torch.contiguous_format))
    assert bool((memory[:GUARD] == memory[0]).all() and (memory[-GUARD:] == memory[0]).all())


def test_fields_that_no_digit_reaches_stay() -> None:
    words = torch.full((4,), 0x76543210, dtype=torch.int32, device=DEVICE)
    out = torch.full((4,), -1, dtype=torch.int32, device=DEVICE)

    assert cuda.move(words, out, 4, [Digit(5, 1, 3)])

    assert [f"{word & 0xFFFFFFFF:x}" for word in out.tolist()] == [
        "f2ff1ff0",
        "fff4ff3f",
        "ffffffff",
        "ffffffff",
    ]


def test_no_element_is_no_launch() -> None:
    empty = torch.empty(0, 8, dtype=torch.int32, device=DEVICE)

    assert cuda.move(empty, empty.new_empty(8, 0), 32, [Digit(0, 8, 1), Digit(8, 1, 0)])


def test_what_does_not_fit_is_left_to_torch() -> None:
    words, digits = torch.zeros(8, dtype=torch.int32, device=DEVICE), [Digit(8, 1, 1)]
    between = torch.zeros(9 * 4, dtype=torch.uint8, device=DEVICE)[1:-3]

    assert not cuda.move(words, words.clone(), 3, digits)
    assert not cuda.move(words, words.cpu(), 32, digits)
    assert not cuda.move(words.view(torch.uint8), between, 8, [Digit(32, 1, 1)])


@every_format
@DTYPES
@given(data=st.data())
@few
def test_a_weight_is_dequantized_with_one_rounding(
    weight_type: type[Weight], dtype: torch.dtype, data: Any
) -> None:
    weight = data.draw(layers(weight_type, CONFIGS[weight_type])).weight()

    got = weight.to(DEVICE).dequantize(dtype)

    assert_same_bits(got.cpu(), weight.dequantize().to(dtype))


@pytest.mark.parametrize("layout", ["gptq", "gptq_v2", "exllama", "marlin", "strips", "awq"])
@pytest.mark.parametrize("group", [-1, 32, 128])
@DTYPES
def test_a_repacked_weight_is_dequantized_with_one_rounding(
    layout: str, group: int, dtype: torch.dtype
) -> None:
    weight = repack(noise(group, 512, 384), layout)
    there = weight.to(DEVICE)
    got = torch.full(weight.shape, float("nan"), dtype=dtype, device=DEVICE)

    stored = there.stored()
    assert stored is not None
    assert dequantize_stored(stored, got)
    assert_same_bits(there.dequantize(dtype), got)
    assert_same_bits(got.cpu(), weight.dequantize().to(dtype))


def noise(group: int, K: int, N: int) -> Weight:
    """An AWQ weight of random codes, zero points and scales that use all of fp16's digits."""
    weight_type = next(weight_type for weight_type in CONFIGS if weight_type.format == "awq")
    make = torch.Generator().manual_seed(group)
    groups = 1 if group == -1 else K // group

    def words(*shape: int) -> Tensor:
        return torch.randint(-(2**31), 2**31, shape, generator=make, dtype=torch.int64).to(torch.int32)

    config = type(weight_type.example)(group)  # type: ignore[call-arg]
    scales = (torch.rand(groups, N, generator=make) * 0.02).half()
    return weight_type(config=config, qweight=words(K, N // 8), qzeros=words(groups, N // 8), scales=scales)  # type: ignore[call-arg]


def test_two_streams_do_not_meet() -> None:
    one, other = noise(128, 1024, 1024).to(DEVICE), noise(32, 1024, 1024).to(DEVICE)
    want = [weight.dequantize().half() for weight in (one, other)]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    got: list[list[Tensor]] = [[], []]

    torch.cuda.synchronize()
    for _ in range(20):
        for i, weight in enumerate((one, other)):
            with torch.cuda.stream(streams[i]):
                got[i].append(weight.dequantize(torch.float16))
    torch.cuda.synchronize()

    for i in (0, 1):
        for each in got[i]:
            assert_same_bits(each, want[i])
