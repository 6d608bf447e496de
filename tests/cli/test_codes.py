"""Exit code of every command by its verdict (the worst of several paths); one line for an internal error."""

import json
import sys
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import save_file

from qload.cli.main import main
from qload.testing import make_checkpoint
from tests.support.unread import known_type

CODES = {"broken": 1, "findings": 1, "unread": 4, "foreign": 4, "sound": 0}
# Arguments of each verb on a checkpoint, in addition to the path.
VERBS: dict[str, list[str]] = {
    "inspect": [],
    "verify": [],
    "diff": ["{path}"],
    "plan": ["--tp", "1"],
    "explain": ["--arch", "sm90"],
    "convert": ["--to", "bf16", "--round", "-o", "{out}"],
    "shard": ["--tp", "1", "-o", "{out}"],
    "run": ["--prompt-ids", "1"],
    "bench-load": [],
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a checkpoint of each verdict."""
    there = tmp_path_factory.mktemp("codes")
    made = {name: there / name for name in CODES}
    make_checkpoint("gptq", made["sound"])
    known_type(made["unread"])
    for name in ("broken", "findings", "foreign"):
        made[name].mkdir()
    (made["broken"] / "model.safetensors").write_bytes(b"nothing")
    save_file({"a.weight": torch.full((4, 4), torch.nan)}, made["findings"] / "model.safetensors")
    (made["foreign"] / "model.onnx").write_bytes(bytes(60))
    return made


def run(verb: str, path: Path, out: Path, *more: str) -> Result:
    texts = {"{path}": str(path), "{out}": str(out / "made")}
    return CliRunner().invoke(
        main, [verb, str(path), *(texts.get(each, each) for each in VERBS[verb]), *more]
    )


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("name", ["foreign", "unread", "broken"])
def test_what_is_not_read_ends_every_verb_with_its_code(
    verb: str, name: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    result = run(verb, folders[name], tmp_path)

    expected = {"foreign": 4, "unread": 4, "broken": 1}[name]
    if (verb, name) == ("run", "broken"):
        expected = 2  # the check for config.json comes first
    assert result.exit_code == expected, result.output
    assert not (tmp_path / "made").exists()
    if name == "foreign":
        assert "ONNX" in result.output
        assert "ONNX Runtime runs it" in result.output


@pytest.mark.parametrize("verb", ["inspect", "verify"])
@pytest.mark.parametrize(
    ("names", "code"),
    [
        (["sound", "foreign"], 4), (["unread", "sound"], 4), (["foreign", "findings"], 1),
        (["broken", "unread", "sound"], 1), (["sound", "sound"], 0), (["unread", "findings", "foreign"], 1),
    ],
)  # fmt: skip
def test_of_several_paths_the_worst_counts(
    verb: str, names: list[str], code: int, folders: dict[str, Path]
) -> None:
    result = CliRunner().invoke(main, [verb, *(str(folders[name]) for name in names), "--json"])

    if verb == "inspect" and "findings" in names:  # inspect reads no values
        code = 4
    assert result.exit_code == code
    assert len(result.stdout.splitlines()) == len(names)


def test_a_bug_among_several_paths_is_worse_than_findings(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from qload.verify.checkpoint import VerifiedCheckpoint

    open_subject = VerifiedCheckpoint.open

    def failing(path: Any, **options: Any) -> Any:
        if str(path) == str(folders["sound"]):
            raise LookupError("lost")
        return open_subject(path, **options)

    monkeypatch.setattr(VerifiedCheckpoint, "open", failing)
    names = ("findings", "sound", "unread")
    result = CliRunner().invoke(main, ["verify", *(str(folders[name]) for name in names), "--json"])

    verdicts = [json.loads(line)["verdict"] for line in result.stdout.splitlines()]
    assert (result.exit_code, verdicts) == (3, ["findings", "internal", "incomplete"])


def fail(*_: Any, **__: Any) -> None:
    raise KeyError("G")


@pytest.mark.parametrize("verb", main.commands)
@pytest.mark.parametrize("verbose", ["", "before", "after"])
def test_a_bug_in_any_verb_ends_in_a_sentence(
    verb: str, verbose: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    command: click.Command = main.commands[verb]
    if isinstance(command, click.Group):
        command = next(iter(command.commands.values()))
        verb = f"{verb} {command.name}"
    monkeypatch.setattr(command, "callback", fail)
    monkeypatch.setattr(command, "params", [each for each in command.params if each.name == "verbose"])
    arguments = [*["-v"] * (verbose == "before"), *verb.split(), *["-v"] * (verbose == "after")]

    result = CliRunner().invoke(main, arguments)

    assert result.exit_code == 3
    told = result.stderr.strip().splitlines()
    assert told[-1].startswith("Error: internal error, KeyError: 'G'; this is a bug of qload")
    assert (len(told) > 1 and told[0].startswith("Traceback")) == bool(verbose)
    assert json.loads(result.stdout) == {
        "schema": 2, "verdict": "error", "error": "internal error, KeyError: 'G'", "exit_code": 3,
    }  # fmt: skip


def test_the_traceback_of_a_rule_is_shown_with_v(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from qload.verify import run_rules

    monkeypatch.setattr(run_rules, "NOTES", (fail,))

    plain = CliRunner().invoke(main, ["verify", str(folders["sound"]), "--json"])
    verbose = CliRunner().invoke(main, ["verify", str(folders["sound"]), "--json", "-v"])

    assert plain.exit_code == verbose.exit_code == 3
    assert "Traceback" not in plain.stderr
    assert "Traceback" in verbose.stderr


def test_the_speed_of_loading_is_not_measured_of_what_is_not_read(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exclude a measurement of the second reader, too."""
    monkeypatch.setattr(sys.modules["qload.cli.bench_load"], "_load_files", fail)

    assert CliRunner().invoke(main, ["bench-load", str(folders["unread"])]).exit_code == 4
    assert CliRunner().invoke(main, ["bench-load", str(folders["sound"])]).exit_code == 3
