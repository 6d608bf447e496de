"""A table of ways on a CPU that a test writes."""

from collections.abc import Callable, Iterator

import pytest

from qload.kernels import cpu

Write = Callable[[dict[cpu.Cell, list[tuple[int, tuple[str, ...]]]]], None]


@pytest.fixture
def write_ways(monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Puts rows in the place of the whole table."""

    def write(rows: dict[cpu.Cell, list[tuple[int, tuple[str, ...]]]]) -> None:
        monkeypatch.setattr(cpu, "ROWS", rows)
        cpu.ranked.cache_clear()

    yield write
    cpu.ranked.cache_clear()
