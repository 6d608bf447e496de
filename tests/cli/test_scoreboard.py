"""The verb scoreboard: its tables, page and JSON from reports of suites, and refusals of broken reports."""

import json
import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_several import run

REPORT: dict[str, Any] = json.loads((Path(__file__).parent / "report.json").read_text())


def write(folder: Path, report: Any, name: str = "report.json") -> Path:
    path = folder / name
    path.write_text(report if isinstance(report, str) else json.dumps(report))
    return path


def changed(change: Any) -> dict[str, Any]:
    report = deepcopy(REPORT)
    change(report)
    return report


def only_passing(report: dict[str, Any]) -> None:
    report["tests"] = [test for test in report["tests"] if test["outcome"] != "failed"]


@pytest.mark.parametrize("form", ["--table", "--json", "--markdown"])
def test_two_reports_are_one_scoreboard(form: str, tmp_path: Path, golden: Any) -> None:
    gpu = changed(lambda report: (report.update(device="cuda", tier="gpu", isa=""), only_passing(report)))
    result = run("scoreboard", write(tmp_path, REPORT), write(tmp_path, gpu, "gpu.json"), form)

    assert result.exit_code == 1
    assert result.stdout == golden
    assert result.stderr == golden


def test_a_scoreboard_without_a_failure_ends_with_0(tmp_path: Path) -> None:
    assert run("scoreboard", write(tmp_path, changed(only_passing))).exit_code == 0


def test_a_known_failure_is_listed_as_known(tmp_path: Path) -> None:
    known = changed(lambda report: [test.update(outcome="xfailed") for test in report["tests"][4:]])
    result = run("scoreboard", write(tmp_path, known), "--markdown")

    assert "\noutputs-shifted: 2 tests, known\n" in result.stdout
    assert result.exit_code == 1


BROKEN: dict[str, Any] = {
    "no JSON": "",
    "list": [],
    "not a report": {"findings": []},
    "duplicate": '{"version": 1, "version": 1}',
    "future": changed(lambda report: report.update(version=2)),
    "tests": changed(lambda report: report.update(tests={})),
    "outcome": changed(lambda report: report["tests"][1].update(outcome="great")),
    "no case": changed(lambda report: report["tests"][2].pop("case")),
    "number": changed(lambda report: report["tests"][0].update({"error of bound": "0.1"})),
    "negative": changed(lambda report: report["tests"][0].update({"error of bound": -1})),
    "NaN": json.dumps(REPORT).replace("0.25", "NaN"),
    "infinite": json.dumps(REPORT).replace("0.25", "1e999"),
    "long name": changed(lambda report: report["tests"][0].update(subject="x" * 100_000)),
    "surrogate": json.dumps(REPORT).replace("torch.mm", "\\ud800"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_report_is_refused_by_file_and_field(name: str, tmp_path: Path, golden: Any) -> None:
    result = run("scoreboard", write(tmp_path, BROKEN[name]), "--table")

    assert (result.exit_code, result.stdout) == (1, "")
    assert "report.json: " in result.stderr
    assert result.stderr == golden


def test_a_deep_report_is_refused(tmp_path: Path) -> None:
    result = run("scoreboard", write(tmp_path, '{"tests":' + "[" * 100_000))

    assert (result.exit_code, json.loads(result.stdout)["verdict"]) == (1, "error")
    assert "report.json: JSON, expected a JSON object, got RecursionError" in result.stderr


def test_a_missing_report_is_a_wrong_command(tmp_path: Path) -> None:
    assert run("scoreboard", tmp_path / "none.json").exit_code == 2


HOSTILE = "a|b`c`\n```\n<script>x</script>\x1b[31m[l](javascript:0)"


def test_names_of_a_report_add_no_markup_to_the_page(tmp_path: Path) -> None:
    def spoil(report: dict[str, Any]) -> None:
        for test in report["tests"]:
            test.update(dict.fromkeys(("subject", "package", "version", "kind"), HOSTILE))
            test["test"] = f"{HOSTILE}::T::t[{test['case']}]"
            if test["outcome"] != "passed":
                test.update(dict.fromkeys(("reason", "failure", "fault", "replay"), HOSTILE))

    page = run("scoreboard", write(tmp_path, changed(spoil)), "--markdown").stdout

    rows = [line for line in page.splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {10}
    assert "\x1b" not in page
    assert page.count("\n```") == 2  # the beginning and the end of one block
    prose = re.sub(r"^```text$.*?^```$|`[^`\n|]*`", "", page, flags=re.MULTILINE | re.DOTALL)
    assert not re.search(r"(?<!\\)[<\]]", prose)


def test_tables_escape_names_of_a_report(tmp_path: Path) -> None:
    spoiled = changed(lambda report: [test.update(subject=HOSTILE) for test in report["tests"]])

    assert "\x1b" not in run("scoreboard", write(tmp_path, spoiled), "--table").stdout
