"""`qload bench-load`: loaded layers, and the measurements as tables and as JSON."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from qload import SafetensorsStorage
from qload.cli import main
from qload.cli.bench_load import measure_load
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


def test_progress_names_stage_and_turn() -> None:
    told: list[str] = []

    measure_load(MODEL, "cpu", "auto", 2, lambda stage, done, total: told.append(f"{stage} {done == total}"))

    assert "as stored, warm-up: loading False" in told
    assert "auto, round 1 of 2: loading True" in told


@pytest.mark.parametrize("device", ["nowhere", "cuda:99", "meta"])
def test_a_device_that_is_not_here_is_a_wrong_command(device: str) -> None:
    assert run(MODEL, "--device", device).exit_code == 2


def test_what_cannot_be_read_ends_with_1(tmp_path: Path) -> None:
    assert run(tmp_path).exit_code == 1
