"""Without the CPU module there is nothing to test here, which is said and not hidden."""

from pathlib import Path

import pytest

from qload import native

HERE = Path(__file__).parent
WITHOUT = {"test_settings.py", "test_pages.py", "test_plain.py"}  # what holds with and without native modules


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = native.load("cpu").reason
    for item in items:
        if missing and HERE in item.path.parents and item.path.name not in WITHOUT:
            item.add_marker(pytest.mark.skip(reason=f"the CPU module is {missing}"))
