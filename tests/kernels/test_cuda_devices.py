"""Words and weights on a CUDA device, the module's routines computed by hand on CPU tensors."""

import logging
from math import lcm
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qload.devices import cuda, cuda_stored, reference
from qload.devices.operands import (
    CodesInWords,
    CodeValues,
    StoredRows,
    StoredSparse,
    StoredStreams,
    StoredTable,
    meaning_of,
)
from qload.layouts import gptq
from qload.sentences import Digit
from qload.sentences.strided_digits import holds_whole_codes
from qload.spec import Weight
from qload.testing import assert_same_bits, layers
from tests.contract.test_stored import STORED
from tests.format_cases import CONFIGS
from tests.kernels.cuda_by_hand import STREAM
from tests.kernels.cuda_devices import HandOfDevices
from tests.kernels.cuda_layers import AMPERE, installed
from tests.native.test_packings import NAMED

FLOAT, HALF, BF16 = torch.float32, torch.float16, torch.bfloat16
DTYPES = pytest.mark.parametrize("dtype", [FLOAT, HALF, BF16], ids=str)
WHOLE = {name: packing for name, packing in NAMED.items() if holds_whole_codes(packing)}
DEFAULT_CHIPS = "80 86 89 90a 100 120"
few = settings(max_examples=2, deadline=None)


@pytest.fixture(autouse=True, scope="module")
def hand() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        yield installed(HandOfDevices(AMPERE), patch)


def odd(tensor: Tensor) -> Tensor:
    """The same numbers, from the second place of their memory on."""
    return torch.cat([tensor.flatten()[:1], tensor.flatten()])[1:].view(tensor.shape)


WHOLE_ONLY = StoredSparse, StoredStreams, StoredTable


