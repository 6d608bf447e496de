"""Errors from rank to rank: qload's whole, others in words, and nothing that makes anything else."""

import pickle
from pathlib import Path

import pytest

from qload.errors import ArgumentError, CutError, LostRankError, QloadError
from qload.errors.argument_checks import AcceptedValues
from qload.parallel.launcher import MAX_ERROR_BYTES, deserialize_error, serialize_error


@pytest.mark.parametrize(
    "error",
    [ArgumentError("x", "one", "another"), CutError("a.weight", "N", 12, 5, 4, "as", 2, (2, 3))],
    ids=["argument", "cut"],
)
def test_an_error_of_qload_comes_through_whole(error: QloadError) -> None:
    again = deserialize_error(serialize_error(error, 1, 2), 1, 2)

    assert type(again) is type(error)
    assert str(again) == str(error)


def test_other_errors_are_told_in_words() -> None:
    again = deserialize_error(serialize_error(ZeroDivisionError("of nothing"), 1, 4), 1, 4)

    assert str(again) == "rank 1 of 4 is lost\n  reason   it ended with ZeroDivisionError: of nothing"


def test_a_long_error_is_cut() -> None:
    said = serialize_error(ArgumentError("x", "y", "z" * MAX_ERROR_BYTES), 0, 2)

    assert len(said) <= MAX_ERROR_BYTES
    assert isinstance(deserialize_error(said, 0, 2), LostRankError)


class _Opens:
    def __reduce__(self) -> tuple[object, ...]:
        return Path, (".",)


class _HoldsAnother:
    """Pickled as an error of qload with an argument of another class of the same package."""

    def __reduce__(self) -> tuple[object, ...]:
        return ArgumentError, ("x", "y", AcceptedValues(*AcceptedValues._fields))


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"no pickle",
        pickle.dumps(_Opens()),
        pickle.dumps(_HoldsAnother()),
        pickle.dumps(ValueError("x")),
        pickle.dumps([ArgumentError("x", "y", "z")]),
        pickle.dumps(QloadError),
        b"cqload.errors.argument_checks\ncheck_call\n.",
    ],
)
def test_what_is_no_error_of_qload_is_a_lost_rank(said: bytes) -> None:
    again = deserialize_error(said, 3, 4)

    assert str(again) == "rank 3 of 4 is lost\n  reason   its message is not an error of qload"
