"""Errors from rank to rank: qload's whole, others in words, and nothing that makes anything else."""

import pickle
from pathlib import Path

import pytest

from qload.errors import ArgumentError, CutError, LostRankError, QloadError
from qload.parallel.told import MOST, heard, told


@pytest.mark.parametrize(
    "error",
    [ArgumentError("x", "one", "another"), CutError("a.weight", "N", 12, 5, 4, "as", 2, (2, 3))],
    ids=["argument", "cut"],
)
def test_an_error_of_qload_comes_through_whole(error: QloadError) -> None:
    again = heard(told(error, 1, 2), 1, 2)

    assert type(again) is type(error)
    assert str(again) == str(error)


def test_other_errors_are_told_in_words() -> None:
    again = heard(told(ZeroDivisionError("of nothing"), 1, 4), 1, 4)

    assert str(again) == "rank 1 of 4 is lost\n  reason   it ended with ZeroDivisionError: of nothing"


def test_a_long_error_is_cut() -> None:
    said = told(ArgumentError("x", "y", "z" * MOST), 0, 2)

    assert len(said) <= MOST
    assert isinstance(heard(said, 0, 2), LostRankError)


class _Opens:
    def __reduce__(self) -> tuple[object, ...]:
        return Path, (".",)


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"no pickle",
        pickle.dumps(_Opens()),
        pickle.dumps(ValueError("x")),
        pickle.dumps([ArgumentError("x", "y", "z")]),
        pickle.dumps(QloadError),
        b"cqload.errors.checked\ncheck_call\n.",
    ],
)
def test_what_is_no_error_of_qload_is_a_lost_rank(said: bytes) -> None:
    again = heard(said, 3, 4)

    assert str(again) == "rank 3 of 4 is lost\n  reason   what it said is no error of qload"