@pytest.mark.parametrize("weight_type", STORED, ids=lambda each: each.format)
@given(data=st.data())
@few
def test_a_weight_is_dequantized_from_its_stored_tensors(weight_type: type[Weight], data: Any) -> None:
    N, K = 192, 384
    weight = data.draw(layers(weight_type, CONFIGS[weight_type], N=N, K=K)).weight()
    stored = weight.stored()
    if stored is None:
        return

    for dtype in (FLOAT, HALF, BF16):
        want, out = weight.dequantize(dtype), torch.full((N, K), 77, dtype=dtype)
        assert cuda_stored.dequantize_stored(stored, out)
        assert_same_bits(out, want)
        for start in (8, 64, 66, 128):
            part = torch.full_like(want[start:], 77)
            done = cuda_stored.dequantize_stored(stored, part, start)
            assert not (done and isinstance(stored, WHOLE_ONLY))
            assert_same_bits(part, want[start:] if done else torch.full_like(part, 77))
        factors = torch.arange(K).double() / 64
        assert cuda_stored.dequantize_stored(stored, out, 0, factors) == isinstance(stored, StoredRows)
        assert_same_bits(
            out, (weight.dequantize() * factors.float()).to(dtype) if isinstance(stored, StoredRows) else want
        )
    assert not cuda_stored.dequantize_stored(stored, torch.empty(N, K).double())
    assert not cuda_stored.dequantize_stored(stored, torch.empty(K, N).T)


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("turned", [False, True], ids=["rows", "columns"])
def test_codes_are_packed_and_unpacked(name: str, turned: bool) -> None:
    packing = NAMED[name]
    shape = 4 * packing.granule(0) * (32 if turned else 1), 4 * packing.granule(1) * (1 if turned else 32)
    codes = torch.randint(2**packing.bits, shape, dtype=torch.int32)
    lying = codes.T.contiguous().T if turned else codes
    want = packing.pack(codes)

    words, made = torch.zeros_like(want), torch.zeros_like(codes)
    if name not in WHOLE:
        assert cuda.pack(packing, lying, words) is None
        assert not cuda.unpack(packing, want, made)
        return
    assert cuda.pack(packing, odd(lying) if not turned else lying, words) == 2**packing.bits - 1
    assert torch.equal(words, want)
    if codes.shape[1] % (32 // packing.bits) == 0:
        assert cuda.unpack(packing, want, made)
        assert torch.equal(made, codes)
    assert not cuda.unpack(packing, want, made.to(torch.uint8))
    assert not cuda.unpack(packing, want, odd(made))
    assert not cuda.unpack(packing, want, made.T.contiguous().T)


def test_all_bits_of_codes_are_seen() -> None:
    packing = gptq.rows(4)
    codes = torch.zeros(8, 8, dtype=torch.int32)
    codes[3, 3], codes[5, 1] = 2, 33

    assert cuda.pack(packing, codes, torch.zeros(1, 8, dtype=torch.int32)) == 35


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("turned", [False, True], ids=["alike", "turned"])
@pytest.mark.parametrize("gathered", [False, True], ids=["in order", "gathered"])
def test_words_become_words_of_another_packing(name: str, turned: bool, gathered: bool) -> None:
    source = WHOLE[name]
    for other in (each for each in WHOLE.values() if each.bits == source.bits):
        rows, columns = (2 * lcm(source.granule(axis), other.granule(axis ^ turned)) for axis in (0, 1))
        columns = lcm(columns, 32)
        codes = torch.randint(2**source.bits, (rows, columns), dtype=torch.int32)
        order = torch.randperm(rows) if gathered else None
        want = codes if order is None else codes[order]
        want = other.pack(want.T.contiguous() if turned else want)
        words = torch.zeros_like(want)

        assert cuda.repack(CodesInWords(source, source.pack(codes), turned, order), other, words)

        assert torch.equal(words, want)


def test_words_of_other_codes_are_not_moved() -> None:
    words = torch.zeros(8, 8, dtype=torch.int32)

    assert not cuda.repack(CodesInWords(gptq.rows(4), words), gptq.rows(8), words)
    assert not cuda.repack(CodesInWords(gptq.rows(3), words), gptq.rows(3), words)
    assert not cuda.repack(
        CodesInWords(gptq.rows(8), words[:, :3], order=torch.arange(32)), gptq.rows(8), words
    )


@pytest.mark.parametrize(("bits", "dtype"), [(8, torch.uint8), (16, BF16), (32, FLOAT), (64, torch.int64)])
def test_elements_are_moved_in_their_own_bits(bits: int, dtype: torch.dtype) -> None:
    source = torch.arange(24).to(dtype)
    target, whole = torch.zeros(24, dtype=dtype), [Digit(4, 6, 1), Digit(6, 1, 4)]

    assert cuda.move(source, target, bits, whole)
    assert torch.equal(target, source.view(4, 6).T.flatten())
    assert not cuda.move(source, target, 3, whole)
    memory = torch.zeros(98, dtype=torch.uint8)
    assert not cuda.move(source.to(torch.uint8), memory[1:25], 8, whole)


def values(kind: str, N: int, K: int, bits: int, **changed: Any) -> CodeValues:
    """Codes with two groups of inputs, or of outputs."""
    make = torch.Generator().manual_seed(N + K)
    codes = torch.randint(2**bits, (N, K), generator=make, dtype=torch.int32)
    scales = torch.rand(N, 2, generator=make) + 0.5
    held: dict[str, Any] = {
        "scales": scales, "zeros": torch.randint(2**bits, (N, 2), generator=make).float(),
        "k_group": torch.arange(K) // (K // 2),
    }  # fmt: skip
    if kind == "act order":
        held["k_group"] = held["k_group"][torch.randperm(K, generator=make)]
    elif kind == "one scale":
        held = {"scales": scales[:1, :1], "zeros": None, "k_group": None, "factor": 0.25}
    elif kind == "rows by table":
        held |= {"scales": scales[:3], "zeros": held["zeros"][:3], "n_group": torch.arange(N) % 3}
    elif kind == "divided":
        held |= {"zeros": None, "divide": True, "factor": 3.0}
    elif kind == "looked up":
        held |= {"lookup": torch.randn(2**bits, generator=make)}
    return CodeValues(bits, codes, **{**held, **changed})


KINDS = ["groups", "act order", "one scale", "rows by table", "divided", "looked up"]


@pytest.mark.parametrize("kind", KINDS)
@DTYPES
@pytest.mark.parametrize(
    "name", ["gptq rows 4", "gptq rows 2", "awq 4", "gptq rows 8", "gptq columns 8", "marlin 4"]
)
@pytest.mark.parametrize("turned", [False, True], ids=["rows", "columns"])
def test_codes_in_words_are_dequantized(
    hand: HandOfDevices, kind: str, dtype: Any, name: str, turned: bool
) -> None:
    packing = NAMED[name]
    codes = values(kind, 64, 128, packing.bits)
    assert isinstance(codes.codes, Tensor)
    meaning, want = meaning_of(codes), torch.empty(64, 128, dtype=dtype)
    reference.dequantize(codes, want)
    assert meaning is not None
    words = packing.pack(codes.codes.T.contiguous() if turned else codes.codes)
    out = torch.full_like(want, 77)

    if packing.bits == 2 and kind == "looked up":
        return
    assert cuda.dequantize_words(CodesInWords(packing, words, turned), meaning, out)

    assert_same_bits(out, want)
    order = torch.randperm(128)
    if turned:
        shuffled = packing.pack(codes.codes.T[order].contiguous())
        held = CodesInWords(packing, shuffled, True, order.argsort())
        assert cuda.dequantize_words(held, meaning, out.zero_())
        assert_same_bits(out, want)
    else:
        assert not cuda.dequantize_words(CodesInWords(packing, words, order=torch.arange(64)), meaning, out)
    assert not cuda.dequantize_words(CodesInWords(packing, words, turned), meaning, out[:32])
    assert not cuda.dequantize_words(CodesInWords(packing, words, turned), meaning, out.double())


@pytest.mark.parametrize("kind", KINDS)
@DTYPES
@pytest.mark.parametrize("stored", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64], ids=str)
def test_codes_as_numbers_are_dequantized(kind: str, dtype: Any, stored: torch.dtype) -> None:
    codes = values(kind, 6, 16, 4)
    meaning, want = meaning_of(codes), torch.empty(6, 16, dtype=dtype)
    reference.dequantize(codes, want)
    out, lying = torch.full_like(want, 77), codes.codes.to(stored).T.contiguous().T  # type: ignore[union-attr]

    assert meaning is not None
    assert cuda.dequantize_numbers(lying, meaning, out)

    assert_same_bits(out, want)
    assert not cuda.dequantize_numbers(lying.float(), meaning, out)
    assert not cuda.dequantize_numbers(lying, meaning, out.double())
    assert not cuda.dequantize_numbers(lying, meaning, want.T.contiguous().T)


