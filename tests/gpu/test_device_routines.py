"""What the library does to tensors on a device: in native code the same bits as in plain torch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from qload import native
from qload.errors import ArgumentError
from qload.formats import AWQConfig, AWQWeight, CTPackConfig, CTPackWeight, GPTQConfig, GPTQWeight
from qload.kernels import cuda, repack, restore
from qload.layouts import Order, Packing, Stored, gptq, marlin
from qload.spec import Weight
from qload.testing import assert_same_bits, layers
from tests.native.test_packings import NAMED
from tests.rooms import CONFIGS, every_format

pytestmark = pytest.mark.gpu
few = settings(max_examples=12)
GUARD = 64  # elements on either side that nobody may touch
PACKINGS = pytest.mark.parametrize("packing", [pytest.param(p, id=name) for name, p in NAMED.items()])
DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32], ids=["float16", "bfloat16", "float32"]
)
offsets = st.integers(0, 5)


@pytest.fixture(autouse=True, scope="module")
def _built() -> None:
    reason = cuda.why_not()
    if reason:
        pytest.skip(reason)


def both(work: Callable[[], Tensor]) -> Tensor:
    with native.reference():
        want = work()
    got = work()
    assert_same_bits(got, want)
    return got


def codes_of(bits: int, rows: int, columns: int, seed: int = 0) -> Tensor:
    noise = torch.Generator().manual_seed(seed)
    return torch.randint(2**bits, (rows, columns), dtype=torch.int32, generator=noise).cuda()


def placed(tensor: Tensor, offset: int) -> Tensor:
    """The same values at an odd place in memory."""
    return tensor.new_empty(tensor.numel() + offset)[offset:].view(tensor.shape).copy_(tensor)


def guarded(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A tensor between two guard zones, and these."""
    memory = torch.full((torch.Size(shape).numel() + 2 * GUARD,), 77, device="cuda", dtype=dtype)
    return memory[GUARD:-GUARD].view(shape), torch.cat([memory[:GUARD], memory[-GUARD:]])


def words(*shape: int, seed: int = 0) -> Tensor:
    noise = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int64, generator=noise).to(torch.int32)


