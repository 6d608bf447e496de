"""What a verb prints and how it ends: tables for people, JSON for programs, an exit code for both."""

import json
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.console import RenderableType

    from qload.verify import Report


def emit(
    report: "Report", as_json: bool | None, tables: "Callable[[Report], Iterable[RenderableType]]"
) -> int:
    """Print the report, by default as tables on a terminal and as JSON elsewhere; return the exit code."""
    if as_json or (as_json is None and not sys.stdout.isatty()):
        click.echo(json.dumps(report.to_json(), indent=2))
    else:
        from qload.cli.console import stdout

        out = stdout()
        for table in tables(report):
            out.print(table)
    return 0 if report.verdict == "ok" else 1
