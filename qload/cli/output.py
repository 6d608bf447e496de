"""Output of a command: tables, JSON, errors and exit codes, printed by rank 0 alone."""

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol, TypeVar

import click

from qload.cli.text import escape, print_summary
from qload.errors import (
    ArgumentError,
    CutError,
    DivideError,
    LostRankError,
    NotEnoughMemoryError,
    QloadError,
    UnreadTensorsError,
    UnsupportedFormatError,
)
from qload.errors.exceptions import written_to
from qload.errors.reporting import SCHEMA

if TYPE_CHECKING:
    from rich.console import RenderableType

    from qload.parallel import ProcessGroup

EXIT_UNREADABLE = 1
EXIT_WRONG_COMMAND = 2  # wrong arguments, environment or output path
EXIT_INTERNAL_ERROR = 3  # a bug of qload
EXIT_UNREAD = 4  # an unsupported format, or unread tensors
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as a shell reports it
EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE: neither 0 nor 1, because no verdict was delivered
# Errors of the command's arguments, not of the checkpoint.
COMMAND_ERRORS = (ArgumentError, CutError, DivideError, NotEnoughMemoryError)
TORCHRUN_VARIABLE = "TORCHELASTIC_RUN_ID"  # set by torchrun
RANK_TIMEOUT_S = 86_400.0  # for the work of other ranks; a lost rank is noticed at once


class Printable(Protocol):
    """Report of a command: the exit code of its verdict, and plain data."""

    @property
    def exit_code(self) -> int:
        """Exit code of the verdict, from `qload.errors.reporting.EXIT_CODES`."""

    def to_json(self) -> dict[str, Any]:
        """Return the whole report as plain data."""


PrintableT = TypeVar("PrintableT", bound=Printable)


class UnsupportedCommandError(Exception):
    """The checkpoint is readable, but its model does not support the command."""


def print_data(
    data: Any, as_json: bool | None, print_tables: Callable[[Any], None], summary: Iterable[str]
) -> None:
    """Print plain data, by default as tables on a terminal and as JSON elsewhere, and its summary."""
    if _prints_json(as_json):
        click.echo(dumps(data))
    else:
        print_tables(data)
    print_summary(summary, as_json)


def print_report(
    report: PrintableT,
    as_json: bool | None,
    tables: "Callable[[PrintableT], Iterable[RenderableType]]",
    summary: Callable[[PrintableT], Iterable[str]],
    *,
    one_of_several: bool = False,
) -> int:
    """Print the report, by default as tables on a terminal and as JSON elsewhere; return the exit code.

    One of several reports is one line of JSON Lines, and its `summary` is left to the verb.
    """
    if _prints_json(as_json):
        click.echo(dumps(report.to_json(), indent=None if one_of_several else 2))
    else:
        from qload.cli.tables import stdout

        out = stdout()
        for table in tables(report):
            out.print(table)
    if not one_of_several:
        print_summary(summary(report), as_json)
    return report.exit_code


def _prints_json(as_json: bool | None) -> bool:
    return not sys.stdout.isatty() if as_json is None else as_json


def dumps(value: Any, indent: int | None = 2) -> str:
    """Format a value as ASCII JSON for every parser: lone surrogates, legal in a path, are escaped."""
    text = json.dumps(value, indent=indent)
    return json.dumps(_escape_surrogates(value), indent=indent) if "\\ud" in text else text


def _escape_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {_escape_surrogates(key): _escape_surrogates(item) for key, item in value.items()}
    return [_escape_surrogates(item) for item in value] if isinstance(value, list | tuple) else value


def write_file(path: Path, text: str) -> None:
    """Write a text file in UTF-8; an OSError has its path."""
    with written_to(path):
        path.write_text(text, encoding="utf-8")


