"""The file of expected failures that an adopter keeps: cases, links to where they are told, reasons."""

from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from qload.errors import ArgumentError

FORM = "CASE LINK REASON, such as: gptq.v2.w4.g128.k256n128 https://example.org/issues/1 zero points are v1's"


@dataclass(frozen=True)
class ExpectedFailure:
    """One line.

    Attributes
    ----------
    case
        The id of a case, or `test[id]`; an asterisk stands for any text.
    link, reason
        Where the failure is told, and what it is.
    """

    case: str
    link: str
    reason: str

    def meets(self, test: str, case: str) -> bool:
        """Whether it is about a `test`, by its name, of a `case`, by its id."""
        known = self.case.replace("[", "[[]") if "[" in self.case else self.case
        return fnmatchcase(f"{test}[{case}]" if "[" in self.case else case, known)


def read(path: Path) -> tuple[ExpectedFailure, ...]:
    """The lines of a file at `path` but for empty ones and those that begin with #.

    ArgumentError for a file that is not there, or a line that has no link or no reason.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError("--qload-xfails", "a text file", f"{path}: {error}") from None
    found = []
    for number, line in enumerate(lines, 1):
        case, *rest = line.split(maxsplit=2)[:3] or [""]
        if not case or case.startswith("#"):
            continue
        if len(rest) != 2 or not rest[0].startswith(("https://", "http://")):
            raise ArgumentError(f"--qload-xfails: {path.name}, line {number}", FORM, repr(line))
        found.append(ExpectedFailure(case, *rest))
    return tuple(found)
