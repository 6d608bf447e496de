"""Expressions and conjunctions are found from values alone."""

import numpy as np
import pytest

from qload.architecture.table import evaluate_size
from tests.model_tables.fit import Expressions, conjunctions

SIZES = {
    "hidden": [64, 96, 128, 320, 64, 192],
    "heads": [4, 8, 4, 16, 2, 12],
    "kv": [2, 8, 1, 4, 1, 3],
    "head": [24, 8, 40, 16, 24, 56],
    "wide": [100, 220, 300, 40, 260, 140],
}


@pytest.mark.parametrize(
    "text",
    [
        "hidden",
        "3*wide",
        "heads*head",
        "hidden/heads",
        "hidden/heads*kv",
        "wide/4",
        "kv*head+heads*head",
        "wide+1",
        "2*kv*head+heads*head",
        "wide+2*heads+heads*head",
        "heads*kv*wide",
    ],
)
def test_the_values_of_an_expression_are_explained(text: str) -> None:
    def values(expression: str) -> list[int | None]:
        return [evaluate_size(expression, {name: SIZES[name][at] for name in SIZES}) for at in range(6)]

    target = [value for value in values(text) if value is not None]
    found = Expressions.of(SIZES, 6).explain(target)

    assert found is not None
    assert values(found) == target
    assert found.count("+") == text.count("+")


def test_a_constant_is_one_and_noise_is_not_explained() -> None:
    expressions = Expressions.of(SIZES, 6)

    assert expressions.explain([7] * 6) == "7"
    assert expressions.explain([1009, 613, 877, 401, 211, 53]) is None


def test_a_large_constant_that_a_size_explains_is_the_size() -> None:
    sizes = {"hidden": [4096] * 3, "wide": [1, 2, 3]}

    assert Expressions.of(sizes, 3).explain([4096] * 3) == "hidden"


def test_a_sum_with_a_constant_precedes_sums_with_sizes_that_do_not_vary() -> None:
    sizes = {**SIZES, "codebooks": [8] * 6, "kernel": [7] * 6, "one": [1] * 6}
    target = [size + 1 for size in SIZES["wide"]]

    assert Expressions.of(sizes, 6).explain(target) == "wide+1"


def test_the_smallest_conjunctions_come_first() -> None:
    literals = {
        "even": np.array([1, 0, 1, 0, 1, 0], bool),
        "first": np.array([1, 1, 1, 0, 0, 0], bool),
        "both": np.array([1, 0, 1, 0, 0, 0], bool),
    }

    assert list(conjunctions(literals["both"], literals)) == [("both",)]
    del literals["both"]
    target = np.array([1, 0, 1, 0, 0, 0], bool)
    assert list(conjunctions(target, literals)) == [("even", "first")]
    assert list(conjunctions(np.ones(6, bool), literals)) == [()]
    assert list(conjunctions(np.array([0, 1, 0, 1, 0, 0], bool), literals)) == []