@contextmanager
def exit_on_error(as_json: bool, verbose: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Exit with the code of an interrupt, a closed pipe, a full disk or any error inside the block.

    `as_json`: print an error as an object on standard output too. `verbose`: print the traceback of a bug.
    """
    try:
        if sys.stdout is None:
            raise OSError("closed")
        yield
    except click.UsageError as error:
        if as_json:
            _print_error_json(error.format_message(), EXIT_WRONG_COMMAND)
        raise  # click prints it on standard error, below the usage
    except KeyboardInterrupt:
        click.echo(err=True)  # the terminal has just printed ^C
        raise click.exceptions.Exit(EXIT_INTERRUPTED) from None
    except BrokenPipeError:
        _discard_buffers(sys.stdout, sys.stderr)
        raise click.exceptions.Exit(EXIT_BROKEN_PIPE) from None
    except OSError as error:
        text = f"{error.filename or 'standard output'}: {error.strerror or error}"
        _print_error(text)
        if as_json and error.filename:
            _print_error_json(text, EXIT_WRONG_COMMAND)
        _discard_buffers(sys.stdout)
        raise click.exceptions.Exit(EXIT_WRONG_COMMAND) from None
    except (QloadError, UnsupportedCommandError) as error:
        code = _exit_code(error)
        _print_error(_join_error_lines(str(error)))
        if as_json:
            _print_error_json(str(error), code)
        raise click.exceptions.Exit(code) from None
    except (click.exceptions.Exit, click.ClickException, click.Abort):
        raise
    except Exception as error:
        if verbose():
            _print_traceback(error)
        text = f"internal error, {type(error).__name__}: {' '.join(str(error).split()):.400}"
        _print_error(f"{text}; this is a bug of qload: please report it; -v shows the traceback")
        if as_json:
            _print_error_json(text, EXIT_INTERNAL_ERROR)
        raise click.exceptions.Exit(EXIT_INTERNAL_ERROR) from None


def _exit_code(error: QloadError | UnsupportedCommandError) -> int:
    if isinstance(error, (*COMMAND_ERRORS, UnsupportedCommandError)):
        return EXIT_WRONG_COMMAND
    unread = error.rule in (UnreadTensorsError.rule, UnsupportedFormatError.rule)
    return EXIT_UNREAD if unread else EXIT_UNREADABLE


def _print_traceback(error: Exception) -> None:
    with suppress(OSError):  # standard error is closed
        click.echo(escape("".join(traceback.format_exception(error)), keep="\n\t", limit=1 << 20), err=True)


def _join_error_lines(text: str) -> str:
    """Join the lines of an error into one, with its remedy at the end."""
    facts, _, remedy = text.partition("\n  remedy ")
    line = ", ".join(" ".join(each.split()) for each in facts.splitlines())
    return f"{line}; remedy: {' '.join(remedy.split())}" if remedy else line


def _print_error(text: str) -> None:
    """Print one line on standard error, unless it is closed."""
    try:
        click.echo(f"Error: {escape(text)}", err=True)
    except OSError:
        _discard_buffers(sys.stderr)


def _print_error_json(text: str, code: int) -> None:
    """Print the error as a JSON object in one line; its verdict "error" tells it from a report."""
    with suppress(OSError):  # standard error has the text
        facts = {"schema": SCHEMA, "verdict": "error", "error": text, "exit_code": code}
        click.echo(dumps(facts, indent=None))


def _discard_buffers(*streams: IO[str] | None) -> None:
    """Redirect streams to the null device, so that Python does not flush them again at exit."""
    for stream in streams:
        with suppress(OSError, AttributeError):  # the stream of a test has no file descriptor
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # type: ignore[union-attr]


@contextmanager
def torchrun_group() -> "Iterator[ProcessGroup | None]":
    """Join the process group that torchrun launched; None outside of torchrun.

    An error of all ranks is printed by rank 0; the other ranks exit with 0.
    """
    if TORCHRUN_VARIABLE not in os.environ:
        yield None
        return
    from qload.parallel import joined_world

    with (
        exit_quietly_unless_first(lambda: int(os.environ["RANK"])),
        joined_world(timeout_s=RANK_TIMEOUT_S) as group,
    ):
        yield group


@contextmanager
def exit_quietly_unless_first(rank: Callable[[], int]) -> Iterator[None]:
    """Exit with 0 for an error inside the block on a rank above 0: rank 0 prints it.

    A lost rank is an error of every other rank, and is raised on all of them.
    """
    try:
        yield
    except QloadError as error:
        if rank() > 0 and not isinstance(error, LostRankError):
            raise click.exceptions.Exit(0) from error
        raise


def is_first_rank(group: "ProcessGroup | None") -> bool:
    """Return True on the rank that prints: rank 0, or a process outside of torchrun."""
    return group is None or group.rank() == 0


def exit_other_ranks(ctx: click.Context) -> None:
    """Exit with 0 on every rank of torchrun but rank 0, in a verb with little work."""
    if TORCHRUN_VARIABLE in os.environ and int(os.environ["RANK"]) > 0:
        ctx.exit(0)
