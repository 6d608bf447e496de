"""Commands without an import of torch, in separate processes: the import takes seconds."""

import ctypes
import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from qload.cli import main
from tests.paths import FIXTURES, ROOT

# Runs the commands of standard input, a JSON array of arguments a line, in one process.
RUN = """
import contextlib, io, json, sys
from qload.cli import main

for line in sys.stdin:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            code = main(json.loads(line), prog_name="qload")
        except SystemExit as end:
            code = end.code
    print(json.dumps([code, "torch" in sys.modules, out.getvalue()]))
"""
# Inspects the checkpoints of standard input, a path a line, in one process where an import of torch fails.
INSPECT = """
import json, sys

sys.modules["torch"] = None
from qload import inspect

for line in sys.stdin:
    report = inspect(line.strip())
    print(json.dumps([report.verdict, len(report.layers), [finding.message for finding in report.findings]]))
"""
VERBS = {  # arguments of each verb for a path
    "inspect": ["inspect", "{path}"],
    "verify": ["verify", "{path}"],
    "diff": ["diff", "{path}", "{path}"],
    "plan": ["plan", "{path}"],
    "explain": ["explain", "{path}"],
    "convert": ["convert", "{path}", "--to", "awq", "-o", "{out}"],
    "shard": ["shard", "{path}", "--tp", "2", "-o", "{out}"],
    "run": ["run", "{path}", "--prompt-ids", "1,2"],
    "bench-load": ["bench-load", "{path}"],
}
Ended = tuple[int, bool, str]  # exit code, whether torch was imported, all output


def ended(commands: list[list[str]]) -> list[Ended]:
    lines = "".join(f"{json.dumps(command)}\n" for command in commands)
    done = subprocess.run(
        [sys.executable, "-c", RUN], input=lines, capture_output=True, text=True, cwd=ROOT, check=True
    )
    return [(code, imported, out) for code, imported, out in map(json.loads, done.stdout.splitlines())]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, int, str]]:
    """Return paths without a checkpoint, each with the exit code and a part of the reason."""
    folder = tmp_path_factory.mktemp("paths")
    (folder / "empty").mkdir()
    (folder / "pickle").mkdir()
    (folder / "pickle" / "pytorch_model.bin").touch()
    (folder / "text.txt").write_text("no tensors")
    (folder / "model.safetensors.index.json").write_text("{")
    return {
        "missing": (folder / "missing", 1, "no such file"),
        "empty": (folder / "empty", 1, "no *.safetensors file"),
        "pickle": (folder / "pickle", 4, "pytorch_model.bin is a pickle"),
        "text": (folder / "text.txt", 1, "text.txt"),
        "index": (folder / "model.safetensors.index.json", 1, "index.json"),
    }


def test_every_verb_refuses_a_path_without_a_checkpoint_before_it_imports_torch(
    paths: dict[str, tuple[Path, int, str]], tmp_path: Path
) -> None:
    assert VERBS.keys() == {
        name
        for name, command in vars(main)["commands"].items()
        if any(type(each.type).__name__ == "CheckpointPath" for each in command.params)
    }
    cases = [(verb, *case) for verb in VERBS for case in paths.values()]
    out = tmp_path / "out"
    commands = [[part.format(path=path, out=out) for part in VERBS[verb]] for verb, path, _, _ in cases]

    for (verb, path, code, reason), found in zip(cases, ended(commands), strict=True):
        assert found[:2] == (code, False), (verb, path, found)
        assert reason in found[2], (verb, path, found)
    assert not out.exists()


def test_the_sarif_log_of_a_wrong_path_is_written_without_torch(
    paths: dict[str, tuple[Path, int, str]], tmp_path: Path
) -> None:
    path, code, reason = paths["missing"]
    written = tmp_path / "report"

    (found,) = ended([["verify", str(path), "--sarif", str(written)]])

    assert found[:2] == (code, False), found
    assert reason in written.read_text()


def test_a_wrong_path_is_refused_before_the_ids_of_accepted_rules_are_checked(
    paths: dict[str, tuple[Path, int, str]], tmp_path: Path
) -> None:
    path, code, reason = paths["missing"]
    command = ["convert", str(path), "--to", "awq", "-o", str(tmp_path / "out"), "--accept", "layer-count"]

    (found,) = ended([command])

    assert found[:2] == (code, False), found
    assert reason in found[2]


@pytest.mark.parametrize("form", ["--json", "--table"])
def test_inspect_does_not_import_torch(form: str) -> None:
    """One model per kind of values that a description needs: groups, zero points, a shape, JSON, stacks."""
    models = [
        "gptq/model_g32_desc_act",
        "awq/model_gemm_g64",
        "compressed_tensors/pack_w4_g32_asym",
        "bnb/nf4_nested_bf16_storage_128x256",
        "exl2/b4_3_g64_384x32",
        "exl3/mcg_b1_128x128",
        "models/mxfp4_gpt_oss",
    ]
    commands = [["inspect", str(FIXTURES / model), form] for model in models]

    for command, (code, imported, out) in zip(commands, ended(commands), strict=True):
        assert (code, imported) == (0, False), (command, out)


