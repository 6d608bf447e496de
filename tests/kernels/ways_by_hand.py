"""A table of ways on a CPU that a test writes."""

from collections.abc import Callable, Iterator

import pytest

from qload.kernels import cpu_choice

Write = Callable[[dict[cpu_choice.Cell, list[tuple[int, tuple[str, ...]]]]], None]


@pytest.fixture
def write_ways(monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Puts rows in the place of the whole table."""

    def write(rows: dict[cpu_choice.Cell, list[tuple[int, tuple[str, ...]]]]) -> None:
        monkeypatch.setattr(cpu_choice, "ROWS", rows)
        cpu_choice.ranked.cache_clear()

    yield write
    cpu_choice.ranked.cache_clear()