def act_order(bits: int, K: int, N: int, group: int) -> GPTQWeight:
    order = torch.randperm(K, generator=torch.Generator().manual_seed(K))
    return GPTQWeight(
        config=GPTQConfig(bits, group, desc_act=True, zeros=Stored()),
        qweight=words(K * bits // 32, N),
        qzeros=words(K // group, N * bits // 32, seed=1),
        scales=(torch.rand(K // group, N) * 0.02).half(),
        g_idx=(torch.arange(K) // group)[order].to(torch.int32),
    ).to("cuda")


def test_there_is_native_code_for_what_lies_on_the_device() -> None:
    assert native.takes(torch.zeros(4, device="cuda"))
    with native.reference():
        assert not native.takes(torch.zeros(4, device="cuda"))
    with FakeTensorMode():
        assert not native.takes(torch.zeros(4, device="cuda"))


@PACKINGS
@given(rows=st.integers(0, 9), columns=st.integers(0, 9), offset=offsets, turned=st.booleans())
@few
def test_packing(packing: Packing, rows: int, columns: int, offset: int, turned: bool) -> None:
    codes = codes_of(packing.bits, rows * packing.granule(0), columns * packing.granule(1))
    codes = placed(codes, offset)
    if turned:
        codes = codes.T.contiguous().T

    stored = placed(both(lambda: packing.pack(codes)), offset)

    assert torch.equal(both(lambda: packing.unpack(stored)), codes)


@PACKINGS
@pytest.mark.parametrize("wrong", [-1, None], ids=["below", "above"])
def test_a_code_that_does_not_fit_is_seen(packing: Packing, wrong: int | None) -> None:
    codes = codes_of(packing.bits, 4 * packing.granule(0), 4 * packing.granule(1))
    codes[-1, -1] = 2**packing.bits if wrong is None else wrong

    with pytest.raises(ArgumentError, match=f"0 <= code < {2**packing.bits}"):
        packing.pack(codes)


@PACKINGS
@given(data=st.data(), offset=offsets, turned=st.booleans(), gathered=st.booleans())
@few
def test_words_to_words(packing: Packing, data: Any, offset: int, turned: bool, gathered: bool) -> None:
    target = data.draw(st.sampled_from([other for other in NAMED.values() if other.bits == packing.bits]))
    rows, columns = (packing.granule(axis) * target.granule(axis ^ turned) for axis in (0, 1))
    codes = codes_of(
        packing.bits, rows * data.draw(st.integers(0, 2)), columns * data.draw(st.integers(0, 3))
    )
    packed: Any = packing.packed(placed(packing.pack(codes), offset))
    if gathered:
        order = torch.randperm(codes.shape[0], generator=torch.Generator().manual_seed(offset)).cuda()
        packed, codes = packed[order], codes[order]

    got = both(lambda: target.pack(packed.T if turned else packed))

    assert torch.equal(target.unpack(got), codes.T if turned else codes)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.int32, torch.int64], ids=str)
@given(a=st.integers(0, 40), n=st.integers(0, 9), offset=offsets, turned=st.booleans())
@few
def test_an_order(dtype: torch.dtype, a: int, n: int, offset: int, turned: bool) -> None:
    order = Order("(a i) (n j) -> a n (j i)", i=3, j=4)
    plain = placed(torch.randint(0, 100, (3 * a, 4 * n)).to(dtype).cuda(), offset)
    plain = plain.T.contiguous().T if turned else plain

    moved = both(lambda: order.apply(plain))

    assert torch.equal(both(lambda: order.undo(moved)), plain)


@every_format
@DTYPES
@given(data=st.data())
@few
def test_a_weight_means_the_same_in_a_buffer_too(room: type[Weight], dtype: torch.dtype, data: Any) -> None:
    weight = data.draw(layers(room, CONFIGS[room])).weight().to("cuda")
    out, around = guarded(weight.shape, dtype)

    want = both(lambda: weight.dequantize(dtype))
    weight.dequantize(out=out)

    assert_same_bits(out, want)
    assert bool((around == 77).all())


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize(("K", "N"), [(128, 64), (256, 192), (1024, 1088)])
@DTYPES
def test_act_order(bits: int, K: int, N: int, dtype: torch.dtype) -> None:
    weight = act_order(bits, K, N, 64)
    both(lambda: weight.dequantize(dtype))

    for layout in ("exllama", "gptq_v2") if bits == 2 else ("marlin", "exllama", "gptq_v2"):
        if (layout, bits) == ("exllama", 8):
            continue
        packed = repack(weight, layout)
        with native.reference():
            want = repack(weight, layout).fields()
        for name, tensor in packed.fields().items():
            assert_same_bits(tensor, want[name])
        assert_same_bits(both(lambda held=packed: held.dequantize(dtype)), weight.dequantize(dtype))  # type: ignore[misc]
        assert_same_bits(restore(packed).fields()["qweight"], weight.qweight)


@pytest.mark.parametrize("seed", range(3))
@DTYPES
def test_every_fp16_scale_there_is(seed: int, dtype: torch.dtype) -> None:
    K, N = 128, 1 << 16
    scales = torch.arange(N, dtype=torch.int32).to(torch.int16).view(torch.float16)[None]
    stored = {"qweight": words(K, N // 8, seed=seed), "qzeros": words(1, N // 8, seed=seed + 9)}
    weight = AWQWeight(config=AWQConfig(K), scales=scales, **stored).to("cuda")
    assert_same_numbers(weight, dtype)
    assert_same_numbers(repack(weight, "gptq_v2"), dtype)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16], ids=str)
@DTYPES
def test_every_symmetric_scale_there_is(bits: int, stored: torch.dtype, dtype: torch.dtype) -> None:
    K, N = 256, 1 << 16
    scales = torch.arange(N, dtype=torch.int32).to(torch.int16).view(stored)[:, None].contiguous()
    config = CTPackConfig(bits, K)
    weight = CTPackWeight(config=config, weight_packed=words(N, K * bits // 32), weight_scale=scales)
    assert_same_numbers(weight.to("cuda"), dtype)


def assert_same_numbers(weight: Weight, dtype: torch.dtype) -> None:
    """The same bits; which NaN a NaN is rounded to is left open."""
    with native.reference():
        want = weight.dequantize(dtype)
    got = weight.dequantize(dtype)
    nan = want.isnan()
    assert torch.equal(got.isnan(), nan)
    assert_same_bits(got.masked_fill(nan, 0), want.masked_fill(nan, 0))


@pytest.mark.parametrize("blocksize", [64, 256])
@pytest.mark.parametrize("shape", [(1, 2), (33, 65), (64, 256), (1, 4098), (255, 129)], ids=str)
@DTYPES
def test_a_table_of_any_shape(blocksize: int, shape: tuple[int, int], dtype: torch.dtype) -> None:
    N, K = shape
    codes = codes_of(8, 1, -(-N * K // 2)).to(torch.uint8)[0]
    scales, table = torch.randn(-(-N * K // blocksize)).cuda(), torch.randn(16).cuda()
    each = torch.stack([codes >> 4, codes & 15], 1).flatten()[: N * K].long()
    place = torch.arange(N * K, device="cuda") // blocksize

    log = blocksize.bit_length() - 1
    got = torch.ops.qload.dequantize_table(codes, table, scales, log, N, K, dtype)

    assert_same_bits(got, (table[each] * scales[place]).reshape(N, K).to(dtype))


def test_a_graph_captures_repack_and_dequantize() -> None:
    weight = act_order(4, 512, 256, 128)
    target = marlin.rows(4)
    order = torch.argsort(weight.g_idx.long(), stable=True)

    def work() -> tuple[Tensor, Tensor]:
        moved = target.pack(gptq.rows(4).packed(weight.qweight)[order])
        return moved, weight.dequantize(torch.float16)

    want, stream = work(), torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        got = work()
    graph.replay()
    torch.cuda.synchronize()

    for one, other in zip(got, want, strict=True):
        assert_same_bits(one, other)


def test_fake_tensors_have_shapes_and_no_memory() -> None:
    weight = act_order(4, 256, 64, 64)
    with FakeTensorMode() as mode:
        fake = weight.holding({name: mode.from_tensor(t) for name, t in weight.fields().items()})
        assert fake.dequantize(torch.bfloat16).shape == (64, 256)
        assert gptq.rows(4).unpack(fake.qweight).shape == (256, 64)


@pytest.mark.filterwarnings("ignore:Dynamo does not know")  # that `new_empty` breaks a graph
def test_what_is_compiled_is_the_same() -> None:
    stored = words(32, 64).cuda()
    compiled = torch.compile(gptq.rows(4).unpack, backend="eager", dynamic=False)

    assert_same_bits(compiled(stored), gptq.rows(4).unpack(stored))
