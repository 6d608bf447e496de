"""Hook for pre-commit: it receives files of checkpoints, and verifies each folder once."""

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from qload.cli import main
from tests.paths import FIXTURES, ROOT

SOUND = FIXTURES / "gptq" / "model_g32_desc_act"


@pytest.fixture
def hook() -> dict[str, Any]:
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    return hook  # type: ignore[no-any-return]


def run(hook: dict[str, Any], *more: Any) -> Result:
    """Run the hook like pre-commit: the entry, then arguments and names of files."""
    program, *arguments = shlex.split(hook["entry"])
    assert program == "qload"
    return CliRunner().invoke(main, [*arguments, *map(str, more)])


def test_the_hook_has_what_pre_commit_asks_for(hook: dict[str, Any]) -> None:
    assert (hook["id"], hook["language"]) == ("qload-verify", "python")
    assert {"name", "entry"} <= hook.keys()
    assert hook["require_serial"] is True  # otherwise several processes share the files of one folder


@pytest.mark.parametrize(
    ("name", "taken"),
    [
        ("model.safetensors", True),
        ("models/a/model-00001-of-00002.safetensors", True),
        ("a/model.safetensors.index.json", True),
        ("config.json", True),
        ("a/hf_quant_config.json", True),
        ("a/tokenizer_config.json", False),
        ("tsconfig.json", False),
        ("a/model.safetensors.py", False),
    ],
)
def test_the_hook_takes_the_files_that_verify_reads(hook: dict[str, Any], name: str, taken: bool) -> None:
    assert (re.search(hook["files"], name) is not None) is taken


def test_a_folder_is_judged_once_however_many_of_its_files_are_named(hook: dict[str, Any]) -> None:
    files = sorted(file for file in SOUND.iterdir() if re.search(hook["files"], str(file)))

    result = run(hook, *files)

    assert len(files) > 3
    assert result.exit_code == 0
    assert (
        result.stdout.split() == f"ok {SOUND}: 21 layers, 7 plain tensors, 100 % of 1.1 MiB explained".split()
    )


def test_a_damaged_checkpoint_beside_a_sound_one_fails_the_commit(
    hook: dict[str, Any], tmp_path: Path
) -> None:
    shutil.copytree(SOUND, tmp_path / "model")
    index = tmp_path / "model" / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["lost"] = "model-00001-of-00004.safetensors"
    index.write_text(json.dumps(content))

    result = run(hook, SOUND / "config.json", index)

    assert result.exit_code == 1
    assert "index-mismatch" in result.stdout


def test_options_of_the_user_come_before_the_files(hook: dict[str, Any]) -> None:
    assert run(hook, "--tp", "1,2", SOUND / "config.json").exit_code == 0


def test_a_config_that_is_no_checkpoints_is_passed_over(hook: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")

    result = run(hook, tmp_path / "config.json")

    assert (result.exit_code, result.stdout) == (0, "")
