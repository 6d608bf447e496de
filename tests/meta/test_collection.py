"""Test selection of a run: device tests on request, and a sample of large parametrizations."""

import re
from typing import Any

import pytest

from tests.conftest import pytest_ignore_collect
from tests.example_counts import FEW, as_slow, at_most, some
from tests.paths import TESTS


class Asked:
    """Options of a run."""

    def __init__(self, expression: str) -> None:
        self.expression = expression

    def getoption(self, name: str) -> str:
        return {"markexpr": self.expression}[name]


@pytest.mark.parametrize(
    ("expression", "left_out"),
    [
        ("not gpu and not slow", True),
        ("slow and not gpu", True),
        ("not gpu", True),
        ("", None),
        ("gpu", None),
        ("not slow", None),
        ("slow or not gpu", None),
        ("gpu or slow and not gpu", None),
        ("not (not gpu)", None),
    ],
)
def test_devices_are_left_out_only_where_none_of_their_tests_is_asked_for(
    expression: str, left_out: bool | None
) -> None:
    config: Any = Asked(expression)

    assert pytest_ignore_collect(TESTS / "gpu", config) is left_out
    assert pytest_ignore_collect(TESTS / "kernels", config) is None


def test_every_file_there_needs_a_device() -> None:
    files = sorted((TESTS / "gpu").glob("test_*.py"))
    marked = re.compile(r"^pytestmark = \[?pytest\.mark\.gpu\b", re.MULTILINE)

    assert files
    assert [file.name for file in files if not marked.search(file.read_text())] == []


def quick(cases: list[Any]) -> list[Any]:
    return [case for case in cases if not getattr(case, "marks", ())]


@pytest.mark.parametrize(("cases", "count"), [(7, 3), (12, 4), (4, 2), (3, 3), (2, 5), (1, 1), (0, 2)])
def test_some_cases_are_quick_and_all_are_there(cases: int, count: int) -> None:
    names = [f"case{number}" for number in range(cases)]
    places = [some(names, count, place) for place in range(cases)]

    assert all(len(each) == cases for each in places)
    assert all(len(quick(each)) == min(count, cases) for each in places)
    assert {name for each in places for name in quick(each)} == set(names)


def test_a_slow_case_keeps_its_values_and_its_name() -> None:
    case = as_slow(pytest.param(1, "two", id="both"))

    assert (case.values, case.id) == ((1, "two"), "both")
    assert as_slow("alone").values == ("alone",)
    assert [mark.name for mark in case.marks] == ["slow"]


@pytest.mark.parametrize(("count", "half"), [(1, 1), (5, 3), (8, 4), (30, 15)])
def test_a_run_of_all_tests_draws_half_of_the_examples(count: int, half: int) -> None:
    class Profile:
        max_examples = FEW

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.example_counts.profile", lambda: Profile)
        assert at_most(count).max_examples == half
        patch.setattr(Profile, "max_examples", FEW + 1)
        assert at_most(count).max_examples == count
