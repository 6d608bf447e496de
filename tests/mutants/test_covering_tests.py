"""The tests that a mutant meets."""

import pytest

from tests.mutants.covering_tests import runs_at_import
from tests.mutants.sample import Mutant

SOURCE = """\
NAMES = ("one", "two")


class Table:
    size: int = 3

    def rows(self, count=4):
        return range(5)
"""


@pytest.mark.parametrize(
    ("old", "expected"), [("two", True), ("3", True), ("4", False), ("5", False)], ids=str
)
def test_constants_and_fields_run_at_import(old: str, expected: bool) -> None:
    mutated = SOURCE.replace(old, "other")

    assert runs_at_import(Mutant("package", "qload/x.py", 1, "Other", SOURCE, mutated)) is expected
