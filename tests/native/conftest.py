"""Without the CPU module its callers are tested on one in plain torch, and its own tests are skipped."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from qload import native
from qload.kernels import cpu
from tests.kernels.cpu_by_hand import installed

HERE = Path(__file__).parent
WITHOUT = {HERE / f"test_{name}.py" for name in ("modules", "pages", "plain")}
BY_HAND = {  # tests of the callers, which are as sound on a module in plain torch
    HERE / f"test_{name}.py"
    for name in ("codes", "declared_rows", "dequantize", "eetq_pairs", "kept_plans", "orders", "packings")
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = native.load("cpu").reason
    if not missing:
        return
    skipped = {path for path in {item.path for item in items} if HERE in path.parents} - WITHOUT - BY_HAND
    mark = pytest.mark.skip(reason=f"the CPU module is {missing}")
    for item in (item for item in items if item.path in skipped):
        item.add_marker(mark)


@pytest.fixture(scope="module", autouse=True)
def module_by_hand(request: pytest.FixtureRequest) -> Iterator[None]:
    """A module in plain torch for tests of the callers."""
    if request.path in BY_HAND:
        with installed():
            yield
    else:
        yield


@pytest.fixture(scope="module", autouse=True)
def every_number_of_tokens() -> Iterator[None]:
    """Calls that the module leaves to torch, as that is faster, are tested too."""
    with pytest.MonkeyPatch.context() as patch:
        ranked = cpu.ranked
        patch.setattr(cpu, "ranked", lambda *cell: tuple(way for way in ranked(*cell) if way != cpu.TORCH))
        yield
