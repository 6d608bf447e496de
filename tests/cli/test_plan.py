"""Output and exit codes of `qload plan` and `qload explain`."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.cli.test_several import run
from tests.paths import FIXTURES

MODEL = FIXTURES / "models" / "gptq_mixtral"


@pytest.fixture(autouse=True)
def a_wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set a wide terminal, against line breaks in tables."""
    monkeypatch.setenv("COLUMNS", "200")


def linear_layers() -> set[str]:
    """Return the prefixes of all layers, from the file itself."""
    return {name.rpartition(".")[0] for name in load_file(MODEL / "model.safetensors")}


def test_json_has_every_layer_and_what_does_not_fit() -> None:
    """Four query heads and two key/value heads are not divisible by three."""
    result = run("plan", MODEL, "--tp", "2,3")

    told = json.loads(result.stdout)
    refused = {
        world: {layer["prefix"] for layer in told["layers"] if not layer["shares"][world]["fits"]}
        for world in ("2", "3")
    }
    assert {layer["prefix"] for layer in told["layers"]} == linear_layers()
    assert refused["2"] == set()
    assert {name.partition("layers.")[2] for name in refused["3"]} == {
        f"{layer}.self_attn.{part}_proj" for layer in (0, 1) for part in "qkvo"
    }
    assert [(world["fits"], world["refused"]) for world in told["worlds"].values()] == [(True, 0), (False, 8)]
    assert [len(world["bytes"]) for world in told["worlds"].values()] == [2, 3]
    assert (told["verdict"], told["path"], told["model"]) == ("findings", str(MODEL), "mixtral")


@pytest.mark.parametrize(("sizes", "code"), [("1,2", 0), ("2,3", 1)])
def test_the_exit_code_says_whether_all_fits(sizes: str, code: int) -> None:
    assert run("plan", MODEL, "--tp", sizes).exit_code == code


def test_a_table_says_why_not_and_what_instead() -> None:
    shown = run("plan", MODEL, "--tp", "2,3", "--table").stdout

    assert "key/value heads = 2 does not divide into 3 ranks" in shown
    assert "instead  copied: all 2 key/value heads on each of 3 ranks; 960 B more" in shown
    assert "ok  2 ranks: 71.3 KiB each" in shown
    assert "no  3 ranks: 8 layers cannot be shared" in shown


def test_alike_refusals_are_one_line_and_lawful_numbers_are_named() -> None:
    shown = run("plan", MODEL, "--tp", "2,3", "--table").stdout

    assert shown.count("key/value heads = 2 does not divide into 3 ranks") == 1
    assert "3 ranks  model.layers.{0..1}.self_attn.k_proj\n" in shown
    assert "         model.layers.{0..1}.self_attn.v_proj  x4\n" in shown
    assert "lawful  1, 2 or 4 ranks suit all layers: model.layers.0.self_attn.q_proj allows" in shown
    assert "lawful  " not in run("plan", MODEL, "--tp", "2", "--table").stdout
    every = run("plan", MODEL, "--tp", "3", "--all", "--table").stdout
    assert every.count("key/value heads = 2 does not divide into 3 ranks") == 4


def test_all_has_a_line_for_each_layer() -> None:
    folded, every = (run("plan", MODEL, "--table", *more).stdout for more in ((), ("--all",)))

    assert "model.layers.{0..1}.self_attn.o_proj" in folded
    assert "model.layers.1.self_attn.o_proj" in every


def test_what_cannot_be_read_is_a_report_and_exit_code_1(tmp_path: Path) -> None:
    result = run("plan", tmp_path)

    assert (json.loads(result.stdout)["verdict"], result.exit_code) == ("unreadable", 1)
    assert "unreadable" in run("plan", tmp_path, "--table").stdout


@pytest.mark.parametrize("asked", [["--tp", "0"], ["--ep", "0"], ["--tp", "x"], ["--ep", "2", "--tp", "2"]])
def test_what_cannot_be_asked_is_a_usage_error(asked: list[str]) -> None:
    dense = FIXTURES / "gptq" / "model_g32_desc_act"

    assert run("plan", dense, *asked).exit_code == 2


def test_json_of_explain_has_every_layer_and_what_was_asked() -> None:
    result = run("explain", MODEL, "--arch", "sm90", "--dtype", "bf16", "--tokens", "1,2")

    told = json.loads(result.stdout)
    assert (told["path"], told["verdict"], result.exit_code) == (str(MODEL), "ok", 0)
    assert (told["arch"], told["tp"], told["dtype"]) == ("sm90", 1, "bfloat16")
    assert {layer["prefix"] for layer in told["layers"]} == linear_layers()
    assert {tuple(choice["tokens"] for choice in layer["choices"]) for layer in told["layers"]} == {(1, 2)}
    plain = {layer["prefix"] for layer in told["layers"] if layer["kernel_format"] == "unquantized"}
    assert {name.rpartition(".")[2] for name in plain} >= {"norm", "input_layernorm", "lm_head"}
    assert {layer["kernel_format"] for layer in told["layers"] if layer["prefix"] not in plain} == {"strips"}


def test_explain_as_text_has_kernels_and_reasons() -> None:
    shown = run("explain", MODEL, "--arch", "sm90", "--table").stdout

    assert "model.layers.{0..1}.self_attn.o_proj  x2  gptq -> strips (64, 64)" in shown
    assert "1 token: decode, not measured" in shown
    assert "on sm90, activations of float16" in shown  # as config.json says
    assert "gptq_marlin: could hold it as well; strips is preferred" in shown


@pytest.mark.parametrize("asked", [["--arch", "x"], ["--tokens", "0"], ["--dtype", "int8"], ["--tp", "0"]])
def test_what_explain_cannot_be_asked_is_a_usage_error(asked: list[str]) -> None:
    assert run("explain", MODEL, *asked).exit_code == 2
