"""Every native CUDA operator against the torch reference: bits where bits are promised, one rounding else."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qload.errors import ArgumentError
from qload.kernel_formats import repack
from qload.kernels import cuda
from qload.kernels.cuda import stored
from qload.layouts import awq, exllama, gptq, marlin, strides
from qload.layouts.packing import Packing
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


def digits_of(source: Packing, target: Packing, K: int, N: int, rows: int | None = None) -> list[Any]:
    shape = (K, N)
    found = strides.digits(
        strides.places(source.codes, shape), strides.places(target.codes, shape), rows=rows
    )
    assert found is not None
    return found


@pytest.mark.parametrize(("bits", "source", "target"), MOVES)
@pytest.mark.parametrize(("K", "N"), SHAPES)
def test_a_move_has_the_bits_of_unpack_and_pack(bits: int, source: str, target: str, K: int, N: int) -> None:
    codes, one, other = drawn(bits, K, N), PACKINGS[bits][source], PACKINGS[bits][target]
    words, want = one.pack(codes).to(DEVICE), other.pack(codes)
    out, memory = guarded(tuple(want.shape), torch.int32)

    cuda.move(words, bits, digits_of(one, other, K, N), want.shape, out=out)

    assert_same_bits(out.cpu(), want)
    assert bool((memory[:GUARD] == -7).all() and (memory[-GUARD:] == -7).all())


@pytest.mark.parametrize(("bits", "source", "target"), MOVES)
def test_rows_in_any_order_are_gathered_on_the_way(bits: int, source: str, target: str) -> None:
    K, N = 96, 192
    codes, one, other = drawn(bits, K, N), PACKINGS[bits][source], PACKINGS[bits][target]
    perm = torch.randperm(K, generator=torch.Generator().manual_seed(0))
    starts = torch.tensor(strides.starts(strides.places(one.codes, (K, N))[0], K))
    want = other.pack(codes[perm])

    got = cuda.move(
        one.pack(codes).to(DEVICE),
        bits,
        digits_of(one, other, K, N, rows=0),
        want.shape,
        rows=starts[perm].to(DEVICE),
    )

    assert_same_bits(got.cpu(), want)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32], ids=str)
@pytest.mark.parametrize(("K", "N"), [(33, 65), (7, 128), (64, 96), (1, 1), (100, 36)])
def test_any_strides_are_followed(dtype: torch.dtype, K: int, N: int) -> None:
    whole = torch.arange(2 * K * 3 * N).reshape(2 * K, 3 * N).to(dtype).to(DEVICE)
    source = strides.strided((K, N), (2 * 3 * N, 3))
    out, memory = guarded((N, K), dtype)

    found = strides.digits(source, strides.strided((K, N), (1, K)))
    cuda.move(whole, 8 * dtype.itemsize, found or [], (N, K), out=out)

    assert_same_bits(out, whole[::2, ::3].T.clone(memory_format=torch.contiguous_format))
    assert bool((memory[:GUARD] == memory[0]).all() and (memory[-GUARD:] == memory[0]).all())


def test_fields_that_no_digit_reaches_stay() -> None:
    words = torch.full((4,), 0x76543210, dtype=torch.int32, device=DEVICE)
    out = torch.full((4,), -1, dtype=torch.int32, device=DEVICE)

    cuda.move(words, 4, [(5, 1, 3, 0)], (4,), out=out)

    assert [f"{word & 0xFFFFFFFF:x}" for word in out.tolist()] == [
        "f2ff1ff0",
        "fff4ff3f",
        "ffffffff",
        "ffffffff",
    ]


def test_no_element_is_no_launch() -> None:
    empty = torch.empty(0, 8, dtype=torch.int32, device=DEVICE)

    assert cuda.move(empty, 32, [(0, 8, 1, 0), (8, 1, 0, 0)], (8, 0)).shape == (8, 0)


def test_what_does_not_fit_is_refused_by_name() -> None:
    words = torch.zeros(8, dtype=torch.int32, device=DEVICE)

    with pytest.raises(ArgumentError, match="source"):
        cuda.move(words[::2], 32, [(4, 1, 1, 0)], (4,))
    with pytest.raises(ArgumentError, match="out"):
        cuda.move(words, 32, [(8, 1, 1, 0)], (4,))
    with pytest.raises(ArgumentError, match="bits"):
        cuda.move(words, 3, [(8, 1, 1, 0)], (8,))


@every_format
@DTYPES
@given(data=st.data())
@few
def test_a_weight_is_dequantized_with_one_rounding(
    weight_type: type[Weight], dtype: torch.dtype, data: Any
) -> None:
    weight = data.draw(layers(weight_type, CONFIGS[weight_type])).weight()

    got = cuda.dequantize(weight.to(DEVICE), dtype)

    assert_same_bits(got.cpu(), weight.dequantize().to(dtype))


@pytest.mark.parametrize("layout", ["gptq", "gptq_v2", "exllama", "marlin", "awq"])
@pytest.mark.parametrize("group", [-1, 32, 128])
@DTYPES
def test_a_repacked_weight_is_dequantized_with_one_rounding(
    layout: str, group: int, dtype: torch.dtype
) -> None:
    weight = repack(noise(group, 512, 384), layout)

    got = cuda.dequantize(weight.to(DEVICE), dtype)

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
                got[i].append(cuda.dequantize(weight, torch.float16))
    torch.cuda.synchronize()

    for i in (0, 1):
        for each in got[i]:
            assert_same_bits(each, want[i])


def test_operators_have_a_schema_and_a_shape_rule_that_hold() -> None:
    words = drawn(4, 64, 64).to(DEVICE)
    scales = torch.rand(2, 64, device=DEVICE).half()
    meaning = [scales, None, None, None, None, [1, 64, 0, 0, 1, 32], [1, 8, 4, 0, 0, -1], False, 1.0, 64, 64]

    torch.library.opcheck(
        torch.ops.qload.move.default, (words, None, 32, [64, 64, 1, 0, 64, 1, 64, 0], [64, 64])
    )
    torch.library.opcheck(torch.ops.qload.dequantize_single.default, (words % 16, *meaning, torch.float16))
    flat = torch.zeros(32 * 64, dtype=torch.uint8, device=DEVICE)
    table, absmax = torch.rand(16, device=DEVICE), torch.rand(64, device=DEVICE)
    torch.library.opcheck(
        torch.ops.qload.dequantize_table.default, (flat, table, absmax, 6, 64, 64, torch.bfloat16)
    )
    found = stored.packed(noise(32, 128, 64).to(DEVICE))
    assert found is not None
    digits = [number for digit in found.digits for number in digit]
    torch.library.opcheck(
        torch.ops.qload.dequantize.default,
        (found.codes, *found.meaning, torch.float16, found.bits, digits, found.row_bits),
    )
    meta = torch.ops.qload.move(words.to("meta"), None, 32, [64, 64, 1, 0], [64, 1])
    assert (meta.device.type, tuple(meta.shape), meta.dtype) == ("meta", (64, 1), torch.int32)
