"""Lines of a module that run at its import, and statements around a line."""

import pytest

from tests.mutants.changed_lines import runs_at_import, statements_around

SOURCE = """\
NAMES = ("one", "two")


class Table:
    size: int = 3

    def rows(self, count=4):
        return max(
            count, 5
        )
"""


@pytest.mark.parametrize(
    ("line", "at_import", "around"),
    [(1, True, [1]), (5, True, [5]), (7, False, [7, 8, 9, 10]), (9, False, [8, 9, 10])],
)
def test_constants_and_fields_run_at_import(line: int, at_import: bool, around: list[int]) -> None:
    assert runs_at_import(SOURCE, [line]) is at_import
    assert runs_at_import(SOURCE, [9, line]) is at_import
    assert sorted(statements_around(SOURCE, [line])) == around
