"""Configuration of all tests: golden files, fixtures, Hypothesis profiles, the rule for GPUs."""

import gc
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings

from tests.example_counts import FEW, MANY, SOME
from tests.paths import FIXTURES

torch.set_num_threads(1)  # pytest-xdist already uses all cores

HERE = Path(__file__).parent

settings.register_profile(
    "default", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=FEW
)
settings.register_profile("ci", settings.get_profile("default"), derandomize=True, print_blob=True)
USUAL = "ci" if os.environ.get("CI") else "default"
# More examples for native code: it is fast and has many edge cases.
settings.register_profile("some", settings.get_profile(USUAL), max_examples=SOME)
# Mutation tests need a failure, not a minimal example.
settings.register_profile(
    "faults",
    settings.get_profile("default"),
    derandomize=True,
    max_examples=MANY,
    phases=(Phase.explicit, Phase.generate),
)
settings.load_profile(USUAL)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Any:
    """Compare text with a file under golden/; `nox -s golden` rewrites the files."""
    pytest.importorskip("syrupy", reason="goldens are compared by syrupy, which is not installed here")
    from tests.support.golden_files import Golden

    return request.getfixturevalue("snapshot").use_extension(Golden)


@pytest.fixture
def seen_texts(
    golden: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[None]:
    """Compare the texts of all reports and errors of a test with golden text, after the test.

    A module may name further classes in `SEEN_TOO`.
    """
    from tests.support import seen_texts

    seen = seen_texts.record(monkeypatch, *getattr(request.module, "SEEN_TOO", ()))
    torch.manual_seed(0)
    yield
    lines = dict.fromkeys(line for each in seen for line in seen_texts.lines_of(each))
    if lines:
        text = "\n".join(lines).replace(str(tmp_path), "TMP").replace(str(FIXTURES), "FIXTURES")
        assert text == golden


@pytest.fixture
def seen_logs(golden: Any, tmp_path: Path) -> Iterator[None]:
    """Compare the log lines of a test with golden text, after the test."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(f"{record.levelname} {record.getMessage()}")  # type: ignore[method-assign]
    log = logging.getLogger("qload")
    log.addHandler(handler)
    yield
    log.removeHandler(handler)
    if lines:
        assert "\n".join(lines).replace(str(tmp_path), "TMP") == golden


@pytest.fixture
def golden_tensors(request: pytest.FixtureRequest) -> Any:
    """Compare tensors with golden/ by content; a mismatch names the changed rows and columns."""
    pytest.importorskip("syrupy", reason="goldens are compared by syrupy, which is not installed here")
    from tests.support.golden_files import GoldenTensors

    return request.getfixturevalue("snapshot").use_extension(GoldenTensors)


@pytest.fixture
def cpu_module() -> Iterator[None]:
    """The CPU module; where it is not built, one in plain torch with the same functions."""
    from tests.kernels.cpu_by_hand import installed

    with installed():
        yield


@pytest.fixture(scope="session")
def fixtures() -> Path:
    """Return the folder of external fixtures."""
    return FIXTURES


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip the collection of ten thousand device tests in a run with `not gpu`."""
    asked = config.getoption("markexpr")
    without = " or " not in asked and "not gpu" in asked.split(" and ")
    return True if without and collection_path == HERE / "gpu" else None


def pytest_collection_finish() -> None:
    """Exclude twenty thousand collected tests from garbage collection."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device; torch sees none")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Fail a run of `-m gpu` without an executed test on a machine with a GPU."""
    if session.config.getoption("markexpr") != "gpu" or not torch.cuda.is_available():
        return
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    executed = sum(len(reporter.stats.get(kind, ())) for kind in ("passed", "failed", "error"))
    if exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED) and not executed:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
