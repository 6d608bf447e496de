"""SARIF output: mandatory properties of the 2.1.0 standard, and requirements of code scanning systems."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import save_file

from qload.cli import main
from qload.cli.output import dumps
from qload.cli.sarif import MAX_LOCATIONS_PER_RESULT, sarif_log
from qload.errors.reporting import qload_version
from qload.errors.rules import rule_pages, rule_texts
from qload.verify import Finding, Report, verify
from qload.verify.report import new_finding
from qload.verify.rules import RULES
from tests.paths import FIXTURES, ROOT

SOUND = FIXTURES / "gptq" / "model_g32_desc_act"
LEVELS = {"none", "note", "warning", "error"}
HOSTILE = 'a\x1b[2J\r\n"quoted\\" \u202e\0 \udc80 ' + "x" * 5000


def run(*arguments: Any) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def check(sarif: Any) -> list[dict[str, Any]]:
    """Return the results of a log, after a check of every mandatory property and its type."""
    assert sarif["version"] == "2.1.0"
    assert sarif["$schema"].endswith("sarif-schema-2.1.0.json")
    (one,) = sarif["runs"]
    driver = one["tool"]["driver"]
    assert driver["name"] == "qload"
    assert all(type(invocation["executionSuccessful"]) is bool for invocation in one["invocations"])
    ids = [rule["id"] for rule in driver["rules"]]
    assert len(ids) == len(set(ids))
    for rule in driver["rules"]:
        texts = [rule[key]["text"] for key in ("shortDescription", "fullDescription", "help") if key in rule]
        assert all(text and type(text) is str for text in texts)
    for result in one["results"]:
        check_result(result, ids)
    notes = [note for invocation in one["invocations"] for note in invocation["toolExecutionNotifications"]]
    assert all(note["level"] in LEVELS and note["message"]["text"] for note in notes)
    return list(one["results"])


def check_result(result: dict[str, Any], ids: list[str]) -> None:
    assert ids[result["ruleIndex"]] == result["ruleId"]
    assert result["level"] in LEVELS
    assert result["message"]["text"]
    assert all(type(mark) is str for mark in result["partialFingerprints"].values())
    assert result["locations"]
    for location in result["locations"]:
        uri = location["physicalLocation"]["artifactLocation"]["uri"]
        assert uri.isascii()
        assert uri.isprintable()
        assert " " not in uri
        assert urlsplit(uri).scheme in ("", "file")
        assert location["physicalLocation"]["region"]["startLine"] == 1
        for logical in location.get("logicalLocations", ()):
            assert type(logical["fullyQualifiedName"]) is str


@pytest.fixture
def damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a checkpoint with two findings of two causes, in a folder of the current directory."""
    monkeypatch.chdir(tmp_path)
    folder = Path("my models", "a%b")
    folder.mkdir(parents=True)
    nan = torch.tensor([[1.0, float("nan")]])
    save_file({"a.weight": nan, "b.weight": nan.nan_to_num(torch.inf)}, folder / "model.safetensors")
    return folder


def test_findings_of_one_cause_are_one_result_with_a_location_for_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = [f"layers.{layer}.{part}" for layer in range(2) for part in ("up", "down")]
    rule = rule_texts()["scale-value"]
    findings = [new_finding(rule, name, "model.safetensors", f"{name}: NaN") for name in names]
    other = new_finding(rule, "layers.0.up", "model.safetensors", "layers.0.up: zero")

    both, alone = check(sarif_log([Report(".", (*findings, other))]))

    logical = [location["logicalLocations"][0]["fullyQualifiedName"] for location in both["locations"]]
    assert logical == names
    assert both["properties"]["places"] == 4
    assert both["message"]["text"].startswith("4 places: NaN\nRemedy: fetch the file again")
    assert (len(alone["locations"]), alone["properties"]["places"]) == (1, 1)
    assert alone["message"]["text"].startswith("layers.0.up: zero\n")


def test_a_result_has_no_more_locations_than_readers_take() -> None:
    names = [f"layers.{layer}.up" for layer in range(MAX_LOCATIONS_PER_RESULT + 1)]
    findings = tuple(Finding("scale-value", "error", name, None, f"{name}: NaN") for name in names)

    (result,) = check(sarif_log([Report("a", findings)]))

    assert len(result["locations"]) == MAX_LOCATIONS_PER_RESULT
    assert result["properties"]["places"] == len(names)


def test_a_finding_is_a_result_with_file_and_tensor(damaged: Path) -> None:
    result = run("verify", damaged, "--sarif", "out.sarif")

    first, second = check(json.loads(Path("out.sarif").read_text()))
    (location,) = first["locations"]
    artifact = location["physicalLocation"]["artifactLocation"]
    assert (first["ruleId"], first["level"]) == ("float-value", "error")
    assert unquote(artifact["uri"]) == (damaged / "model.safetensors").as_posix()
    assert artifact["uriBaseId"] == "%SRCROOT%"
    assert location["logicalLocations"] == [{"fullyQualifiedName": "a.weight", "kind": "tensor"}]
    assert first["partialFingerprints"] != second["partialFingerprints"]
    assert first["message"]["text"].startswith(verify(damaged).findings[0].message)
    assert json.loads(result.stdout)["verdict"] == "findings"  # in addition to the report
    assert result.exit_code == 1


