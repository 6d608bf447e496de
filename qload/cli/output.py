"""What a verb prints and how it ends: tables for people, JSON for programs, an exit code for both."""

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import TYPE_CHECKING

import click

from qload.cli.text import safe

if TYPE_CHECKING:
    from rich.console import RenderableType

    from qload.verify import Report

Update = Callable[[str, int, int], None]

PATIENCE = 10.0  # seconds without a line of progress, where a bar would need escape sequences


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


@contextmanager
def progress_bar() -> Iterator[Update | None]:
    """A bar on standard error that is gone when the work is done; None where nobody would see it.

    Under NO_COLOR it is lines of text, because a bar moves the cursor with escape sequences.
    """
    if sys.stderr is None or not sys.stderr.isatty():
        yield None
        return
    from qload.cli.console import plain, stderr

    if plain():
        yield _lines()
        return
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    text = TextColumn("{task.description}", markup=False)
    with Progress(
        text, BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), console=stderr(), transient=True
    ) as bar:
        task = bar.add_task("opening", total=None)

        def update(stage: str, done: int, total: int) -> None:
            bar.update(task, description=safe(stage), completed=done, total=total)

        yield update


def _lines() -> Update:
    """A line for each stage, and within a stage a line whenever PATIENCE has passed."""
    shown, since = "", 0.0

    def update(stage: str, done: int, total: int) -> None:
        nonlocal shown, since
        if stage == shown and monotonic() - since < PATIENCE:
            return
        shown, since = stage, monotonic()
        click.echo(f"{safe(stage)}: {done} of {total}", err=True)

    return update
