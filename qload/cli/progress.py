"""How far a verb is, on standard error: bytes, their rate, and the time that is left."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

import click

from qload.cli.text import escape

Update = Callable[[str, int, int], None]

LINE_INTERVAL_S = 10.0  # seconds without a line of progress, where a bar would need escape sequences


def is_stderr_terminal() -> bool:
    """Whether somebody looks at standard error; Python has none where it was closed before it began."""
    return sys.stderr is not None and sys.stderr.isatty()


@contextmanager
def progress_bar(*, seen: bool = True) -> Iterator[Update | None]:
    """A bar on standard error that is gone when the work is done; None where nobody would see it.

    Under NO_COLOR it is lines of text, because a bar moves the cursor with escape sequences.
    """
    if not seen or not is_stderr_terminal():
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
        task, shown = bar.add_task("opening", total=None), ""

        def update(stage: str, done: int, total: int) -> None:
            nonlocal shown
            if stage != shown:  # a stage has a rate of its own
                bar.reset(task, description=escape(stage), total=total)
                shown = stage
            bar.update(task, completed=done)

        yield update


def prefix_stages(update: Update | None, name: str) -> Update | None:
    """The same progress, of one of several things: each stage has its name."""
    if update is None:
        return None
    tell = update
    return lambda stage, done, total: tell(f"{name}: {stage}", done, total)


def print_lines(clock: Callable[[], float] = monotonic) -> Update:
    """A line for each stage, and within a stage a line whenever PATIENCE has passed."""
    shown, begun, since = "", 0.0, 0.0

    def update(stage: str, done: int, total: int) -> None:
        nonlocal shown, begun, since
        now = clock()
        if stage == shown and now - since < LINE_INTERVAL_S:
            return
        begun = begun if stage == shown else now
        shown, since = stage, now
        click.echo(f"{escape(stage)}: {format_progress(done, total, now - begun)}", err=True)

    return update


def format_progress(done: int, total: int, seconds: float) -> str:
    """`512 of 4096 MB, 256 MB/s, 14 s left`; without what is not known yet."""
    text = f"{done / 1e6:.0f} of {total / 1e6:.0f} MB"
    if not done or seconds <= 0:
        return text
    rate = done / seconds
    return f"{text}, {rate / 1e6:.0f} MB/s, {(total - done) / rate:.0f} s left"
