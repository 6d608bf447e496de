"""A seeded fault: one place of the product, broken on purpose."""

from dataclasses import dataclass
from pathlib import Path

from qload.errors import ArgumentError


@dataclass(frozen=True)
class Fault:
    """`before`, which stands once in `file`, becomes `after`.

    `package`, `tests`: of an engine that has to be installed, and the tests that it has; None: all tests.
    """

    name: str
    file: str
    before: str
    after: str
    package: str | None = None
    tests: tuple[str, ...] = ()

    def apply(self, root: Path) -> None:
        """Break the copy of the project under `root`."""
        path = root / self.file
        text = path.read_text()
        if text.count(self.before) != 1:
            found = f"{text.count(self.before)} times in {self.file}"
            raise ArgumentError(f"fault {self.name}", f"{self.before!r} once", found)
        path.write_text(text.replace(self.before, self.after))
