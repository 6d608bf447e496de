"""The table of ways on a CPU: how it is read, and made of measured times."""

from pathlib import Path
from typing import Any

import pytest
import torch

from qload.errors import ArgumentError
from qload.formats import CTMXFP4Weight, EETQWeight, Fp8Weight
from qload.kernel_formats import PanelsWeight
from qload.kernels import cpu
from qload.native.modules import ISAS
from tests.bench import cpu_dispatch

pytestmark = pytest.mark.usefixtures("seen_texts")

SAID = {"kind": "panels", "bits": 4, "dtype": "float32", "isa": "avx2"}
TIMES: cpu_dispatch.Times = {
    1: {"registers": 1.0, "cache": 2.0, "torch": 3.0},
    4: {"registers": 2.0, "cache": 1.99, "torch": 3.0},
    8: {"cache": 2.0, "torch": 3.0},
    16: {"cache": None, "torch": 3.0},
    32: {"cache": 3.0, "torch": 2.9},
}


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    place = tmp_path / cpu.TABLE
    place.write_text("[]")
    monkeypatch.setattr(cpu_dispatch, "FILE", place)
    monkeypatch.setattr(cpu.resources, "files", lambda package: tmp_path)
    cpu.forget()
    yield place
    monkeypatch.undo()  # else the tests after this one would have that table
    cpu.forget()


def ranked(tokens: int, isa: str = "avx2") -> tuple[str, ...]:
    return cpu.ranked("panels", 4, torch.float32, isa, tokens)


def test_neighbours_that_agree_are_one_row_without_what_was_wrong() -> None:
    made = list(cpu_dispatch.rows(TIMES, SAID))

    assert [(row["tokens"], row["ways"]) for row in made] == [
        (4, ["registers", "cache", "torch"]),
        (8, ["cache", "torch"]),
        (16, ["torch"]),
        (32, ["torch", "cache"]),
    ]


def test_layers_of_a_cell_are_ranked_together_and_one_wrong_result_rules_a_way_out() -> None:
    both = cpu_dispatch.together([{1: {"a": 1.0, "b": 2.0, "c": None}}, {1: {"a": 9.0, "b": 2.0, "c": 1.0}}])

    assert cpu_dispatch.order(both[1], None) == ["b", "a"]


def test_what_is_written_is_read(file: Path) -> None:
    assert ranked(1) == cpu.WAYS["panels"]

    cpu_dispatch.write(list(cpu_dispatch.rows(TIMES, SAID)))

    assert [ranked(tokens)[0] for tokens in (1, 4, 5, 8, 9, 32, 1000)] == [
        *("registers",) * 2, *("cache",) * 2, *("torch",) * 3
    ]  # fmt: skip
    assert ranked(1, "scalar") == cpu.WAYS["panels"]
    assert cpu.most_before_torch("panels", 4, torch.float32, "avx2") == 8
    assert cpu.most_before_torch("panels", 4, torch.float16, "avx2") is None


def test_only_what_was_measured_is_replaced(file: Path) -> None:
    cpu_dispatch.write([{**SAID, "isa": "scalar", "tokens": 1, "ways": ["torch"]}])
    cpu_dispatch.write([{**SAID, "tokens": 1, "ways": ["registers"]}])
    cpu_dispatch.write([{**SAID, "tokens": 2, "ways": ["cache"]}])

    assert (ranked(1), ranked(1, "scalar")) == (("cache",), ("torch",))


def test_a_table_that_cannot_be_read_is_told_of(file: Path) -> None:
    file.write_text("[{}]")

    with pytest.raises(ArgumentError, match=cpu.TABLE):
        cpu.forget()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", cpu.WAYS)
def test_the_table_has_every_instruction_set_kind_and_type(kind: str, isa: str) -> None:
    widths = {"panels": (4, 8), "rows": (4, 8), "eetq": (8,)}
    for bits in widths[kind]:
        for dtype in cpu_dispatch.DTYPES:
            rows = cpu.ROWS[kind, bits, str(dtype).removeprefix("torch."), isa]
            assert all(set(ways) <= set(cpu.WAYS[kind]) for _, ways in rows)


def test_weights_are_of_a_kind_and_width() -> None:
    found = [(cpu.kind_of(each), cpu.row_bits(each)) for each in (Fp8Weight, EETQWeight, CTMXFP4Weight)]

    assert found == [("rows", 8), ("eetq", 8), ("rows", 4)]
    assert cpu.kind_of(PanelsWeight) == "panels"
