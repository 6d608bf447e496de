"""Progress of a verb on standard error: bytes, their rate, and the remaining time."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

import click

from qload.cli.text import escape

Update = Callable[[str, int, int], None]  # stage, bytes done, bytes in all

LINE_INTERVAL_S = 10.0  # between two lines of progress


def is_stderr_terminal() -> bool:
    """Return True if standard error is a terminal; a process started without one has sys.stderr None."""
    return sys.stderr is not None and sys.stderr.isatty()


@contextmanager
def progress_bar(*, visible: bool) -> Iterator[Update | None]:
    """Show a progress bar on a terminal until the block ends; None if it would be invisible.

    Under NO_COLOR it prints lines of text, because a bar moves the cursor with escape sequences.
    """
    if not visible or not is_stderr_terminal():
        yield None
        return
    from qload.cli.tables import is_color_disabled, stderr

    if is_color_disabled():
        yield print_lines()
        return
    from rich import progress as rich

    columns = (
        rich.TextColumn("{task.description}", markup=False),
        rich.BarColumn(),
        rich.DownloadColumn(),
        rich.TransferSpeedColumn(),
        rich.TimeRemainingColumn(),
    )
    with rich.Progress(*columns, console=stderr(), transient=True) as bar:
        task, current = bar.add_task("opening", total=None), ""

        def update(stage: str, done: int, total: int) -> None:
            nonlocal current
            if stage != current:  # each stage has its own rate
                bar.reset(task, description=escape(stage), total=total)
                current = stage
            bar.update(task, completed=done)

        yield update


def prefix_stages(update: Update | None, name: str) -> Update | None:
    """Prefix the stages of a progress with the name of one of several checkpoints."""
    if update is None:
        return None
    return lambda stage, done, total: update(f"{name}: {stage}", done, total)


def print_lines(clock: Callable[[], float] = monotonic) -> Update:
    """Print a line at the start of each stage, and then one per LINE_INTERVAL_S."""
    current, stage_start, last_line = "", 0.0, 0.0

    def update(stage: str, done: int, total: int) -> None:
        nonlocal current, stage_start, last_line
        now = clock()
        if stage == current and now - last_line < LINE_INTERVAL_S:
            return
        if stage != current:
            stage_start = now
        current, last_line = stage, now
        click.echo(f"{escape(stage)}: {format_progress(done, total, now - stage_start)}", err=True)

    return update


def format_progress(done: int, total: int, seconds: float) -> str:
    """Format bytes, rate and remaining time, as far as known: `512 of 4096 MB, 256 MB/s, 14 s left`."""
    text = f"{done / 1e6:.0f} of {total / 1e6:.0f} MB"
    if not done or seconds <= 0:
        return text
    rate = done / seconds
    return f"{text}, {rate / 1e6:.0f} MB/s, {(total - done) / rate:.0f} s left"
