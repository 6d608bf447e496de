"""Output and exit codes of `qload convert`."""

import json
from pathlib import Path

import pytest

from qload.cli import conversion as verb
from qload.conversion import float4, fp8
from qload.conversion.report import ConversionOutcome
from qload.conversion.targets import FLOATS, INTEGERS
from tests.cli.test_several import run
from tests.paths import FIXTURES

MODEL = FIXTURES / "models" / "gptq_mixtral"
ACT_ORDER = FIXTURES / "gptq" / "model_g32_desc_act"


def test_json_says_what_became_of_each_layer(tmp_path: Path) -> None:
    result = run("convert", MODEL, "--to", "awq", "-o", tmp_path / "out")
    said = json.loads(result.stdout)

    assert (result.exit_code, said["verdict"], said["folder"]) == (0, "ok", str(tmp_path / "out"))
    assert said["counts"] == {"bits": len(said["layers"])}
    assert (tmp_path / "out" / "qload-certificate.json").exists()


def test_a_table_lists_what_is_refused_and_why(tmp_path: Path) -> None:
    result = run("convert", ACT_ORDER, "--to", "awq", "-o", tmp_path / "out", "--table")

    assert result.exit_code == 1
    assert "refused  14 layers\n" in result.stdout
    assert "    model.layers.{0..1}.mlp.up_proj\n" in result.stdout
    words = " ".join(result.stdout.split())
    assert "not in order along K (act order), and awq has no g_idx" in words
    assert "14 refused: nothing was written" in result.stdout
    assert not (tmp_path / "out").exists()


def test_short_names_of_floats_options_and_notes(tmp_path: Path) -> None:
    fp8 = FIXTURES / "models" / "fp8_channel_deepseek_v3"
    options = ["--to", "bf16", "--round", "--shard-size", "0.0001", "--table"]
    result = run("convert", fp8, "-o", tmp_path / "out", *options)

    assert result.exit_code == 0
    assert "note  inputs were quantized" in result.stdout
    assert "equal after one rounding" in result.stdout
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1


def test_kept_layers_are_named_by_patterns(tmp_path: Path) -> None:
    options = ["--to", "fp32", "--keep", "*.q_proj", "--keep", "*.k_proj"]

    assert run("convert", MODEL, "-o", tmp_path / "out", *options).exit_code == 0
    assert "quantization_config" in json.loads((tmp_path / "out" / "config.json").read_text())


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (["--to", "ggml"], 2),
        (["--to", "awq", "--keep", "nothing"], 2),
        ([], 2),
    ],
)
def test_what_cannot_be_asked_is_a_usage_error(options: list[str], code: int, tmp_path: Path) -> None:
    assert run("convert", MODEL, "-o", tmp_path / "out", *options).exit_code == code


def test_a_target_that_is_taken_and_a_source_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("")

    assert run("convert", MODEL, "--to", "awq", "-o", tmp_path).exit_code == 2
    result = run("convert", tmp_path / "nothing", "--to", "awq", "-o", tmp_path / "out")
    assert (result.exit_code, json.loads(result.stdout)["verdict"]) == (1, "unreadable")


def test_the_verb_knows_every_target_and_every_outcome() -> None:
    assert (*INTEGERS, fp8.NAME, *float4.TARGETS, float4.GGUF) == verb.TARGET_FORMATS
    assert {*verb.FLOAT_DTYPES.values()} == {*FLOATS}
    assert {*verb.CONVERT_OUTCOMES} == {*ConversionOutcome.__args__}  # type: ignore[attr-defined]
