"""CI workflows: sessions of `.ci/run` on Linux; every other job has the mark "not yet run"."""

import re
import shlex
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.paths import ROOT

SCRIPT = ROOT / ".ci" / "run"
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
CALL = re.compile(r"^session (.*?)(?=\s+(?:\d?>|\||&)|$)", re.MULTILINE)
NOT_YET_RUN = "not yet run"

Session = tuple[str, tuple[str, ...]]  # a session of nox and the arguments after `--`

pytestmark = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")


def sessions(arguments: str) -> set[Session]:
    """Return the sessions of `nox -s ARGUMENTS`."""
    words = shlex.split(arguments)
    end = words.index("--") if "--" in words else len(words)
    return {(name, tuple(words[end + 1 :])) for name in words[:end]}


def called_by_script() -> set[Session]:
    """Return the sessions of `.ci/run`, from its calls of the function `session`."""
    return {session for arguments in CALL.findall(SCRIPT.read_text()) for session in sessions(arguments)}


def jobs() -> Iterator[tuple[str, dict[str, Any]]]:
    for workflow in WORKFLOWS:
        for name, job in yaml.safe_load(workflow.read_text())["jobs"].items():
            yield f"{workflow.stem}.{name}", job


def is_linux(job: dict[str, Any]) -> bool:
    return str(job["runs-on"]).startswith("ubuntu-")


def commands(job: dict[str, Any]) -> list[str]:
    return [step["run"] for step in job["steps"] if "run" in step]


LINUX = {name: job for name, job in jobs() if is_linux(job)}


@pytest.mark.parametrize("name", LINUX)
def test_each_linux_step_is_a_session_of_the_script(name: str) -> None:
    for command in commands(LINUX[name]):
        assert command.startswith("nox -s ")
        assert sessions(command.removeprefix("nox -s ")) <= called_by_script()


def test_the_linux_jobs_run_every_session_of_the_script() -> None:
    run = [command.removeprefix("nox -s ") for job in LINUX.values() for command in commands(job)]

    assert called_by_script() <= {session for arguments in run for session in sessions(arguments)}


def test_a_job_on_another_system_or_python_is_marked() -> None:
    marked = {name: NOT_YET_RUN in job["name"] for name, job in jobs()}

    assert marked == {name: not is_linux(job) or "strategy" in job for name, job in jobs()}


@pytest.mark.parametrize("arguments", ["gpu", "unit -- -x", 'unit -- -m "slow"', "docs gpu", "lint -- ."])
def test_a_session_that_the_script_does_not_call_is_noticed(arguments: str) -> None:
    assert not sessions(arguments) <= called_by_script()


def test_code_of_a_pull_request_never_reaches_a_self_hosted_runner() -> None:
    for workflow in WORKFLOWS:
        content = yaml.safe_load(workflow.read_text())
        if any("self-hosted" in job["runs-on"] for job in content["jobs"].values()):
            assert content[True].keys() <= {"push", "workflow_dispatch"}  # YAML reads the key `on` as true


def test_the_hooks_need_what_lint_needs() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]

    assert {need for hook in hooks for need in hook["additional_dependencies"]} <= {*groups["lint"]}
