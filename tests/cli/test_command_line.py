"""Command line: output from the library, and exit codes from docs/cli.md."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file

from qload.cli import main
from qload.cli.main import is_json_requested
from tests.paths import FIXTURES, ROOT

MODEL = FIXTURES / "gptq" / "model_g32_desc_act"


def run(*arguments: Any) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    save_file({"a.weight": torch.tensor([[1.0, float("nan")]])}, tmp_path / "model.safetensors")
    return tmp_path


def test_an_unknown_rule_is_a_usage_error(tmp_path: Path) -> None:
    accepted = ("--accept", "layer-count", "--accept", "layer-counts")
    result = run("convert", MODEL, "--to", "marlin", *accepted, "-o", tmp_path / "to")

    assert result.exit_code == 2
    assert "Invalid value for '--accept': 'layer-counts' is not the id of a rule" in result.stderr


@pytest.mark.parametrize("verb", ["inspect", "verify"])
def test_in_a_pipe_it_prints_json_with_every_layer_and_byte(verb: str) -> None:
    """Count layers and bytes in the files themselves."""
    result = run(verb, MODEL)

    stored: dict[str, torch.Tensor] = {}
    for file in MODEL.glob("*.safetensors"):
        stored |= load_file(file)
    told, total = json.loads(result.stdout), sum(tensor.nbytes for tensor in stored.values())
    layers = {layer["prefix"]: layer for layer in told["layers"]}
    assert layers.keys() == {name.rpartition(".")[0] for name in stored}
    assert len(layers) == len(told["layers"])
    assert {prefix for prefix, layer in layers.items() if layer["format"] == "gptq"} == {
        name.removesuffix(".qweight") for name in stored if name.endswith(".qweight")
    }
    for prefix, layer in layers.items():
        own = {name: tensor for name, tensor in stored.items() if name.rpartition(".")[0] == prefix}
        assert layer["bytes"] == sum(
            tensor.nbytes for name, tensor in own.items() if not name.endswith(".bias")
        )
        if layer["format"] == "gptq":
            words = own[f"{prefix}.qweight"]
            assert (layer["bits"], layer["group_size"], layer["shape"]) == (
                4,
                32,
                [words.shape[1], 8 * words.shape[0]],
            )
    assert (told["coverage"]["total"], told["coverage"]["explained"]) == (total, total)
    assert (told["schema"], told["path"], told["verdict"], told["findings"]) == (2, str(MODEL), "ok", [])
    assert told["claims"]["bits"] == 4
    assert result.exit_code == 0


def test_inspect_says_how_inputs_are_quantized() -> None:
    folder = FIXTURES / "activations" / "w8a8_int8_tensor_static_asym"
    (layer,) = json.loads(run("inspect", folder, "--json").stdout)["layers"]
    told = run("inspect", folder, "--table").stdout

    assert "inputs quantized: int8 tensor static asymmetric, of 1 layer" in told
    assert layer["activations"]["scale"] == "model.layers.0.mlp.down_proj.input_scale"
    assert layer["activations"]["zero_point"] == "model.layers.0.mlp.down_proj.input_zero_point"
    assert "inputs quantized" not in run("inspect", MODEL, "--table").stdout


def test_a_finding_has_the_agreed_keys_and_ends_with_1(damaged: Path) -> None:
    result = run("verify", damaged)

    (finding,) = json.loads(result.stdout)["findings"]
    assert finding.keys() == {"rule", "severity", "tensor", "file", "message", "remedy", "cause"}
    assert (finding["rule"], finding["tensor"], result.exit_code) == ("float-value", "a.weight", 1)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        pytest.param(["inspect", MODEL], 0, id="in order"),
        pytest.param(["inspect", ROOT / "no" / "such" / "folder"], 1, id="unreadable"),
        pytest.param(["inspect"], 2, id="no path"),
        pytest.param(["inspect", ""], 2, id="an empty path"),
        pytest.param(["verify", MODEL, "--tp", "0"], 2, id="no rank"),
        pytest.param(["verify", MODEL, "--tensor"], 2, id="an unknown option"),
        pytest.param(["prove", MODEL], 2, id="an unknown verb"),
        pytest.param(["--version"], 0, id="the version"),
    ],
)
def test_the_exit_code_tells_what_happened(arguments: list[Any], code: int) -> None:
    assert run(*arguments).exit_code == code


@pytest.mark.parametrize(
    "asked",
    [
        ["convert", MODEL, "--to", "float32", "-o", ""],
        ["shard", MODEL, "--tp", "1", "-o", ""],
        ["make-checkpoint", "gptq", "-o", ""],
        ["vectors", "export", ""],
    ],
    ids=lambda asked: asked[0],
)
def test_a_folder_without_a_name_is_not_the_current_one(
    asked: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    assert run(*asked).exit_code == 2
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    "asked",
    [
        ["convert", MODEL, "--to", "float32", "-o"],
        ["shard", MODEL, "--tp", "1", "-o"],
        ["make-checkpoint", "gptq", "-o"],
        ["vectors", "export"],
    ],
    ids=lambda asked: asked[0],
)
def test_a_folder_that_is_a_file_is_a_usage_error(asked: list[Any], tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("kept")

    made = run(*asked, file)

    assert (made.exit_code, file.read_text()) == (2, "kept")
    assert "is a file" in made.stderr


@pytest.mark.parametrize(
    "arguments", [[], *([verb] for verb in main.commands)], ids=lambda each: each[0] if each else "qload"
)
def test_help_has_examples_and_the_exit_codes(arguments: list[str], golden: Any) -> None:
    result = run(*arguments, "--help")

    assert "Examples:" in result.stdout
    assert "Exit codes: 0" in " ".join(result.stdout.split())
    assert result.stdout == golden


def test_the_module_shows_the_name_of_the_script(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["__main__.py", "--help"])

    with pytest.raises(SystemExit):
        runpy.run_path(str(ROOT / "qload" / "__main__.py"), run_name="__main__")

    assert capsys.readouterr().out.startswith("Usage: qload [OPTIONS]")


def test_help_answers_without_torch() -> None:
    code = "import sys; from qload.cli import main; main(['--help'], standalone_mode=False)"

    done = subprocess.run(
        [sys.executable, "-c", f"{code}; sys.exit('torch' in sys.modules or 'rich' in sys.modules)"],
        cwd=ROOT, capture_output=True, check=False,
    )  # fmt: skip

    assert done.returncode == 0


def on_a_terminal(*arguments: Any, stderr: bool = False, **environment: str) -> str:
    """Return the output of a command on a terminal of 200 columns; with `stderr`, its progress too."""
    pty = pytest.importorskip("pty", reason="this system has no pseudo terminals")
    parent, child = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "qload", *map(str, arguments)],
        stdout=child, stderr=child if stderr else subprocess.DEVNULL, cwd=ROOT,
        env={**os.environ, "COLUMNS": "200", "TERM": "xterm-256color", **environment},
    )  # fmt: skip
    os.close(child)
    written = b""
    try:
        while chunk := os.read(parent, 1 << 16):
            written += chunk
    except OSError:  # the other end is closed
        pass
    process.wait()
    os.close(parent)
    return written.decode()


@pytest.mark.slow
def test_a_terminal_gets_tables_in_colour_and_none_where_that_is_asked(damaged: Path) -> None:
    coloured = on_a_terminal("inspect", MODEL)
    plain = on_a_terminal("inspect", MODEL, NO_COLOR="1")

    assert "model.layers.{0..1}.mlp.down_proj" in plain
    assert "\x1b[" in coloured
    assert "\x1b" not in plain


@pytest.mark.slow
def test_no_colour_leaves_no_escape_in_progress_either() -> None:
    shown = on_a_terminal("verify", MODEL, "--against", MODEL, stderr=True, NO_COLOR="1")

    assert "\x1b" not in shown
    stages = [line.split(":")[0] for line in shown.splitlines()]
    assert stages[:4] == ["headers", "values", "meaning", "against"]


def test_a_name_from_a_hostile_file_is_text_and_nothing_else(tmp_path: Path) -> None:
    name = "a\x1b[2J[red]b[/red]\u202e.weight"
    save_file({name: torch.tensor([[float("nan")]])}, tmp_path / "model.safetensors")

    shown = run("verify", "--table", tmp_path).stdout

    assert "\x1b[2J" not in shown
    assert "\u202e" not in shown
    assert "[red]b[/red]" in shown
    assert r"\x1b" in shown


def test_verbose_speaks_on_standard_error_alone() -> None:
    result = run("-vv", "inspect", MODEL)

    assert json.loads(result.stdout)["verdict"] == "ok"


def test_layers_of_one_kind_are_folded_and_all_shows_each() -> None:
    folded, every = (run("inspect", "--table", *more, MODEL).stdout for more in ([], ["--all"]))

    assert "model.layers.{0..1}.mlp.up_proj" in folded
    assert "model.layers.1.mlp.up_proj" not in folded
    assert "model.layers.1.mlp.up_proj" in every


def test_a_row_of_fp8_says_the_dtypes_of_the_weight_and_of_the_scales() -> None:
    shown = run("inspect", "--table", FIXTURES / "fp8" / "block_132x32").stdout

    assert "float8_e4m3fn, scales float32" in shown
    assert "- (claimed" not in shown


def test_tier_is_the_last_that_is_asked(damaged: Path) -> None:
    assert json.loads(run("verify", damaged, "--tier", "headers").stdout)["verdict"] == "ok"
    assert json.loads(run("verify", damaged, "--tier", "values").stdout)["verdict"] == "findings"


@pytest.mark.parametrize(
    "options",
    [["--prompt-ids", "1"], ["--device", "cpu"], ["--image", ROOT / "README.md"]],
    ids=lambda each: each[0],
)
def test_options_of_logits_need_it(options: list[Any]) -> None:
    result = run("verify", MODEL, *options)

    assert result.exit_code == 2
    assert "--prompt-ids, --image and --device are options of --logits" in result.stderr


def test_a_made_checkpoint_is_told_with_its_size(tmp_path: Path) -> None:
    result = run("make-checkpoint", "gptq", "-o", tmp_path / "made")

    tensors = [
        each for file in (tmp_path / "made").glob("*.safetensors") for each in load_file(file).values()
    ]
    nbytes = sum(tensor.nbytes for tensor in tensors)
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == f"{tmp_path / 'made'}: {len(tensors)} tensors, {nbytes} bytes\n"


def test_only_pages_need_jinja_and_only_sarif_may_be_standard_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("verify", MODEL, "--tier", "headers", "--html", "-").exit_code == 0
    assert Path("-").read_text().startswith("<!doctype html>")

    monkeypatch.setattr("qload.cli.options.util.find_spec", lambda name: None)
    page = run("verify", MODEL, "--tier", "headers", "--html", "page.html")
    assert page.exit_code == 2
    assert 'pages need Jinja: pip install "qload-weights[pictures]"' in page.stderr
    assert run("verify", MODEL, "--tier", "headers", "--sarif", "out.sarif").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "is_terminal", "wanted"),
    [
        (["--json"], True, True),
        (["--table", "--json"], True, True),
        (["--json", "--table"], False, False),
        (["--json", "--markdown"], False, False),
        (["verify", "model"], True, False),
        (["verify", "model"], False, True),
        ([], False, False),
        (["run", "--", "--json"], True, False),
    ],
)
def test_the_last_option_of_output_decides_on_json(
    arguments: list[str], is_terminal: bool, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(isatty=lambda: is_terminal))

    assert is_json_requested(arguments) == wanted
