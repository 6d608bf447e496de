"""`qload bench-load`: loaded layers, and the measurements as tables and as JSON."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from qload import SafetensorsStorage
from qload.cli import bench_load, main
from qload.cli.bench_load import measure_load
from qload.cli.text import format_size
from tests.paths import FIXTURES

MODEL = FIXTURES / "gptq" / "model_g32_desc_act"


def run(*arguments: Any) -> Result:
    return CliRunner().invoke(main, ["bench-load", *map(str, arguments)])


def test_each_stage_has_a_rate_of_each_turn() -> None:
    result = run(MODEL, "--rounds", 2, "--target", "marlin")

    report = json.loads(result.stdout)
    with SafetensorsStorage(MODEL) as storage:
        assert report["bytes"] == sum(storage.info(name).nbytes for name in list(storage.keys()))
    assert [stage["stage"] for stage in report["stages"]] == ["load_file", "as stored", "marlin"]
    assert all(len(stage["rounds"]) == 2 and min(stage["rounds"]) > 0 for stage in report["stages"])
    assert [stage["peak_above_result"] for stage in report["stages"]] == [None] * 3
    assert result.exit_code == 0


def test_a_table_names_the_stages() -> None:
    told = run(MODEL, "--rounds", 1, "--table").stdout

    assert all(stage in told for stage in ("load_file", "as stored", "auto", "GB/s"))


def test_the_rates_are_those_of_the_measured_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock of powers of two: three stages of the warm-up, and of each of three rounds."""
    ends = iter([0.0] + [2.0**number * 1e-9 for number in range(24)])
    monkeypatch.setattr(bench_load, "perf_counter", lambda: next(ends))
    monkeypatch.setenv("COLUMNS", "120")

    lines = run(MODEL, "--rounds", 3, "--table").stdout.splitlines()

    with SafetensorsStorage(MODEL) as storage:
        size = sum(storage.info(name).nbytes for name in list(storage.keys()))
    starts = [[6 + 2 * stage + 6 * number for number in range(3)] for stage in range(3)]
    rates = [[size / (2.0**at - 2.0 ** (at - 1)) for at in rounds] for rounds in starts]
    assert lines[0] == f"{MODEL}: {format_size(size)} to cpu"
    rows = [line.split() for line in lines if line.startswith((" load_file", " as stored", " auto"))]
    for row, name, rounds in zip(rows, ("load_file", "as stored", "auto"), rates, strict=True):
        assert row == [*name.split(), f"{rounds[1]:.2f}", *(f"{rate:.2f}" for rate in rounds)]
    titles = next(line for line in lines if line.startswith(" stage"))
    assert titles.split() == ["stage", "GB/s", "of", "each", "round", "memory", "above", "the", "result"]


def test_progress_names_stage_and_turn() -> None:
    told: list[str] = []

    def update(stage: str, done: int, total: int) -> None:
        told.append(f"{stage} {done == total}")

    measure_load(MODEL, "cpu", "auto", 2, update, "error")

    assert "as stored, warm-up: loading False" in told
    assert "auto, round 1 of 2: loading True" in told


@pytest.mark.parametrize("device", ["nowhere", "cuda:99", "meta"])
def test_a_device_that_is_not_here_is_a_wrong_command(device: str) -> None:
    assert run(MODEL, "--device", device).exit_code == 2


def test_what_cannot_be_read_ends_with_1(tmp_path: Path) -> None:
    assert run(tmp_path).exit_code == 1
