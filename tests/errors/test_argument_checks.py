"""Which values a type admits, and how a refusal says what it got."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import make_dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import pytest
import torch

from qload.errors import ArgumentError, check_fields, check_type, checked


@runtime_checkable
class Sized(Protocol):
    """Asked for by its method."""

    def size(self) -> int:
        """A number."""


class Unasked(Protocol):
    """No runtime protocol."""


class Three:
    def size(self) -> int:
        return 3


@pytest.mark.parametrize(
    ("value", "hint", "admitted"),
    [
        (3, int, True),
        (np.int64(3), int, True),
        (True, int, False),
        (3.0, int, False),
        (3, float, True),
        (True, float, False),
        (None, int | None, True),
        ("3", int | None, False),
        ("a", Literal["a", "b"], True),
        ("c", Literal["a", "b"], False),
        (1, Literal[True], False),
        ([1], Sequence[int], True),
        (["1"], Sequence[int], False),
        ("ab", Sequence[str], False),
        ("ab", Iterable[str], False),
        ((n for n in "ab"), Iterable[int], True),  # not looked into, which would use it up
        ((1,), tuple[int], True),
        ((1, 2), tuple[int], False),
        ((1, 2), tuple[int, int], True),
        ((1, 2, 3), tuple[int, int], False),
        ((1, 2, 3), tuple[int, ...], True),
        ([1, 2], tuple[int, int], False),
        ({"a": 1}, Mapping[str, int], True),
        ({1: 1}, Mapping[str, int], False),
        ({"a": "1"}, Mapping[str, int], False),
        (bool, type[int], True),
        (str, type[int], False),
        (print, Callable[[], None], True),
        (3, Callable[[], None], False),
        (Three(), Sized, True),
        (3, Sized, False),
        (3, Unasked, True),
        (object(), Any, True),
    ],
)
def test_a_type_admits_what_is_of_it(value: Any, hint: Any, admitted: bool) -> None:
    if admitted:
        check_type("it", value, hint)
        return
    with pytest.raises(ArgumentError, match="it"):
        check_type("it", value, hint)


def test_a_field_with_a_name_for_type_checkers_alone_is_not_checked() -> None:
    base = make_dataclass("Base", [("number", "int")])
    record = make_dataclass("Record", [("other", "OnlyForTypeCheckers")], bases=(base,))

    check_fields(record(1, object()))
    with pytest.raises(ArgumentError, match=r"^number\n"):
        check_fields(record("1", object()))


@checked
def asked(a: int, *more: int, named: str = "", **sizes: int) -> int:
    """Of every kind of parameter one."""
    return a


@pytest.mark.parametrize(
    ("arguments", "named", "wrong"),
    [
        (("1",), {}, "a"),
        ((1, 2, "3"), {}, "more"),
        ((1,), {"named": 2}, "named"),
        ((1,), {"x": "2"}, "x"),
        ((), {"a": None}, "a"),
    ],
)
def test_the_argument_that_is_wrong_is_named(arguments: Any, named: Any, wrong: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        asked(*arguments, **named)

    assert caught.value.argument == wrong
    assert asked(1, 2, 3, named="4", x=5) == 1
    with pytest.raises(TypeError, match="missing"):
        asked()  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("value", "hint", "expected", "got"),
    [
        ("x" * 90, int, "int", "'" + "x" * 79),
        (b"ab", int | None, "int or None", "b'ab'"),
        ([], str, "str", "list of nothing"),
        ([1, 2, 3, 4], str, "str", "list of 1, 2, 3, 4"),
        ((1, 2.5, None, True, 5), str, "str", "tuple of 1, 2.5, None, True"),
        (dict.fromkeys(range(5), ""), str, "str", "{0: '', 1: '', 2: '', 3: ''}"),
        (torch.ones(3), torch.dtype, "torch.dtype", "torch.Tensor"),
        (3, torch.Tensor | str, "torch.Tensor or str", "3"),
        (3, Literal["a", 2], "'a' or 2", "3"),
        (3, tuple[int, ...], "tuple[int, ...]", "3"),
        (3, Mapping[str, Sequence[int]], "Mapping[str, Sequence[int]]", "3"),
        (3, Callable[[int], str], "Callable", "3"),
        ("3", Sized, "Sized", "'3'"),
        (int, type[str], "type[str]", "type"),
        ((1, "2"), tuple[int, int], "tuple[int, int]", "tuple of 1, '2'"),
    ],
)  # fmt: skip
def test_expected_and_got_are_short_texts(value: Any, hint: Any, expected: str, got: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        check_type("it", value, hint)

    assert (caught.value.argument, caught.value.expected, caught.value.got) == ("it", expected, got)


def test_what_was_got_is_said_shortly() -> None:
    with pytest.raises(ArgumentError) as caught:
        check_type("aliases", {"x": "abc", "y": [1, object()]}, Mapping[str, Sequence[str]])

    assert str(caught.value) == (
        "aliases\n  expected Mapping[str, Sequence[str]]\n  got      {'x': 'abc', 'y': list of 1, object}"
    )
