"""What the library does to tensors on a device: in native code the same bits as in plain torch."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from qload import devices, native
from qload.errors import ArgumentError
from qload.layouts import Order, Packing, gptq, marlin
from qload.testing import assert_same_bits
from tests.gpu.device_tensors import act_order, both, codes_of, placed, words
from tests.native.test_packings import NAMED

pytestmark = pytest.mark.gpu
few = settings(max_examples=12)
PACKINGS = pytest.mark.parametrize("packing", [pytest.param(p, id=name) for name, p in NAMED.items()])
offsets = st.integers(0, 5)


def test_there_is_native_code_for_what_lies_on_the_device() -> None:
    assert devices.has_routines(torch.zeros(4, device="cuda"))
    with native.reference():
        assert not devices.has_routines(torch.zeros(4, device="cuda"))
    with FakeTensorMode():
        assert not devices.has_routines(torch.zeros(4, device="cuda"))


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
    bytes_ = torch.empty(codes.shape, dtype=torch.uint8, device="cuda")
    assert torch.equal(packing.unpack(stored, bytes_).int(), codes)


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


@pytest.mark.filterwarnings("ignore:Dynamo")  # says where it breaks a graph
def test_what_is_compiled_is_the_same() -> None:
    stored = words(32, 64).cuda()
    compiled = torch.compile(gptq.rows(4).unpack, backend="eager", dynamic=False)

    assert_same_bits(compiled(stored), gptq.rows(4).unpack(stored))
