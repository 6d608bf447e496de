"""How much a run of all tests tries: how many examples laws draw, and which cases are slow tests."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import settings

FEW, SOME, MANY = 20, 50, 100  # of a test that says no number, by profile


def profile() -> Any:
    """The settings of a test that says none."""
    return settings.default


def at_most(count: int) -> settings:
    """`count` examples; half as many in a run of all tests, which draws others each time it is run."""
    quick = profile().max_examples <= FEW
    return settings(max_examples=-(-count // 2) if quick else count)


def some(cases: Sequence[Any], count: int, place: int = 0) -> list[Any]:
    """All cases, of which a run of all tests has `count`, others at each `place`; the rest are slow tests."""
    quick = {(place * count + turn) % len(cases) for turn in range(min(count, len(cases)))}
    return [case if turn in quick else as_slow(case) for turn, case in enumerate(cases)]


def as_slow(case: Any) -> Any:
    """A case, with its name if it has one, marked as slow."""
    named = isinstance(case, tuple) and hasattr(case, "values")
    values, name = (case.values, case.id) if named else ((case,), None)
    return pytest.param(*values, id=name, marks=pytest.mark.slow)
