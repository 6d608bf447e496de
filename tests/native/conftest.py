"""Without the CPU module there is nothing to test here, which is said and not hidden."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from qload import native
from qload.kernels import cpu

HERE = Path(__file__).parent
WITHOUT = {"test_settings.py", "test_pages.py", "test_plain.py"}  # what holds with and without native modules


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = native.load("cpu").reason
    for item in items:
        if missing and HERE in item.path.parents and item.path.name not in WITHOUT:
            item.add_marker(pytest.mark.skip(reason=f"the CPU module is {missing}"))


@pytest.fixture(scope="module", autouse=True)
def every_number_of_tokens() -> Iterator[None]:
    """Calls that the module leaves to torch, as that is faster, are tested too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "PAIRED", "")
        yield
