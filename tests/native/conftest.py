"""Without the CPU module there is nothing to test here, which is said and not hidden."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from qload import native
from qload.kernels import cpu, cpu_choice
from qload.spec import Weight

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
        patch.setattr(cpu, "ways_of", ways_of_our_own)
        yield


def ways_of_our_own(
    weight_type: type[Weight], bits: int | None, dtype: torch.dtype, tokens: int
) -> tuple[str, ...]:
    """Those that are not torch's, the fastest first."""
    kind, width = cpu_choice.kind_of(weight_type), bits or cpu_choice.row_bits(weight_type)
    ways = cpu_choice.ranked(kind, width, dtype, native.isa(), tokens)
    return tuple(way for way in ways if way != cpu_choice.TORCH)
