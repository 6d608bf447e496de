"""What a verb prints and how it ends: tables for people, JSON for programs, an exit code for both.

Beside JSON that goes to a pipe or a file, standard error has a summary.
"""

import json
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import click

from qload.cli.summary import summarize

if TYPE_CHECKING:
    from rich.console import RenderableType


class Printable(Protocol):
    """Result of a command: the exit code of its verdict, and plain data."""

    @property
    def exit_code(self) -> int:
        """Exit code of the verdict, from `qload.errors.verdicts.EXIT_CODES`."""

    def to_json(self) -> dict[str, Any]:
        """All of it."""


Found = TypeVar("Found", bound=Printable)


def emit(
    report: Found,
    as_json: bool | None,
    tables: "Callable[[Found], Iterable[RenderableType]]",
    summary: Callable[[Found], Iterable[str]],
    *,
    one_of_several: bool = False,
) -> int:
    """Print the report, by default as tables on a terminal and as JSON elsewhere; return the exit code.

    One of several reports is one line of JSON, so that the lines are read one by one, or as a stream; their
    `summary` is left to the verb.
    """
    if as_json or (as_json is None and not sys.stdout.isatty()):
        click.echo(dumps(report.to_json(), indent=None if one_of_several else 2))
    else:
        from qload.cli.console import stdout

        out = stdout()
        for table in tables(report):
            out.print(table)
    if not one_of_several:
        summarize(summary(report), as_json)
    return report.exit_code


def dumps(value: Any, indent: int | None = 2) -> str:
    """JSON in ASCII that every parser takes: half a surrogate pair, which a path may hold, is spelled out."""
    text = json.dumps(value, indent=indent)
    return json.dumps(_whole(value), indent=indent) if "\\ud" in text else text


def _whole(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {_whole(key): _whole(held) for key, held in value.items()}
    return [_whole(held) for held in value] if isinstance(value, list | tuple) else value
