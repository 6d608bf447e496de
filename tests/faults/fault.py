"""A seeded fault: one place of the source, changed on purpose."""

from dataclasses import dataclass
from pathlib import Path

from qload.errors import ArgumentError


@dataclass(frozen=True)
class Fault:
    """A change of the one `before` in `file` to `after`.

    `package`, `tests`: the engine that has to be installed, and the tests of its session; None: all tests.
    """

    name: str
    file: str
    before: str
    after: str
    package: str | None = None
    tests: tuple[str, ...] = ()

    def apply(self, root: Path) -> None:
        """Change the file of a project under `root`; ArgumentError unless `before` is in it once."""
        path = root / self.file
        text = path.read_text()
        if text.count(self.before) != 1:
            found = f"{text.count(self.before)} times in {self.file}"
            raise ArgumentError(f"fault {self.name}", f"{self.before!r} once", found)
        path.write_text(text.replace(self.before, self.after))