def test_findings_of_one_tensor_have_fingerprints_of_their_own(damaged: Path) -> None:
    finding = verify(damaged).findings[0]
    other = replace(finding, cause="another")

    results = check(sarif_log([Report(str(damaged), (finding, other))]))

    assert len({result["partialFingerprints"]["primaryLocationLineHash"] for result in results}) == 2


def test_one_file_holds_the_findings_of_all_paths_and_a_dash_is_standard_output(damaged: Path) -> None:
    result = run("verify", damaged, SOUND, "nothing", "--sarif", "-")

    sarif = json.loads(result.stdout)
    assert [found["ruleId"] for found in check(sarif)] == ["float-value", "float-value", "no-files"]
    assert (result.exit_code, Path("-").exists()) == (1, False)


def test_a_sound_checkpoint_has_no_result(tmp_path: Path) -> None:
    assert run("verify", SOUND, "--sarif", tmp_path / "out.sarif").exit_code == 0
    assert check(json.loads((tmp_path / "out.sarif").read_text())) == []


def test_a_file_outside_of_the_current_directory_has_its_whole_path(
    damaged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = damaged.resolve()
    monkeypatch.chdir(ROOT)

    (first, _) = check(sarif_log([verify(folder)]))

    artifact = first["locations"][0]["physicalLocation"]["artifactLocation"]
    assert unquote(urlsplit(artifact["uri"]).path) == (folder / "model.safetensors").as_posix()
    assert "uriBaseId" not in artifact


def test_notes_are_notifications_and_no_results() -> None:
    sarif = sarif_log([Report("a", notes=("worth knowing",))])

    assert check(sarif) == []
    (invocation,) = sarif["runs"][0]["invocations"]
    assert invocation["toolExecutionNotifications"] == [
        {"level": "note", "message": {"text": "worth knowing"}}
    ]


@pytest.mark.parametrize("severity", ["error", "warning"])
def test_hostile_text_of_any_length_is_json_that_every_parser_takes(severity: Any) -> None:
    finding = Finding("a rule of its own", severity, HOSTILE, HOSTILE, HOSTILE, HOSTILE)
    text = dumps(sarif_log([Report(HOSTILE, (finding,), (HOSTILE,))]))

    assert text.isascii()
    assert text.replace("\n", "").isprintable()
    (result,) = check(json.loads(text))
    assert result["level"] == severity
    assert result["message"]["text"].count("x" * 5000) == 2


def test_a_file_that_cannot_be_written_is_told_before_the_work(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "no" / "folder" / "out.sarif"):
        result = run("verify", SOUND, "--sarif", place)
        assert result.exit_code == 2
        assert "Invalid value for '--sarif'" in result.stderr


def test_every_rule_has_the_text_of_its_page() -> None:
    rules = {rule["id"]: rule for rule in sarif_log([])["runs"][0]["tool"]["driver"]["rules"]}

    assert {rule.id for rule in RULES} - {"layer"} <= rules.keys()
    for name, page in rule_pages().items():
        what, why, do = (page[part] for part in ("what", "why", "do"))
        assert rules[name] == {
            "id": name,
            "shortDescription": {"text": f"{what.partition('. ')[0].removesuffix('.')}."},
            "fullDescription": {"text": what},
            "help": {
                "text": f"{what}\n\nWhy it matters: {why}\n\nRemedy: {do}",
                "markdown": f"{what}\n\n**Why it matters.** {why}\n\n**Remedy.** {do}",
            },
        }


def test_a_result_has_rule_place_cause_and_a_stable_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a b.safetensors").touch()
    finding = Finding(
        "own-rule", "warning", "up.scales", "a b.safetensors", "up.scales: NaN", "mend it", "why"
    )
    log = sarif_log([Report(".", (finding, Finding("own-rule", "error", None, "gone", "gone: no", "", "x")))])

    first, second = log["runs"][0]["results"]
    rules = log["runs"][0]["tool"]["driver"]["rules"]
    mark = first["partialFingerprints"]["primaryLocationLineHash"].partition(":")[0]
    place = {"uri": "a%20b.safetensors", "uriBaseId": "%SRCROOT%"}
    written = json.dumps(["own-rule", place, "up.scales"], indent=2).encode()
    assert mark == hashlib.sha256(written).hexdigest()[:16]
    assert rules[-1] == {"id": "own-rule"}
    assert first == {
        "ruleId": "own-rule",
        "ruleIndex": len(rules) - 1,
        "level": "warning",
        "message": {"text": "up.scales: NaN\nRemedy: mend it"},
        "locations": [
            {
                "physicalLocation": {"artifactLocation": place, "region": {"startLine": 1}},
                "logicalLocations": [{"fullyQualifiedName": "up.scales", "kind": "tensor"}],
            }
        ],
        "properties": {"cause": "why", "places": 1},
        "partialFingerprints": {"primaryLocationLineHash": f"{mark}:1"},
    }
    assert second["locations"] == [
        {
            "physicalLocation": {
                "artifactLocation": {"uri": ".", "uriBaseId": "%SRCROOT%"},
                "region": {"startLine": 1},
            }
        }
    ]
    assert log["runs"][0]["invocations"][0]["executionSuccessful"] is True
    version = qload_version()
    driver = {name: value for name, value in log["runs"][0]["tool"]["driver"].items() if name != "rules"}
    assert driver == {"name": "qload", **({"version": version} if version else {})}
