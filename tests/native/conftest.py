"""Without the CPU module there is nothing to test here, which is said and not hidden."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from qload import native
from qload.kernels import cpu

HERE = Path(__file__).parent
WITHOUT = {
    HERE / f"test_{name}.py" for name in ("settings", "pages", "plain")
}  # what holds with and without native modules


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = native.load("cpu").reason
    if not missing:
        return
    skipped = {path for path in {item.path for item in items} if HERE in path.parents} - WITHOUT
    mark = pytest.mark.skip(reason=f"the CPU module is {missing}")
    for item in (item for item in items if item.path in skipped):
        item.add_marker(mark)


@pytest.fixture(scope="module", autouse=True)
def every_number_of_tokens() -> Iterator[None]:
    """Calls that the module leaves to torch, as that is faster, are tested too."""
    with pytest.MonkeyPatch.context() as patch:
        ranked = cpu.ranked
        patch.setattr(cpu, "ranked", lambda *cell: tuple(way for way in ranked(*cell) if way != cpu.TORCH))
        yield