def test_every_fixture_is_inspected_where_an_import_of_torch_fails() -> None:
    models = sorted(path.parent for path in FIXTURES.rglob("config.json"))
    done = subprocess.run(
        [sys.executable, "-c", INSPECT],
        input="".join(f"{model}\n" for model in models),
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    found = dict(zip(models, map(json.loads, done.stdout.splitlines()), strict=True))

    assert len(models) > 100
    for model, (verdict, layers, messages) in found.items():
        refused = model.parent.name == "refused"
        assert (verdict, layers > 0) == (("unsupported", False) if refused else ("ok", True)), (
            model,
            messages,
        )


def test_help_the_version_and_the_doctor_do_not_import_torch() -> None:
    helps = [[name, "--help"] for name in vars(main)["commands"]]
    commands = [["--help"], ["--version"], ["doctor"], ["doctor", "--table"], *helps]

    for command, (code, imported, out) in zip(commands, ended(commands), strict=True):
        assert (code, imported) == (0, False), (command, out)
        assert out


def test_the_doctor_imports_torch_where_it_is_to() -> None:
    report = json.loads(CliRunner().invoke(main, ["doctor", "--torch", "--json"]).stdout)
    words = CliRunner().invoke(main, ["doctor", "--torch", "--table"])

    assert report["threads"] == torch.get_num_threads()
    assert len(report["torch_devices"]) == torch.cuda.device_count()
    assert report["kernels"].keys() == {"2", "3", "4", "8"}
    assert words.exit_code == 0
    assert f"4 bits: {report['kernels']['4']}" in words.stdout


def driver(names: list[bytes], **statuses: int) -> SimpleNamespace:
    """Return a CUDA driver of devices with `names`; `statuses` has the results of its functions by name."""

    def count(number: Any) -> int:
        number._obj.value = len(names)
        return statuses.get("cuDeviceGetCount", 0)

    def device(place: Any, at: int) -> int:
        place._obj.value = at
        return statuses.get("cuDeviceGet", 0)

    def name(buffer: Any, size: int, place: Any) -> int:
        buffer.value = names[place.value][: size - 1]
        return statuses.get("cuDeviceGetName", 0)

    return SimpleNamespace(
        cuInit=lambda flags: statuses.get("cuInit", 0),
        cuDeviceGetCount=count,
        cuDeviceGet=device,
        cuDeviceGetName=name,
    )


@pytest.mark.parametrize(
    ("library", "names", "reason"),
    [
        (driver([b"one", b"two"]), ["one", "two"], ""),
        (driver([]), [], "the CUDA driver has no device"),
        (driver([b"one"], cuInit=100), [], "the CUDA driver answers with error 100"),
        (driver([b"one"], cuDeviceGetCount=3), [], "the CUDA driver answers with error 3"),
        (driver([b"one"], cuDeviceGet=101), [], "the CUDA driver answers with error 101 for device 0"),
        (
            driver([b"one"], cuDeviceGetName=1),
            [],
            "the CUDA driver answers with error 1 for the name of device 0",
        ),
        (None, [], "no CUDA driver: not there"),
    ],
)
def test_the_doctor_has_the_devices_of_the_driver_or_the_reason_why_there_are_none(
    monkeypatch: pytest.MonkeyPatch, library: SimpleNamespace | None, names: list[str], reason: str
) -> None:
    def load(name: str) -> SimpleNamespace:
        if library is None:
            raise OSError("not there")
        return library

    monkeypatch.setattr(ctypes, "CDLL", load)
    report = json.loads(CliRunner().invoke(main, ["doctor", "--json"]).stdout)
    words = CliRunner().invoke(main, ["doctor", "--table"]).stdout

    assert (report["cuda_devices"], report["no_cuda"]) == (names, reason)
    assert (", ".join(names) or reason) in " ".join(words.split())


def doctor_lines() -> dict[str, str]:
    """Return the facts of the doctor by name."""
    lines = CliRunner().invoke(main, ["doctor", "--table"]).stdout.splitlines()
    return {line[:13].strip(): line[13:].strip() for line in lines}


@pytest.mark.parametrize(
    ("version", "shown"),
    [
        ("__version__ = '9.1'\ncuda = '13.5'", "9.1, built for CUDA 13.5"),
        ("__version__ = '9.1+cpu'\ncuda = None", "9.1+cpu"),
        (None, "9.2"),
    ],
)
def test_the_doctor_reads_the_version_of_torch_from_its_files(
    version: str | None, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if version is not None:
        (tmp_path / "torch").mkdir()
        (tmp_path / "torch" / "version.py").write_text(version)
    found = SimpleNamespace(version="9.2", locate_file=lambda name: tmp_path / name)
    monkeypatch.setattr(metadata, "distribution", lambda name: found if name == "torch" else None)

    assert doctor_lines()["torch"] == shown


def test_the_doctor_says_what_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    for name in ("QLOAD_ISA", "QLOAD_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    facts = doctor_lines()

    assert (facts["torch"], facts["threads"]) == ("not installed", "as many as torch uses")
    monkeypatch.setenv("QLOAD_NUM_THREADS", "3")
    assert doctor_lines()["threads"] == "3"
    monkeypatch.setenv("QLOAD_NUM_THREADS", "none")
    result = CliRunner().invoke(main, ["doctor", "--json"])
    (error,) = json.loads(result.stdout)["wrong"]
    assert error.startswith("QLOAD_NUM_THREADS\n  expected ")
    assert result.exit_code == 1
