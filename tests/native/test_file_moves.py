"""Elements of a file, moved piece by piece: the bits that a move of the same bytes in memory gives."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from qload import native
from qload.devices import cpu, cpu_files
from qload.layouts import gptq, marlin, panels, strips
from qload.sentences import Digit
from qload.sentences.digits import axis_digits, in_common
from qload.testing import assert_same_bits
from tests.native.memory import few, guarded, isas, threads

pytestmark = pytest.mark.skipif(not hasattr(os, "pread"), reason="files are read at positions here")

TARGETS = {"marlin": marlin.rows, "strips": strips.rows, "panels": panels.rows}
BEFORE = 24  # bytes of a file that are not its elements


def moved(target: str, bits: int, K: int, N: int) -> tuple[Tensor, list[Digit]]:
    """Words of GPTQ, and where their codes belong in another order."""
    here, there = gptq.rows(bits), TARGETS[target](bits)
    digits = in_common(axis_digits(here.codes, (K, N)), axis_digits(there.codes, (K, N)))
    assert digits is not None
    return torch.randint(-(2**31), 2**31, (K * bits // 32, N), dtype=torch.int32), list(digits)


@contextmanager
def opened(path: Path, words: Tensor, short: int = 0) -> Iterator[tuple[int, int, int]]:
    """A file of words behind other bytes, without its last ones, as (descriptor, begin, bytes)."""
    held = bytes(BEFORE) + words.numpy().tobytes()
    path.write_bytes(held[: len(held) - short])
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor, BEFORE, words.nbytes
    finally:
        os.close(descriptor)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("moves") / "words"


def in_memory(words: Tensor, bits: int, digits: list[Digit]) -> Tensor:
    out = torch.empty_like(words)
    assert cpu.move(words, out, bits, digits)
    return out


@few
@given(
    target=st.sampled_from(sorted(TARGETS)),
    bits=st.sampled_from([4, 8]),
    groups=st.integers(1, 9),
    columns=st.integers(1, 5),
    piece=st.sampled_from([1 << 13, 3 << 13, 100_000, 2 << 20]),
    count=threads,
)
def test_what_is_done_is_what_a_move_in_memory_does(
    path: Path, target: str, bits: int, groups: int, columns: int, piece: int, count: int
) -> None:
    words, digits = moved(target, bits, 128 * groups, 64 * columns)
    want = in_memory(words, bits, digits)
    for isa in isas():
        with (
            pytest.MonkeyPatch.context() as patch,
            native.using(isa, count),
            opened(path, words) as source,
            guarded(words.shape, torch.int32, 1) as out,
        ):
            patch.setattr(cpu_files, "PIECE", piece)
            if cpu_files.move_from_file(source, out, bits, digits):
                assert_same_bits(out, want)


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("steps", [1, 3, 7, 1000])
@pytest.mark.parametrize("target", sorted(TARGETS))
def test_pieces_of_some_steps_and_a_last_one_that_is_short(
    path: Path, target: str, steps: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, digits = moved(target, 4, 1024, 512)
    want = in_memory(words, 4, digits)
    monkeypatch.setattr(cpu_files, "PIECE", steps * 64 * 512 // 2)  # as many bytes as 64 rows have
    for isa in isas():
        out = torch.zeros_like(words)
        with native.using(isa, count), opened(path, words) as source:
            assert cpu_files.move_from_file(source, out, 4, digits)

        assert_same_bits(out, want)


def test_a_step_that_no_piece_holds_is_not_made(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words, digits = moved("marlin", 4, 256, 512)
    monkeypatch.setattr(cpu_files, "PIECE", 2 * 4 * 512 - 1)  # of two rows of words the bytes, but for one
    with native.using(threads=1), opened(path, words) as source:
        assert not cpu_files.move_from_file(source, torch.empty_like(words), 4, digits)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(("target", "N"), [("marlin", 8192), ("panels", 8192), ("panels", 40960)])
def test_large_codes_go_past_the_caches(path: Path, target: str, N: int, count: int) -> None:
    """A piece of several steps, of one, and a step that is larger than a piece mostly is."""
    words, digits = moved(target, 4, 1024 * 8192 // N // 64 * 64, N)
    assert words.nbytes > 1 << 21
    want = in_memory(words, 4, digits)
    for isa in isas():
        out = torch.zeros_like(words)
        with native.using(isa, count), opened(path, words) as source:
            assert cpu_files.move_from_file(source, out, 4, digits)

        assert_same_bits(out, want)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("short", [1, 4096])
def test_a_file_that_ends_early_is_told(path: Path, short: int, count: int) -> None:
    words, digits = moved("marlin", 4, 256, 512)
    with native.using(threads=count), opened(path, words, short) as source:
        assert not cpu_files.move_from_file(source, torch.empty_like(words), 4, digits)


@pytest.mark.parametrize("wrong", [-4, 4])
def test_bytes_that_are_not_those_of_the_digits_are_not_moved(path: Path, wrong: int) -> None:
    words, digits = moved("marlin", 4, 256, 512)
    with opened(path, words) as (descriptor, begin, nbytes):
        source = descriptor, begin, nbytes + wrong
        assert not cpu_files.move_from_file(source, torch.empty_like(words), 4, digits)


def cases() -> Iterator[Any]:
    yield pytest.param(8, [Digit(96, 1, 3), Digit(3, 96, 1)], id="no powers of two")
    yield pytest.param(8, [Digit(64, 2, 1), Digit(2, 1, 64)], id="one tile")
    yield pytest.param(32, [Digit(1 << 10, 1 << 10, 1), Digit(1 << 10, 1, 1 << 10)], id="steps that overlap")


@pytest.mark.parametrize(("bits", "digits"), list(cases()))
def test_what_has_no_steps_is_left_or_right(path: Path, bits: int, digits: list[Digit]) -> None:
    """Moves that are no row of equal steps are not made piece by piece, or are made right."""
    total = torch.Size([digit.size for digit in digits]).numel()
    words = torch.randint(-(2**31), 2**31, (total * bits // 32,), dtype=torch.int32)
    for isa in isas():
        out = torch.zeros_like(words)
        with native.using(isa, 2), opened(path, words) as source:
            done = cpu_files.move_from_file(source, out, bits, digits)

        if done:
            assert_same_bits(out, in_memory(words, bits, digits))


def test_without_the_module_nothing_is_moved(path: Path) -> None:
    words, digits = moved("marlin", 4, 256, 512)
    with native.reference(), opened(path, words) as source:
        assert not cpu_files.move_from_file(source, torch.empty_like(words), 4, digits)
