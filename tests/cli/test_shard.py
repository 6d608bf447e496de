"""Output and exit codes of `qload shard`."""

import json
from pathlib import Path

import pytest

from qload.cli import conversion as verb
from qload.conversion.report import ShardedLayer
from tests.cli.test_several import run
from tests.paths import FIXTURES

MODEL = FIXTURES / "awq" / "model_gemm_g64"
ACT_ORDER = FIXTURES / "gptq" / "model_g32_desc_act"


def test_json_says_how_ranks_share_each_layer(tmp_path: Path) -> None:
    result = run("shard", MODEL, "--tp", "2", "--shard-size", "0.0001", "-o", tmp_path / "out")
    said = json.loads(result.stdout)

    assert (result.exit_code, said["verdict"], said["tp"]) == (0, "ok", 2)
    assert {layer["cut"] for layer in said["layers"]} == {"N", "K", "whole"}
    assert (tmp_path / "out" / "rank-1" / "model.safetensors.index.json").exists()


def test_a_table_lists_what_is_refused_and_why(tmp_path: Path) -> None:
    result = run("shard", ACT_ORDER, "--tp", "2", "-o", tmp_path / "out", "--table")

    assert result.exit_code == 1
    assert "refused  4 layers\n    model.layers.{0..1}.mlp.down_proj\n" in result.stdout
    assert "its share alone is not a valid gptq layer" in " ".join(result.stdout.split())
    assert "4 refused: nothing was written" in result.stdout
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("options", [[], ["--tp", "0"], ["--tp", "2", "--ep", "2"], ["--tp", "1,2"]])
def test_what_cannot_be_asked_is_a_usage_error(options: list[str], tmp_path: Path) -> None:
    assert run("shard", MODEL, "-o", tmp_path / "out", *options).exit_code == 2


def test_the_verb_knows_every_outcome() -> None:
    assert {*verb.SHARD_OUTCOMES} == {*ShardedLayer.__annotations__["outcome"].__args__}
