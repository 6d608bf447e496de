"""Where rich prints: never markup from a checkpoint, never a name cut short or broken over two lines."""

import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TextIO

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions
from rich.text import Text

WIDTH = 120  # columns of a console that is no terminal
WORD = re.compile(r"[^ ]+ *")
GLUE = "\xa0"  # a space that is no place to break a line, and is printed as an ordinary one


@dataclass(frozen=True)
class Paragraph:
    """Text that is wrapped between words alone; a word wider than the console stays whole.

    `indent`: columns in front of each line.
    """

    text: Text
    indent: int = 0

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> Iterator[Text]:
        for line in self.text.split(allow_blank=True):
            for part in line.divide(_breaks(line.plain, options.max_width - self.indent)):
                part.rstrip()
                part.plain = part.plain.replace(GLUE, " ")
                whole = Text(" " * self.indent if part else "", no_wrap=True, overflow="ignore")
                yield whole.append_text(part)


def glued(text: str) -> str:
    """The text as one word of a paragraph, whatever spaces are in it."""
    return text.replace(" ", GLUE)


def _breaks(line: str, width: int) -> list[int]:
    """Offsets at which a line is broken; what a line begins with stays before its first word."""
    breaks, start = list[int](), 0
    for word in list(WORD.finditer(line))[1:]:
        if cell_len(line[start : word.end()].rstrip()) > width:
            breaks.append(start := word.start())
    return breaks


class _Console(Console):
    def print(self, *objects: Any, **settings: Any) -> None:
        """Print texts as paragraphs."""
        whole = [Paragraph(each) if isinstance(each, Text) else each for each in objects]
        super().print(*whole, **{"crop": False, **settings})

    def on_broken_pipe(self) -> None:
        """Raise it to the group of verbs: rich itself would leave with 1, which means findings here."""
        raise


def stdout() -> Console:
    """For data."""
    return _make(sys.stdout)


def stderr() -> Console:
    """For progress."""
    return _make(sys.stderr)


def plain() -> bool:
    """Whether NO_COLOR asks for no escape sequence: no colour, no bold, no cursor that moves."""
    return bool(os.environ.get("NO_COLOR"))


def _make(file: TextIO) -> Console:
    if hasattr(file, "reconfigure") and "utf" not in (file.encoding or "").lower():
        file.reconfigure(errors="backslashreplace")  # a name outside of the terminal's alphabet is no crash
    fixed = None if file.isatty() or "COLUMNS" in os.environ else WIDTH
    # NO_COLOR leaves rich its bold and dim; without a color system rich has neither.
    return _Console(
        file=file,
        width=fixed,
        markup=False,
        emoji=False,
        highlight=False,
        color_system=None if plain() else "auto",
    )
