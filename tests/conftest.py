"""What all tests share: goldens, fixtures from outside, Hypothesis profiles, the rule for GPUs."""

import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings

from tests.example_counts import FEW, MANY, SOME
from tests.paths import FIXTURES

torch.set_num_threads(1)  # the workers share the cores already

HERE = Path(__file__).parent

settings.register_profile(
    "default", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=FEW
)
settings.register_profile("ci", settings.get_profile("default"), derandomize=True, print_blob=True)
USUAL = "ci" if os.environ.get("CI") else "default"
# Native code is fast, and its borders are many.
settings.register_profile("some", settings.get_profile(USUAL), max_examples=SOME)
# A fault has only to be noticed: no time goes into the smallest example of it.
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
    """Compares with a file under golden/. `nox -s golden` rewrites them."""
    pytest.importorskip("syrupy", reason="goldens are compared by syrupy, which is not installed here")
    from tests.support.golden_files import Golden

    return request.getfixturevalue("snapshot").use_extension(Golden)


@pytest.fixture
def golden_tensors(request: pytest.FixtureRequest) -> Any:
    """Compares tensors with their content under golden/; a mismatch says which rows and columns moved."""
    pytest.importorskip("syrupy", reason="goldens are compared by syrupy, which is not installed here")
    from tests.support.golden_files import GoldenTensors

    return request.getfixturevalue("snapshot").use_extension(GoldenTensors)


@pytest.fixture(scope="session")
def fixtures() -> Path:
    """The folder of input from outside."""
    return FIXTURES


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ten thousand tests of devices are not even collected by a run that says `not gpu`."""
    asked = config.getoption("markexpr")
    without = " or " not in asked and "not gpu" in asked.split(" and ")
    return True if without and collection_path == HERE / "gpu" else None


def pytest_collection_finish() -> None:
    """Twenty thousand tests stay as they are: no collection of garbage has to look at them again."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device; torch sees none")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """On a machine with a GPU, a run of `-m gpu` that executes no test has failed."""
    if session.config.getoption("markexpr") != "gpu" or not torch.cuda.is_available():
        return
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    executed = sum(len(reporter.stats.get(kind, ())) for kind in ("passed", "failed", "error"))
    if exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED) and not executed:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
