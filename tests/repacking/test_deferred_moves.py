"""Codes and scales that threads move from their file to where they belong before it is their layer's turn."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from qload import native
from qload.devices import CpuFileMover, FileMove
from qload.errors import StorageError
from qload.kernel_formats import repack_cache
from qload.repacking import loaders
from qload.sentences import Digit
from qload.weights import Weights, prefetch, stream
from tests.repacking.test_alike import assert_same, drawn
from tests.repacking.test_deferred_reads import has_native, late_bytes, opened, saved

pytestmark = pytest.mark.usefixtures("seen_texts")


@pytest.fixture(autouse=True)
def small_codes_are_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaders, "MIN_CODE_BYTES", 1)


def around_moves(
    monkeypatch: pytest.MonkeyPatch,
    before: Callable[[], None] = lambda: None,
    after: Callable[[], None] = lambda: None,
) -> None:
    """What happens before each move from a file is made, in its turn or by other threads, and after it."""
    here, begin, wait = prefetch.devices.move_from_file, CpuFileMover.begin, CpuFileMover.wait
    moving: set[int] = set()  # tickets of moves, not of reads

    def in_turn(*asked: Any) -> bool:
        before()
        done = here(*asked)
        after()
        return done

    def begun(self: CpuFileMover, moves: Sequence[FileMove]) -> int:
        moved = any(move.digits for move in moves)
        if moved:
            before()
        ticket = begin(self, moves)
        moving.update([ticket] if moved else [])
        return ticket

    def waited(self: CpuFileMover, ticket: int) -> list[bool]:
        made = wait(self, ticket)
        if ticket in moving:
            after()
        return made

    monkeypatch.setattr(prefetch.devices, "move_from_file", in_turn)
    monkeypatch.setattr(CpuFileMover, "begin", begun)
    monkeypatch.setattr(CpuFileMover, "wait", waited)


def load_all(weights: Weights, before: bool) -> None:
    """By threads before it is a layer's turn, or one by one."""
    for _ in weights.stream(list("abc")) if before else map(weights.get_weights, "abc"):
        pass


@has_native
@pytest.mark.parametrize("before", [False, True], ids=["in its turn", "before its turn"])
def test_a_file_that_is_cut_while_it_is_moved_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: bool
) -> None:
    """Between the look at the file and the read; what was moved until then is nobody's."""
    file = saved(tmp_path, {name: drawn() for name in "abc"})
    cuts: list[int] = []

    def cut() -> None:
        cuts.append(file.stat().st_size // 2)
        with file.open("r+b") as opened_again:
            opened_again.truncate(cuts[0])

    around_moves(monkeypatch, before=cut)
    with opened(file) as weights, pytest.raises(StorageError, match="had"):
        load_all(weights, before)

    assert cuts


@has_native
@pytest.mark.parametrize("before", [False, True], ids=["in its turn", "before its turn"])
def test_a_file_that_is_written_to_while_it_is_moved_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: bool
) -> None:
    """Of as many bytes as before, so that every read succeeds."""
    file = saved(tmp_path, {name: drawn() for name in "abc"})
    writes: list[int] = []

    def write() -> None:
        writes.append(file.write_bytes(file.read_bytes()[:-1] + b"\0"))

    around_moves(monkeypatch, after=write)
    with opened(file) as weights, pytest.raises(StorageError):
        load_all(weights, before)

    assert writes


