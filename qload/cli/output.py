"""Output of a command: tables, JSON, errors and exit codes, printed by the first rank alone."""

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING, Any, Protocol, TypeVar

import click

from qload.cli.text import escape, print_summary
from qload.errors import (
    ArgumentError,
    CutError,
    DivideError,
    NotEnoughMemoryError,
    QloadError,
    UnreadTensorsError,
    UnsupportedFormatError,
)
from qload.errors.reporting import SCHEMA

if TYPE_CHECKING:
    from rich.console import RenderableType

    from qload.parallel import ProcessGroup


class Printable(Protocol):
    """Result of a command: the exit code of its verdict, and plain data."""

    @property
    def exit_code(self) -> int:
        """Exit code of the verdict, from `qload.errors.reporting.EXIT_CODES`."""

    def to_json(self) -> dict[str, Any]:
        """All of it."""


PrintableT = TypeVar("PrintableT", bound=Printable)


def print_report(
    report: PrintableT,
    as_json: bool | None,
    tables: "Callable[[PrintableT], Iterable[RenderableType]]",
    summary: Callable[[PrintableT], Iterable[str]],
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
        from qload.cli.tables import stdout

        out = stdout()
        for table in tables(report):
            out.print(table)
    if not one_of_several:
        print_summary(summary(report), as_json)
    return report.exit_code


def dumps(value: Any, indent: int | None = 2) -> str:
    """JSON in ASCII that every parser takes: half a surrogate pair, which a path may hold, is spelled out."""
    text = json.dumps(value, indent=indent)
    return json.dumps(_escape_surrogates(value), indent=indent) if "\\ud" in text else text


def _escape_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {_escape_surrogates(key): _escape_surrogates(held) for key, held in value.items()}
    return [_escape_surrogates(held) for held in value] if isinstance(value, list | tuple) else value


EXIT_UNREADABLE = 1
EXIT_WRONG_COMMAND = 2  # the command, what it runs in, or where it writes to
EXIT_INTERNAL_ERROR = 3  # a bug of qload
EXIT_UNREAD = 4  # a format, or some tensors, that are not read
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as a shell reports it
COMMAND_ERRORS = (
    ArgumentError,
    CutError,
    DivideError,
    NotEnoughMemoryError,
)  # about what was asked, not what was read
EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE: neither 0 nor 1, because no verdict was delivered


class UnsupportedCommandError(Exception):
    """What a checkpoint says of itself, where the command asks for what cannot be done with such a one."""


@contextmanager
def exit_on_error(as_json: bool = False, verbose: Callable[[], bool] = lambda: False) -> Iterator[None]:
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
        raise  # click says it on standard error, with the usage above it
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


def _exit_code(error: Exception) -> int:
    """Exit code of a qload error."""
    if isinstance(error, (*COMMAND_ERRORS, UnsupportedCommandError)):
        return EXIT_WRONG_COMMAND
    known = isinstance(error, QloadError) and error.rule in (
        UnreadTensorsError.rule,
        UnsupportedFormatError.rule,
    )
    return EXIT_UNREAD if known else EXIT_UNREADABLE


def _print_traceback(error: Exception) -> None:
    """Print the traceback of a bug on standard error, if that is open."""
    with suppress(OSError):
        click.echo(escape("".join(traceback.format_exception(error)), keep="\n\t", limit=1 << 20), err=True)


def _join_error_lines(text: str) -> str:
    """An error of several lines in one, with its remedy set apart."""
    what, _, remedy = text.partition("\n  remedy ")
    said = ", ".join(" ".join(line.split()) for line in what.splitlines())
    return f"{said}; remedy: {' '.join(remedy.split())}" if remedy else said


def _print_error(text: str) -> None:
    """One line on standard error, if that can be written to."""
    try:
        click.echo(f"Error: {escape(text)}", err=True)
    except OSError:
        _discard_buffers(sys.stderr)


def _print_error_json(text: str, code: int) -> None:
    """The error as an object on standard output, in one line; it is no report, as its verdict tells."""
    with suppress(OSError):  # what cannot be printed has been said
        told = {"schema": SCHEMA, "verdict": "error", "error": text, "exit_code": code}
        click.echo(dumps(told, indent=None))


def _discard_buffers(*streams: IO[str] | None) -> None:
    """What is still buffered goes nowhere, so that Python does not try again when it ends."""
    for stream in streams:
        with suppress(OSError, AttributeError):  # a test's own stream is no file
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # type: ignore[union-attr]


TORCHRUN_VARIABLE = "TORCHELASTIC_RUN_ID"  # which torchrun sets
RANK_TIMEOUT_S = (
    86_400.0  # seconds that a process waits for the shares of others; lost ones are noticed at once
)


@contextmanager
def torchrun_group() -> "Iterator[ProcessGroup | None]":
    """The group of all processes of this torchrun, or None.

    An error that all of them raise is told by the first; the others end quietly.
    """
    if TORCHRUN_VARIABLE not in os.environ:
        yield None
        return
    from qload.errors import LostRankError, QloadError
    from qload.parallel import joined_world

    rank = int(os.environ["RANK"])
    try:
        with joined_world(timeout_s=RANK_TIMEOUT_S) as group:
            yield group
    except QloadError as error:
        if rank > 0 and not isinstance(error, LostRankError):
            raise click.exceptions.Exit(0) from error
        raise


def exit_other_ranks(ctx: click.Context) -> None:
    """End every process of this torchrun but the first: what follows is little work, and is said once."""
    if TORCHRUN_VARIABLE in os.environ and int(os.environ["RANK"]) > 0:
        ctx.exit(0)
