"""Output for programs: several paths, several world sizes, and errors as JSON."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import save_file

from qload.cli import main
from qload.cli.checkpoint_paths import checkpoint_folders
from qload.cli.output import dumps
from qload.verify import Finding, Report, verify
from tests.cli.test_command_line import on_a_terminal
from tests.paths import FIXTURES, ROOT
from tests.verify.checkpoints import model
from tests.verify.draft_models import SMALL, eagle3
from tests.verify.rules.test_architecture import CONFIG, whole

SOUND = FIXTURES / "gptq" / "model_g32_desc_act"
AWQ = FIXTURES / "awq" / "model_gemm_g64"


def run(*arguments: Any) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def reports(result: Result) -> list[dict[str, Any]]:
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    save_file({"a.weight": torch.tensor([[1.0, float("nan")]])}, tmp_path / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize("verb", ["inspect", "verify"])
def test_several_paths_are_json_lines_in_their_order(verb: str, damaged: Path) -> None:
    result = run(verb, SOUND, damaged, damaged / "nothing")

    assert [report["path"] for report in reports(result)] == [
        *map(str, (SOUND, damaged, damaged / "nothing"))
    ]
    assert [report["verdict"] for report in reports(result)][::2] == ["ok", "unreadable"]


def test_a_line_of_several_is_the_report_of_one(damaged: Path) -> None:
    one, several = run("verify", damaged), run("verify", SOUND, damaged)

    assert json.loads(one.stdout) == reports(several)[1]


def test_drafts_are_compared_with_their_target(tmp_path: Path) -> None:
    for name in ("draft", "other", "target"):
        (tmp_path / name).mkdir()
    target = model(tmp_path / "target", whole(), **CONFIG)
    draft = model(tmp_path / "draft", eagle3("midlayer."), **SMALL)
    taps = {"eagle_aux_hidden_state_layer_ids": [0, 1, 9]}
    other = model(tmp_path / "other", eagle3("midlayer."), **SMALL, **taps)

    result = run("verify", draft, other, "--target", target, "--tier", "headers")

    assert [report["verdict"] for report in reports(result)] == ["ok", "findings"]
    assert [finding["rule"] for finding in reports(result)[1]["findings"]] == ["target-layer"]
    assert run("verify", draft, "--target", tmp_path / "none").exit_code == 1


@pytest.mark.parametrize(("last", "code"), [(SOUND, 1), ("", 2)], ids=["findings", "a usage error"])
def test_the_exit_code_of_several_is_the_worst(damaged: Path, last: Path | str, code: int) -> None:
    assert run("verify", SOUND, damaged, last).exit_code == code


def test_tables_of_several_say_whose_they_are(damaged: Path) -> None:
    shown = run("inspect", "--table", SOUND, damaged).stdout.splitlines()

    assert [line.strip() for line in shown if line.strip() in (str(SOUND), str(damaged))] == [
        str(SOUND),
        str(damaged),
    ]


@pytest.mark.slow
def test_progress_of_several_names_the_path() -> None:
    shown = on_a_terminal("verify", SOUND, AWQ, stderr=True, NO_COLOR="1")

    for path in (SOUND, AWQ):
        assert f"{path}: values: " in shown


def test_each_of_several_world_sizes_is_judged_and_named() -> None:
    result = run("verify", AWQ, "--tp", "1,2,4,8")

    messages = [finding["message"] for finding in json.loads(result.stdout)["findings"]]
    expected = [f for world in (2, 4, 8) for f in verify(AWQ, tp=world).findings]
    assert messages == [finding.message for finding in expected]
    assert {message.split(" ranks")[0].rpartition(" ")[2] for message in messages} == {"4", "8"}


def test_a_world_size_is_judged_once_however_often_it_is_named() -> None:
    assert verify(AWQ, tp=(4, 4)) == verify(AWQ, tp=[4]) == verify(AWQ, tp=4)


@pytest.mark.parametrize("sizes", ["0", "1,0", "", "1,", "a", "1.5", "-1", "1" * 20, "\u0664"])
def test_what_is_no_list_of_world_sizes_is_a_usage_error(sizes: str) -> None:
    assert run("verify", SOUND, f"--tp={sizes}").exit_code == 2


WRONG: dict[str, tuple[list[str], dict[str, str], int]] = {
    "an unknown option": (["verify", "x", "--tensor", "--json"], {}, 2),
    "an unknown verb": (["prove", "--json"], {}, 2),
    "no path": (["inspect", "--json"], {}, 2),
    "a variable": (["inspect", str(SOUND), "--json"], {"QLOAD_ISA": "foo"}, 2),
    "in a pipe": (["verify"], {}, 2),
}


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "variables", "code"), WRONG.values(), ids=WRONG)
def test_an_error_is_an_object_on_standard_output_and_text_on_standard_error(
    arguments: list[str], variables: dict[str, str], code: int
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "qload", *arguments],
        capture_output=True, text=True, check=False, cwd=ROOT, env={**os.environ, **variables},
    )  # fmt: skip

    told = json.loads(done.stdout)
    assert (told["schema"], told["verdict"], told["exit_code"], done.returncode) == (2, "error", code, code)
    assert "\n" not in done.stdout.removesuffix("\n")
    assert told["error"].split()[0] in done.stderr
    assert "Error: " in done.stderr


@pytest.mark.parametrize("arguments", [["verify", "--table"], ["formats", "--markdown", "--no"], []])
def test_where_no_json_was_asked_for_an_error_is_text_alone(arguments: list[str]) -> None:
    result = run(*arguments)

    assert result.exit_code == 2
    assert '"schema"' not in result.stdout


HOSTILE = 'a\x1b[2J\r\n"quoted\\" \u202e\u2028\0 </script> \udc80 ' + "x" * 5000


def test_json_of_a_hostile_finding_is_ascii_without_controls_and_all_of_it() -> None:
    report = Report(HOSTILE, (Finding("rule", "error", HOSTILE, HOSTILE, HOSTILE, HOSTILE),))

    for indent in (None, 2):
        text = dumps(report.to_json(), indent)
        assert text.isascii()
        assert text.replace("\n", "").isprintable()
        assert r"\udc80" not in text.replace(r"\\udc80", "")
        told = json.loads(text)["findings"][0]
        assert told["message"] == told["tensor"] == HOSTILE.replace("\udc80", r"\udc80")


def test_a_hostile_name_in_a_file_is_one_json_line_of_several(tmp_path: Path) -> None:
    name = 'a\x1b[2J"\n\u202e' + "x" * 900 + ".weight"
    save_file({name: torch.tensor([[float("nan")]])}, tmp_path / "model.safetensors")

    result = run("verify", tmp_path, tmp_path)

    assert [report["findings"][0]["tensor"] for report in reports(result)] == [name, name]
    assert "\x1b" not in result.stdout


def test_folders_are_those_of_the_files_each_once(tmp_path: Path) -> None:
    for name in ("a/config.json", "a/1.safetensors", "b/model.safetensors.index.json", "web/config.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    paths = [
        tmp_path / name for name in ("a/1.safetensors", "web/config.json", "a/config.json", "b", "gone/x")
    ]

    assert list(checkpoint_folders(paths)) == [tmp_path / "a", tmp_path / "b", tmp_path / "gone"]
