"""Codes packed, unpacked, and packed again in another order: the same bits as the loops in torch."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from qload import native
from qload.errors import ArgumentError
from qload.layouts import Packing, awq, compressed_tensors, exl2, exllama, gptq, marlin, marlin_24
from tests.native.memory import each_isa, few, guarded, isas, offsets, placed, threads

NAMED = {
    **{f"gptq rows {bits}": gptq.rows(bits) for bits in (2, 3, 4, 8)},
    **{f"gptq columns {bits}": gptq.columns(bits) for bits in (2, 3, 4, 8)},
    **{f"awq {bits}": awq.columns(bits) for bits in (4, 8)},
    **{f"exllama {bits}": exllama.rows(bits) for bits in (2, 3, 4)},
    **{f"marlin {bits}": marlin.rows(bits) for bits in (4, 8)},
    **{f"marlin zeros {bits}": marlin.zeros(bits) for bits in (4, 8)},
    **{f"marlin 2:4 {bits}": marlin_24.rows(bits) for bits in (4, 8)},
    **{f"compressed {bits}": compressed_tensors.rows(bits, dense=True) for bits in (2, 3, 4, 5, 6, 7, 8)},
    **{f"compressed by words {bits}": compressed_tensors.rows(bits, dense=False) for bits in (3, 5, 6, 7)},
    **{f"exl2 shuffled {bits}": exl2.kernel_rows(bits) for bits in (5, 6)},
}
PACKINGS = [pytest.param(packing, id=name) for name, packing in NAMED.items()]
ROWWISE = [name for name, packing in NAMED.items() if packing.pattern.startswith("(kp")]


def drawn(packing: Packing, rows: int, columns: int) -> Tensor:
    shape = (rows * packing.granule(0), columns * packing.granule(1))
    return torch.randint(0, 2**packing.bits, shape, dtype=torch.int32)


@pytest.mark.parametrize("packing", PACKINGS)
@few
@given(rows=st.integers(0, 9), columns=st.integers(0, 9), count=threads, offset=offsets, turned=st.booleans())
def test_packing(packing: Packing, rows: int, columns: int, count: int, offset: int, turned: bool) -> None:
    codes = placed(drawn(packing, rows, columns), offset)
    if turned:
        codes = codes.T.contiguous().T
    words = placed(packing.pack(codes), offset)

    each_isa(lambda: packing.pack(codes), count)
    each_isa(lambda: packing.unpack(words), count)
    assert torch.equal(packing.unpack(words), codes)


@pytest.mark.parametrize("packing", PACKINGS)
@few
@given(count=threads, offset=offsets, columns=st.integers(0, 5))
def test_nothing_around_the_words_is_written(packing: Packing, count: int, offset: int, columns: int) -> None:
    codes = drawn(packing, 3, columns)
    for isa in isas():
        with (
            native.using(isa, count),
            guarded(packing.pack(codes).shape, torch.int32, offset) as words,
            guarded(codes.shape, torch.int32, offset) as again,
        ):
            packing.pack(codes, out=words)
            assert packing.unpack(words).equal(codes)
            again.copy_(packing.unpack(words))


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("wrong", [-1, None], ids=["below", "above"])
def test_a_code_that_does_not_fit_is_seen(packing: Packing, wrong: int | None) -> None:
    codes = drawn(packing, 2, 3)
    codes[-1, -1] = 2**packing.bits if wrong is None else wrong

    for isa in isas():
        with native.using(isa), pytest.raises(ArgumentError, match=f"0 <= code < {2**packing.bits}"):
            packing.pack(codes)


@pytest.mark.parametrize("source", PACKINGS)
@few
@given(data=st.data(), count=threads, offset=offsets, turned=st.booleans())
def test_words_to_words(source: Packing, data: Any, count: int, offset: int, turned: bool) -> None:
    others = [packing for packing in NAMED.values() if packing.bits == source.bits]
    target = data.draw(st.sampled_from(others))
    rows, columns = (source.granule(axis) * target.granule(axis ^ turned) for axis in (0, 1))
    shape = (rows * data.draw(st.integers(0, 2)), columns * data.draw(st.integers(0, 3)))
    codes = torch.randint(0, 2**source.bits, shape, dtype=torch.int32)
    packed = source.packed(placed(source.pack(codes), offset))

    each_isa(lambda: target.pack(packed.T if turned else packed), count)


@pytest.mark.parametrize("name", ROWWISE)
@few
@given(data=st.data(), count=threads, turned=st.booleans())
def test_rows_gathered_on_the_way(name: str, data: Any, count: int, turned: bool) -> None:
    source = NAMED[name]
    target = data.draw(
        st.sampled_from([packing for packing in NAMED.values() if packing.bits == source.bits])
    )
    rows, columns = (source.granule(axis) * target.granule(axis ^ turned) for axis in (0, 1))
    codes = torch.randint(
        0, 2**source.bits, (rows, columns * data.draw(st.integers(0, 3))), dtype=torch.int32
    )
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99))))
    packed = source.packed(source.pack(codes))[order]

    each_isa(lambda: target.pack(packed.T if turned else packed), count)
    assert torch.equal(packed.plain(), codes[order])


@pytest.mark.parametrize("target", [marlin.rows(4), exllama.rows(4)], ids=["marlin", "exllama"])
def test_a_gather_twice_is_one_of_both(target: Packing) -> None:
    codes = drawn(gptq.rows(4), 8, 64)
    first, second = torch.randperm(64), torch.randperm(64)

    gathered = gptq.rows(4).packed(gptq.rows(4).pack(codes))[first][second]

    assert torch.equal(target.pack(gathered), target.pack(codes[first][second]))


def test_what_is_written_to_has_to_fit_and_to_lie_apart() -> None:
    packing = gptq.rows(4)
    words = packing.pack(drawn(packing, 2, 8))

    for out in (words, torch.empty(2, 7, dtype=torch.int32), torch.empty(2, 8), torch.empty(8, 2).int().T):
        with pytest.raises(ArgumentError, match="out"):
            exllama.rows(4).pack(packing.packed(words), out=out)
