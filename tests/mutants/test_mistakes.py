"""Mistakes that each operator plants, by the text before and after."""

import pytest

from tests.mutants.mistakes import OPERATORS, mistakes

PLANTED = [
    ("ChangeDefault", "def f(a: bool = False): ...", "def f(a: bool = True): ..."),
    ("ChangeDefault", "def f(a: int | None = None): ...", "def f(a: int | None = 1): ..."),
    ("ChangeDefault", "def f(*, a: int = 3): ...", "def f(*, a: int = 4): ..."),
    ("ChangeDefault", "class A:\n    a: str = 'x'", "class A:\n    a: str = None"),
    ("SwapOperands", "a // (b + c)", "(b + c) // a"),
    ("SwapArguments", "f(a, b)", "f(b, a)"),
    ("SwapFields", "f'{a} of {b}'", "f'{b} of {a}'"),
    ("DropKeyword", "f(a, b=1, c=2)", "f(a, c=2)"),
    ("DropElement", "NAMES = ('a', 'b', 'c')", "NAMES = ('a', 'c')"),
    ("DropElement", "NAMES = {'a': 1, 'b': 2, 'c': 3}", "NAMES = {'a': 1, 'c': 3}"),
    ("DropStatement", "if a:\n    raise E", "if a:\n    pass"),
    ("DropCondition", "a and b", "b"),
    ("WriteOtherName", "x = any(a)", "x = all(a)"),
    ("WriteOtherName", "x = torch.float16", "x = torch.bfloat16"),
    ("WriteOtherWord", "x = 'at least 1'", "x = 'at most 1'"),
    ("WriteOtherText", "x = 'key'", "x = 'key_'"),
    ("WriteOtherField", "def f(a, b):\n    return f'{b}'", "def f(a, b):\n    return f'{a}'"),
]


@pytest.mark.parametrize(("operator", "before", "after"), PLANTED)
def test_a_mistake_is_planted(operator: str, before: str, after: str) -> None:
    planted = [each.apply(before) for each in mistakes(before) if each.operator == operator]

    assert after in planted


def test_every_operator_has_an_example() -> None:
    names = {operator.__name__.replace("_", "") for operator in OPERATORS}

    assert {operator.lower() for operator, _, _ in PLANTED} == names


def test_arguments_of_any_order_are_left() -> None:
    assert not [each for each in mistakes("min(a, b)") if each.operator == "SwapArguments"]


@pytest.mark.parametrize("text", ["'''At least one.'''", "x: 'at least' = y"])
def test_docstrings_and_annotations_are_left(text: str) -> None:
    assert mistakes(text) == []
