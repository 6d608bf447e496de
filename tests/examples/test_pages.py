"""Every test that stands on a page under docs/extending passes, and the pages are as short as they say."""

import inspect

import pytest

from tests.examples import pages

NAMES = sorted(page.stem for page in pages.PAGES.glob("*.md"))
TESTS = [
    pytest.param(page, test, id=f"{page}-{test.removeprefix('test_')}")
    for page in NAMES
    for test in pages.tests(page)
]
MAX_CODE_LINES = 120  # without blank lines


@pytest.mark.parametrize(("page", "test"), TESTS)
def test_what_a_page_shows_runs(page: str, test: str, request: pytest.FixtureRequest) -> None:
    function = getattr(pages.module(page), test)
    function(**{name: request.getfixturevalue(name) for name in inspect.signature(function).parameters})


@pytest.mark.parametrize("page", NAMES)
def test_a_page_has_tests_and_no_two_of_one_name(page: str) -> None:
    names = [test for each in (*pages.BEFORE.get(page, ()), page) for test in pages.tests(each)]

    assert pages.tests(page)
    assert len(set(names)) == len(names)


def test_a_format_takes_fewer_than_120_lines_with_its_tests() -> None:
    lines = [line for line in pages.code("format").splitlines() if line.strip()]

    assert len(lines) < MAX_CODE_LINES


def test_every_worked_example_is_there() -> None:
    assert set(NAMES) == {"format", "loader", "kernel-order", "cuda-kernel", "verify-rule"}
