"""The base of every error qload raises on purpose: facts as fields, text made on print.

The tensor (or file) comes first, `expected` stands above `got`, and a remedy is given only
where it is certain. The facts survive pickling, so that a rank can hand them to another.
"""

from dataclasses import fields
from typing import Any, ClassVar


class QloadError(Exception):
    """Base of every error qload raises on purpose: its facts are fields, its text is made on print.

    Catching it catches all of them, and nothing else. Each is also the built-in error of its sort, such as
    ValueError or KeyError. `rule` is the stable id under which `verify` reports it. Errors can be pickled, so
    that one rank can hand them to another.
    """

    rule: ClassVar[str] = "error"

    def __reduce__(self) -> tuple[Any, ...]:
        if not hasattr(self, "__dataclass_fields__"):
            return type(self), self.args
        return type(self), tuple(getattr(self, f.name) for f in fields(self))  # type: ignore[arg-type]


def lines(first: str, *rest: object) -> str:
    """The first line, and under it, indented, those of the rest that say something."""
    return "\n  ".join([first, *(str(line) for line in rest if line)])
