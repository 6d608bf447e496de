"""Codes that threads move from their file to where they belong before it is their layer's turn."""

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qload import native
from qload.errors import StorageError
from qload.kernel_formats import alike
from qload.repacking import late_codes
from qload.sentences import Digit
from qload.weights import in_file, stream
from tests.repacking.test_alike import assert_same, drawn
from tests.repacking.test_late_codes import has_native, opened, saved

Move = Callable[[], bool]


@pytest.fixture(autouse=True)
def small_codes_are_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late_codes, "LEAST", 1)


def moves(monkeypatch: pytest.MonkeyPatch, around: Callable[[Move, bool], bool]) -> None:
    """Each move from a file goes through `around`, which is told whether a thread of its own makes it."""
    inner = in_file.devices.move_from_file

    def told(*asked: Any) -> bool:
        return around(lambda: inner(*asked), threading.current_thread() is not threading.main_thread())

    monkeypatch.setattr(in_file.devices, "move_from_file", told)


@has_native
@pytest.mark.parametrize("before", [False, True], ids=["in its turn", "before its turn"])
def test_a_file_that_is_cut_while_it_is_moved_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: bool
) -> None:
    """Between the look at the file and the read; what was moved until then is nobody's."""
    file = saved(tmp_path, {name: drawn() for name in "abc"})

    def cut(move: Move, apart: bool) -> bool:
        if before and not apart:
            return move()
        with file.open("r+b") as opened_again:
            opened_again.truncate(file.stat().st_size // 2)
        return move()

    moves(monkeypatch, cut)
    with opened(file) as weights, pytest.raises(StorageError, match="had"):
        list(weights.stream(list("abc")))


@has_native
@pytest.mark.parametrize("before", [False, True], ids=["in its turn", "before its turn"])
def test_a_file_that_is_written_to_while_it_is_moved_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: bool
) -> None:
    """Of as many bytes as before, so that every read succeeds."""
    file = saved(tmp_path, {name: drawn() for name in "abc"})

    def write(move: Move, apart: bool) -> bool:
        done = move()
        if apart or not before:
            file.write_bytes(file.read_bytes()[:-1] + b"\0")
        return done

    moves(monkeypatch, write)
    with opened(file) as weights, pytest.raises(StorageError):
        list(weights.stream(list("abc")))


@has_native
def test_where_a_layer_has_shown_the_way_threads_move_the_next_ones_before_their_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each on a thread alone, with the settings of who loads, who leaves them the other threads."""
    made: list[tuple[bool, str, int]] = []

    def seen(move: Move, apart: bool) -> bool:
        made.append((apart, native.isa(), native.threads()))
        return move()

    scales: list[int] = []
    move_digits = alike.devices.move_digits

    def told(*asked: Any) -> bool:
        scales.append(native.threads())
        return move_digits(*asked)

    moves(monkeypatch, seen)
    monkeypatch.setattr(alike.devices, "move_digits", told)
    names = "abcdef"
    with (
        opened(saved(tmp_path, {name: drawn() for name in names})) as weights,
        native.using("scalar", threads=3),
    ):
        stream = weights.stream(list(names))
        firsts = [next(stream) for _ in "ab"]
        rest = list(stream)

    assert [name for name, _ in (*firsts, *rest)] == list(names)
    assert made == [(False, "scalar", 3)] + 4 * [(True, "scalar", 1)]
    assert scales[-5:] == [3, 1, 1, 1, 1]  # of the layers b to f


@has_native
def test_a_layer_that_was_expected_to_go_elsewhere_is_moved_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = saved(tmp_path, {name: drawn() for name in "abcd"})
    inner = late_codes.ExpectedLayers.move
    expected: list[alike.Move] = []

    def elsewhere(self: late_codes.ExpectedLayers, kind: Any) -> alike.Move | None:
        right = inner(self, kind)
        if right is None:
            return None
        expected.append(replace(right, digits=tuple(Digit(d.size, d.source, d.source) for d in right.digits)))
        return expected[-1]

    monkeypatch.setattr(late_codes.ExpectedLayers, "move", elsewhere)
    with opened(file) as one, opened(file) as other:
        for name, weight in one.stream(list("abcd")):
            assert_same(weight, other.get_weights(name))

    assert len(expected) == 2


@has_native
def test_nothing_is_begun_for_layers_that_one_before_them_was_not_like(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that were begun before it was known are moved for nothing, and loaded whole."""
    odd_one = {**drawn(), "qzeros": drawn()["qzeros"] - 1}
    layers = {name: odd_one if name == "c" else drawn() for name in "abcdefgh"}
    apart: list[bool] = []

    def seen(move: Move, alone: bool) -> bool:
        apart.append(alone)
        return move()

    moves(monkeypatch, seen)
    monkeypatch.setattr(stream, "WINDOW", 3 * drawn()["qweight"].nbytes)
    file = saved(tmp_path, layers)
    with opened(file) as one, opened(file) as other:
        for name, weight in one.stream(list(layers)):
            assert_same(weight, other.get_weights(name))

    assert sum(apart) == 2