@pytest.mark.parametrize("high_first", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_codes_in_bytes_are_dequantized(kind: str, high_first: bool) -> None:
    codes = values(kind, 6, 16, 4)
    meaning, want = meaning_of(codes), torch.empty(6, 16)
    reference.dequantize(codes, want)
    first, second = codes.codes[:, ::2], codes.codes[:, 1::2]  # type: ignore[index]
    both = (first << 4 | second) if high_first else (second << 4 | first)
    out = torch.full_like(want, 77)

    assert meaning is not None
    assert cuda.dequantize_rows(both.to(torch.uint8), 4, meaning, high_first, out)
    assert_same_bits(out, want)
    assert cuda.dequantize_rows(codes.codes.to(torch.uint8), 8, meaning, high_first, out.zero_())  # type: ignore[union-attr]
    assert_same_bits(out, want)
    assert not cuda.dequantize_rows(both.to(torch.uint8), 2, meaning, high_first, out)
    assert not cuda.dequantize_rows(both.to(torch.uint8)[:5], 4, meaning, high_first, out)
    assert not cuda.dequantize_rows(both.to(torch.uint8)[:, :7], 4, meaning, high_first, out)
    assert not cuda.dequantize_rows(both.to(torch.uint8).T.contiguous().T, 4, meaning, high_first, out)


CODES, TABLE, BLOCKS = torch.zeros(64, dtype=torch.uint8), torch.zeros(16), torch.zeros(16)


@pytest.mark.parametrize(
    ("changed", "done"),
    [
        ({}, True),
        ({"blocksize": 16}, True),
        ({"blocksize": 4, "scales": torch.zeros(32)}, False),
        ({"blocksize": 12}, False),
        ({"codes": torch.zeros(65, dtype=torch.uint8)[1:]}, False),
        ({"codes": torch.zeros(63, dtype=torch.uint8)}, False),
        ({"table": torch.zeros(15)}, False),
        ({"table": torch.zeros(32)[::2]}, False),
        ({"scales": torch.zeros(15)}, False),
        ({"scales": torch.zeros(32)[::2]}, False),
    ],
)
def test_blocks_of_a_table_that_the_module_reads(changed: Any, done: bool) -> None:
    stored = StoredTable(**{"codes": CODES, "table": TABLE, "scales": BLOCKS, "blocksize": 8, **changed})

    assert cuda_stored.dequantize_stored(stored, torch.zeros(8, 16)) == done
    assert not cuda_stored.dequantize_stored(stored, torch.zeros(129)[1:].view(8, 16))
    assert not cuda_stored.dequantize_stored(stored, torch.zeros(8, 16), 8)


@pytest.mark.parametrize(
    ("chips", "ptx", "capability", "runs"),
    [
        (DEFAULT_CHIPS, "80 90", (8, 0), True),
        (DEFAULT_CHIPS, "80 90", (8, 7), True),  # code for 8.6 runs there
        (DEFAULT_CHIPS, "80 90", (9, 0), True),
        (DEFAULT_CHIPS, "80 90", (10, 3), True),  # code for 10.0
        (DEFAULT_CHIPS, "80 90", (11, 0), True),  # PTX of 9.0
        (DEFAULT_CHIPS, "80 90", (12, 1), True),
        (DEFAULT_CHIPS, "80 90", (13, 0), True),  # PTX of 9.0
        (DEFAULT_CHIPS, "80 90", (7, 5), False),
        ("90a", "", (9, 0), True),
        ("90a", "", (9, 1), False),
        ("90a", "90", (9, 1), True),
        ("90a", "", (10, 0), False),
        ("90a", "", (8, 0), False),
        ("90a 100", "100", (9, 0), True),
        ("100", "100", (9, 0), False),  # PTX of a newer chip
        ("86", "", (8, 0), False),
        ("80", "", (8, 9), True),
        ("80", "", (9, 0), False),
        ("80", "80", (9, 0), True),
        ("86 120", "86", (11, 0), True),  # PTX for a chip between them
    ],
)
def test_chips_that_a_module_runs_on(
    monkeypatch: pytest.MonkeyPatch, chips: str, ptx: str, capability: tuple[int, int], runs: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)

    for _ in range(2):
        assert cuda.runs_on(SimpleNamespace(chips=chips, ptx=ptx), torch.device("cuda")) == runs


def test_runs_of_bytes_are_copied_from_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[Any] = []
    module: Any = SimpleNamespace(copy=lambda runs, stream: copied.append((runs, stream)))
    memory, targets = torch.zeros(64, dtype=torch.uint8), [torch.zeros(2), torch.zeros(5)]
    onto: Any = SimpleNamespace(cuda_stream=STREAM)
    places = [slice(8, 16), slice(32, 52)]

    monkeypatch.setattr(cuda, "module", lambda: module)
    assert cuda.copy_from_host(memory, places, targets, onto)
    first, (one, other) = memory.data_ptr(), (each.data_ptr() for each in targets)
    assert copied == [([(one, first + 8, 8), (other, first + 32, 20)], STREAM)]
    monkeypatch.setattr(cuda, "module", lambda: None)
    assert not cuda.copy_from_host(memory, places, targets, onto)


class Reader:
    """A reader of files with one end for every ticket."""

    buffers = 2
    ended: Any = (-1, 0, "")

    def __init__(self, *arguments: Any) -> None:
        self.begun: list[Any] = [arguments]

    def begin(self, ranges: Any, home: int) -> int:
        self.begun.append((ranges, home))
        return 5

    def wait(self, ticket: int, stream: int) -> Any:
        self.begun.append((ticket, stream))
        return self.ended

    def close(self) -> None:
        self.begun.append("closed")


@pytest.mark.usefixtures("seen_texts")
def test_files_are_read_by_tickets(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    memory = torch.zeros(1, dtype=torch.uint8)
    asked: list[int] = []
    monkeypatch.setattr(cuda, "pinned", lambda nbytes: (asked.append(nbytes), memory)[1])
    reader = cuda.CudaFileReader(SimpleNamespace(FileReader=Reader), torch.device("cuda"))
    home: Any = SimpleNamespace(cuda_stream=9)

    assert asked == [2 * 8 * (4 << 20)]
    assert reader.begin([(3, 0, 8, 16, 1, 0)], home) == 5
    assert reader.wait(5)
    reader.close()
    assert reader._reader.begun == [
        (memory.data_ptr(), 4 << 20, 8), ([(3, 0, 8, 16, 1, 0)], 9), (5, STREAM), "closed",
    ]  # fmt: skip
    with caplog.at_level(logging.DEBUG, "qload"):
        for ended, message in (
            ((0, 0, ""), "range 0 of ticket 5 was not read: the file ended"),
            ((2, 13, ""), "range 2 of ticket 5 was not read: Permission denied"),
        ):
            monkeypatch.setattr(Reader, "ended", ended)
            assert not reader.wait(5)
            assert caplog.messages[-1] == message
    monkeypatch.setattr(Reader, "ended", (1, 0, "out of memory"))
    with pytest.raises(RuntimeError, match=r"^range 1 of ticket 5 could not be copied: out of memory$"):
        reader.wait(5)


def test_sparse_codes_start_at_the_first_output() -> None:
    packing = NAMED["compressed 4"]
    stored = StoredSparse(
        CodesInWords(packing, packing.pack(torch.zeros(8, 16, dtype=torch.int32))),
        lambda: torch.zeros(8, 2, dtype=torch.int16), torch.ones(8, 1), 32,
    )  # fmt: skip

    assert cuda_stored.dequantize_stored(stored, torch.empty(8, 32))
    assert not cuda_stored.dequantize_stored(stored, torch.empty(7, 32))
    assert not cuda_stored.dequantize_stored(stored, torch.empty(8, 32), 1)
