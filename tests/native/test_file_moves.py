"""Elements of a file, moved piece by piece: the bits that a move of the same bytes in memory gives."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from qload import native
from qload.devices import CpuFileMover, FileMove, cpu, file_mover
from qload.layouts import gptq, marlin, panels, strips
from qload.sentences import Digit
from qload.sentences.strided_digits import axis_digits, in_common
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
            patch.setattr(cpu, "PIECE", piece)
            if cpu.move_from_file(source, out, bits, digits):
                assert_same_bits(out, want)


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("steps", [1, 3, 7, 1000])
@pytest.mark.parametrize("target", sorted(TARGETS))
def test_pieces_of_some_steps_and_a_last_one_that_is_short(
    path: Path, target: str, steps: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, digits = moved(target, 4, 1024, 512)
    want = in_memory(words, 4, digits)
    monkeypatch.setattr(cpu, "PIECE", steps * 64 * 512 // 2)  # as many bytes as 64 rows have
    for isa in isas():
        out = torch.zeros_like(words)
        with native.using(isa, count), opened(path, words) as source:
            assert cpu.move_from_file(source, out, 4, digits)

        assert_same_bits(out, want)


def test_a_step_that_no_piece_holds_is_not_made(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words, digits = moved("marlin", 4, 256, 512)
    monkeypatch.setattr(cpu, "PIECE", 2 * 4 * 512 - 1)  # of two rows of words the bytes, but for one
    with native.using(threads=1), opened(path, words) as source:
        assert not cpu.move_from_file(source, torch.empty_like(words), 4, digits)


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
            assert cpu.move_from_file(source, out, 4, digits)

        assert_same_bits(out, want)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("short", [1, 4096])
def test_a_file_that_ends_early_is_told(path: Path, short: int, count: int) -> None:
    words, digits = moved("marlin", 4, 256, 512)
    with native.using(threads=count), opened(path, words, short) as source:
        assert not cpu.move_from_file(source, torch.empty_like(words), 4, digits)


@pytest.mark.parametrize("wrong", [-4, 4])
def test_bytes_that_are_not_those_of_the_digits_are_not_moved(path: Path, wrong: int) -> None:
    words, digits = moved("marlin", 4, 256, 512)
    with opened(path, words) as (descriptor, begin, nbytes):
        source = descriptor, begin, nbytes + wrong
        assert not cpu.move_from_file(source, torch.empty_like(words), 4, digits)


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
            done = cpu.move_from_file(source, out, bits, digits)

        if done:
            assert_same_bits(out, in_memory(words, bits, digits))


def test_without_the_module_nothing_is_moved(path: Path) -> None:
    words, digits = moved("marlin", 4, 256, 512)
    with native.reference(), opened(path, words) as source:
        assert not cpu.move_from_file(source, torch.empty_like(words), 4, digits)


@few
@given(
    sizes=st.lists(st.tuples(st.sampled_from(["plain", *sorted(TARGETS)]), st.integers(1, 9)), max_size=6),
    tickets=st.integers(1, 4),
    count=threads,
)
def test_threads_of_their_own_move_and_read_what_one_call_does(
    path: Path, sizes: list[tuple[str, int]], tickets: int, count: int
) -> None:
    """Several tickets at once, each of several moves, targets between bytes that stay as they are."""
    for isa in isas():
        with native.using(isa, count), ExitStack() as stack:
            mover = file_mover(count)
            assert mover is not None
            stack.callback(mover.close)
            begun: list[tuple[int, list[Tensor], list[Tensor]]] = []
            for ticket in range(tickets):
                asked, outs, wants = list[FileMove](), list[Tensor](), list[Tensor]()
                for turn, (target, groups) in enumerate(sizes):
                    words, digits = moved("marlin" if target == "plain" else target, 4, 128 * groups, 64)
                    source = stack.enter_context(opened(path.with_name(f"{ticket}-{turn}"), words))
                    out = stack.enter_context(guarded(words.shape, torch.int32, 1))
                    asked.append(FileMove(source, out, 4, [] if target == "plain" else digits))
                    outs.append(out)
                    wants.append(words if target == "plain" else in_memory(words, 4, digits))
                begun.append((mover.begin(asked), outs, wants))
            for ticket, outs, wants in reversed(begun):
                assert mover.wait(ticket) == [True] * len(sizes)
                for out, want in zip(outs, wants, strict=True):
                    assert_same_bits(out, want)


@pytest.mark.parametrize("count", [1, 4])
def test_bytes_that_are_more_than_a_piece_are_read_by_all_threads(path: Path, count: int) -> None:
    words = torch.randint(-(2**31), 2**31, (3 * cpu.PIECE // 4 + 5,), dtype=torch.int32)
    out = torch.zeros_like(words)
    with opened(path, words) as source:
        mover = made(count)
        assert mover.wait(mover.begin([FileMove(source, out, 8, [])])) == [True]
        mover.close()

    assert_same_bits(out, words)


def made(count: int) -> CpuFileMover:
    mover = file_mover(count)
    assert mover is not None
    return mover


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("count", [1, 3])
def test_of_several_moves_that_which_failed_is_told(path: Path, count: int, plain: bool) -> None:
    """A file that ends early, one that is none, bytes that are not those of the digits; others are made."""
    words, digits = moved("marlin", 4, 256, 512)
    steps = [] if plain else digits
    mover = made(count)
    with (
        opened(path, words) as whole,
        opened(path.with_name("short"), words, 4) as (short, begin, nbytes),
    ):
        outs = [torch.empty_like(words) for _ in range(5)]
        sources = [whole, (short, begin, nbytes), (-7, begin, nbytes), whole]
        asked = [FileMove(source, out, 4, steps) for source, out in zip(sources, outs, strict=False)]
        other = FileMove((whole[0], whole[1], whole[2] - 4), outs[4], 4, digits)
        assert mover.wait(mover.begin([*asked, other])) == [True, False, False, True, False]
        mover.close()

    for out in (outs[0], outs[3]):
        assert_same_bits(out, words if plain else in_memory(words, 4, digits))


def test_a_ticket_is_waited_for_once(path: Path) -> None:
    """Until then its targets are kept, whoever else lets go of them."""
    words, digits = moved("marlin", 4, 256, 512)
    mover = made(2)
    with opened(path, words) as source:
        ticket = mover.begin([FileMove(source, torch.empty_like(words), 4, digits)])
        assert len(mover._targets[ticket]) == 1
        assert mover.wait(ticket) == [True]
        assert not mover._targets
        for unknown in (ticket, ticket + 1):
            assert mover.wait(unknown) == []
            with pytest.raises(ValueError, match="waited for"):
                mover._mover.wait(unknown)
        mover.close()


def test_what_was_closed_moves_nothing_more(path: Path) -> None:
    """What no thread had taken is told as not made, and nobody writes to a target any more."""
    words, digits = moved("marlin", 4, 1024, 4096)
    mover, outs = made(1), 5 * [torch.zeros_like(words) for _ in range(40)]
    with opened(path, words) as source:
        tickets = [mover.begin([FileMove(source, out, 4, digits)]) for out in outs]
        mover.close()
        told = [mover._mover.wait(ticket) for ticket in tickets]
        late = mover._mover.begin([(4, list(digits), source, outs[0].data_ptr())])
        assert mover._mover.wait(late) == [False]
        mover.close()

    want = in_memory(words, 4, digits)
    assert [False] in told
    for made_it, out in zip(told, outs, strict=True):
        if made_it == [True]:
            assert_same_bits(out, want)


def test_without_the_module_or_with_tensors_that_are_no_memory_there_are_no_such_threads() -> None:
    with native.reference():
        assert file_mover(2) is None
    with FakeTensorMode():
        assert file_mover(2) is None
