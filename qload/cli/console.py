"""Where rich prints: never markup from a checkpoint, never a name cut short."""

import os
import sys
from typing import TextIO

from rich.console import Console

WIDTH = 120  # of what does not go to a terminal


class _Console(Console):
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
