"""Page of the programs that read each format: rows, sources, and the data behind them."""

import pytest

from qload.checkpoint import format_label
from qload.formats import FORMATS
from tests.reader_page import PAGE, Answer, Cell, Program, page, pairs, read_programs

PROGRAMS = read_programs()


def test_the_page_is_that_of_the_data() -> None:
    assert PAGE.read_text() == page(), "python -m tests.reader_page"


def test_every_format_has_a_row() -> None:
    labels = {line.split("|")[1] for line in PAGE.read_text().splitlines() if line.startswith("|")}

    assert {format_label(weight_type.format) for weight_type in FORMATS} <= labels


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_every_cell_has_one_answer_and_a_source(program: Program) -> None:
    assert program.version
    for fmt, method in pairs():
        (answer,) = program.answers(fmt, method)
        if answer.reads == "unknown":
            assert answer == Answer("unknown")
            continue
        assert len(answer.reads.split()) == 1, (fmt, method)
        assert answer.file, (fmt, method)


@pytest.mark.parametrize(
    ("program", "cell"),
    [(program, cell) for program in PROGRAMS for cell in program.cells],
    ids=lambda value: value.name if isinstance(value, Program) else None,
)
def test_a_cell_names_formats_and_methods_that_exist(program: Program, cell: Cell) -> None:
    covered = [(fmt, method) for fmt, method in pairs() if cell.covers(fmt, method)]

    assert cell.formats <= {fmt for fmt, _ in covered}
    assert cell.methods <= {method for _, method in covered}
