"""Codes and scales that threads move from their file to where they belong before it is their layer's turn."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qload import native
from qload.errors import StorageError
from qload.kernel_formats import alike
from qload.repacking import late_tensors
from qload.sentences import Digit
from qload.weights import Weights, in_file, stream
from tests.repacking.test_alike import assert_same, drawn
from tests.repacking.test_late_tensors import has_native, late_bytes, opened, saved

Move = Callable[[], bool]


@pytest.fixture(autouse=True)
def small_codes_are_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late_tensors, "LEAST", 1)


def moves(monkeypatch: pytest.MonkeyPatch, around: Callable[[Move, bool], bool]) -> None:
    """Each move from a file goes through `around`, which is told whether a thread of its own makes it."""
    inner = in_file.devices.move_from_file

    def told(*asked: Any) -> bool:
        return around(lambda: inner(*asked), threading.current_thread() is not threading.main_thread())

    monkeypatch.setattr(in_file.devices, "move_from_file", told)


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

    def cut(move: Move, apart: bool) -> bool:
        assert apart == before
        with file.open("r+b") as opened_again:
            opened_again.truncate(file.stat().st_size // 2)
        return move()

    moves(monkeypatch, cut)
    with opened(file) as weights, pytest.raises(StorageError, match="had"):
        load_all(weights, before)


@has_native
@pytest.mark.parametrize("before", [False, True], ids=["in its turn", "before its turn"])
def test_a_file_that_is_written_to_while_it_is_moved_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: bool
) -> None:
    """Of as many bytes as before, so that every read succeeds."""
    file = saved(tmp_path, {name: drawn() for name in "abc"})

    def write(move: Move, apart: bool) -> bool:
        done = move()
        assert apart == before
        file.write_bytes(file.read_bytes()[:-1] + b"\0")
        return done

    moves(monkeypatch, write)
    with opened(file) as weights, pytest.raises(StorageError):
        load_all(weights, before)


@has_native
def test_where_a_layer_has_shown_the_way_threads_move_the_next_ones_before_their_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each on a thread alone, with the settings of who loads, who leaves them the other threads."""
    made: list[tuple[bool, str, int]] = []

    def seen(move: Move, apart: bool) -> bool:
        made.append((apart, native.isa(), native.threads()))
        return move()

    here: list[int] = []
    inner = alike.AlikeLayers.repack

    def told(*asked: Any) -> Any:
        here.append(native.threads())
        return inner(*asked)

    moves(monkeypatch, seen)
    monkeypatch.setattr(alike.AlikeLayers, "repack", told)
    names = "abcdef"
    with (
        opened(saved(tmp_path, {name: drawn() for name in names})) as weights,
        native.using("scalar", threads=3),
    ):
        assert [name for name, _ in weights.stream(list(names))] == list(names)

    assert made == 5 * 2 * [(True, "scalar", 1)]  # codes and scales of the layers b to f
    assert here == [3, 1, 1, 1, 1, 1]


@has_native
@pytest.mark.parametrize("wrong", alike.MOVED)
def test_a_layer_that_was_expected_to_go_elsewhere_is_moved_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    file = saved(tmp_path, {name: drawn() for name in "abcd"})
    inner = late_tensors.ExpectedLayers.moves
    expected: list[str] = []

    def elsewhere(self: late_tensors.ExpectedLayers, kind: Any) -> Mapping[str, alike.Move] | None:
        right = inner(self, kind)
        if right is None:
            return None
        expected.append(wrong)
        digits = tuple(Digit(d.size, d.source, d.source) for d in right[wrong].digits)
        return {**right, wrong: replace(right[wrong], digits=digits)}

    monkeypatch.setattr(late_tensors.ExpectedLayers, "moves", elsewhere)
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
    apart: list[bool] = []

    def seen(move: Move, alone: bool) -> bool:
        apart.append(alone)
        return move()

    moves(monkeypatch, seen)
    monkeypatch.setattr(stream, "WINDOW", 3 * late_bytes())
    file = saved(tmp_path, layers)
    with opened(file) as one, opened(file) as other:
        for name, weight in one.stream(list(layers)):
            assert_same(weight, other.get_weights(name))

    assert sum(apart) == 3 * 2  # codes and scales of the layers b, c and d