@has_native
def test_where_a_layer_has_shown_the_way_threads_move_the_next_ones_before_their_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the instruction set and the number of threads of who loads, who leaves them the cores meanwhile."""
    made: list[tuple[str, int, int]] = []
    here: list[int] = []
    module, inner = native.load("cpu").found, repack_cache.RepackCache.repack
    assert module is not None

    class Told(module.FileMover):  # type: ignore[misc,name-defined]
        def __init__(self, isa: str, scratch: int, piece: int, threads: int) -> None:
            super().__init__(isa, scratch, piece, threads)
            self.how = isa, threads

        def begin(self, moves: Any) -> int:
            by_digits = sum(bool(digits) for _, digits, _, _ in moves)
            made.extend([(*self.how, by_digits)] if by_digits else [])
            ticket: int = super().begin(moves)
            return ticket

    def told(*asked: Any) -> Any:
        here.append(native.threads())
        return inner(*asked)

    monkeypatch.setattr(module, "FileMover", Told)
    monkeypatch.setattr(repack_cache.RepackCache, "repack", told)
    names = "abcdef"
    with (
        opened(saved(tmp_path, {name: drawn() for name in names})) as weights,
        native.using("scalar", threads=3),
    ):
        assert [name for name, _ in weights.stream(list(names))] == list(names)

    assert made == 5 * [("scalar", 3, 2)]  # codes and scales of the layers b to f
    assert here == 6 * [1]


@has_native
@pytest.mark.parametrize("wrong", repack_cache.MOVED_TENSORS)
def test_a_layer_that_was_expected_to_go_elsewhere_is_moved_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    file = saved(tmp_path, {name: drawn() for name in "abcd"})
    inner = loaders.DeferredKinds.moves
    expected: list[str] = []

    def elsewhere(self: loaders.DeferredKinds, kind: Any) -> Mapping[str, repack_cache.Move] | None:
        right = inner(self, kind)
        if right is None:
            return None
        expected.append(wrong)
        digits = tuple(Digit(d.size, d.source, d.source) for d in right[wrong].digits)
        return {**right, wrong: replace(right[wrong], digits=digits)}

    monkeypatch.setattr(loaders.DeferredKinds, "moves", elsewhere)
    with opened(file) as one, opened(file) as other:
        for name, weight in one.stream(list("abcd")):
            assert_same(weight, other.get_weights(name))

    assert len(expected) == 3


@has_native
def test_nothing_is_begun_for_layers_that_one_before_them_was_not_like(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that were begun before it was known are moved for nothing, and loaded whole."""
    odd_one = {**drawn(), "qzeros": drawn()["qzeros"] - 1}
    layers = {name: odd_one if name == "c" else drawn() for name in "abcdefgh"}
    begun: dict[int, int] = {}  # tensors that are moved, by tickets that nobody has waited for
    most, begin, wait = list[int](), CpuFileMover.begin, CpuFileMover.wait

    def begins(self: CpuFileMover, moves: Sequence[FileMove]) -> int:
        ticket = begin(self, moves)
        begun[ticket] = sum(bool(move.digits) for move in moves)
        most.append(begun[ticket])
        return ticket

    def waits(self: CpuFileMover, ticket: int) -> list[bool]:
        del begun[ticket]
        return wait(self, ticket)

    monkeypatch.setattr(CpuFileMover, "begin", begins)
    monkeypatch.setattr(CpuFileMover, "wait", waits)
    monkeypatch.setattr(stream, "WINDOW_BYTES", 3 * late_bytes())
    file = saved(tmp_path, layers)
    with opened(file) as one, opened(file) as other:
        for name, weight in one.stream(list(layers)):
            assert_same(weight, other.get_weights(name))
            assert name < "d" or not any(begun.values())  # nobody writes any more for c, in vain

    assert [tensors for tensors in most if tensors] == [2, 2, 2]  # codes and scales of the layers b, c and d


@has_native
@pytest.mark.parametrize(
    ("target", "groups"),
    [
        *product(["marlin", "panels", "strips"], [4, 8, 12, 16, 20]),
        *product(["panels"], [1, 2, 3, 5, 6, 7, 9, 28]),
    ],
)
def test_scales_of_any_number_of_groups_go_straight(
    tmp_path: Path, target: str, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[bool] = []
    inner = loaders.DeferredTensors.load

    def told(*asked: Any) -> Any:
        made = inner(*asked)
        tried.append(made is not None)
        return made

    monkeypatch.setattr(loaders.DeferredTensors, "load", told)
    file = saved(tmp_path, {name: drawn(K=32 * groups, N=512) for name in "abc"})
    with opened(file, target) as one, opened(file, target) as other:
        streamed = list(one.stream(list("abc")))
        went = list(tried)
        for name, weight in streamed:
            assert_same(weight, other.get_weights(name))

    assert went == [True, True]
