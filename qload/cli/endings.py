"""How a command ends that cannot end well: one line on standard error at most, and an exit code."""

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import IO

import click

from qload.cli.output import dumps
from qload.cli.text import safe
from qload.errors import (
    ArgumentError,
    CutError,
    DivideError,
    NotEnoughMemoryError,
    QloadError,
    UnreadTensorsError,
    UnsupportedFormatError,
)
from qload.errors.verdicts import SCHEMA

UNREADABLE = 1
WRONG = 2  # the command, what it runs in, or where it writes to
INTERNAL = 3  # a bug of qload
UNREAD = 4  # a format, or some tensors, that are not read
INTERRUPTED = 130  # 128 + SIGINT, as a shell reports it
ASKED = (
    ArgumentError,
    CutError,
    DivideError,
    NotEnoughMemoryError,
)  # about what was asked, not what was read
READER_LEFT = 141  # 128 + SIGPIPE: neither 0 nor 1, because no verdict was delivered


class Refusal(Exception):
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
            _print(error.format_message(), WRONG)
        raise  # click says it on standard error, with the usage above it
    except KeyboardInterrupt:
        click.echo(err=True)  # the terminal has just printed ^C
        raise click.exceptions.Exit(INTERRUPTED) from None
    except BrokenPipeError:
        _let_go(sys.stdout, sys.stderr)
        raise click.exceptions.Exit(READER_LEFT) from None
    except OSError as error:
        text = f"{error.filename or 'standard output'}: {error.strerror or error}"
        _say(text)
        if as_json and error.filename:
            _print(text, WRONG)
        _let_go(sys.stdout)
        raise click.exceptions.Exit(WRONG) from None
    except (QloadError, Refusal) as error:
        code = _code_of(error)
        _say(_one_line(str(error)))
        if as_json:
            _print(str(error), code)
        raise click.exceptions.Exit(code) from None
    except (click.exceptions.Exit, click.ClickException, click.Abort):
        raise
    except Exception as error:
        if verbose():
            _print_traceback(error)
        text = f"internal error, {type(error).__name__}: {' '.join(str(error).split()):.400}"
        _say(f"{text}; this is a bug of qload: please report it; -v shows the traceback")
        if as_json:
            _print(text, INTERNAL)
        raise click.exceptions.Exit(INTERNAL) from None


def _code_of(error: Exception) -> int:
    """Exit code of a qload error."""
    if isinstance(error, (*ASKED, Refusal)):
        return WRONG
    known = isinstance(error, QloadError) and error.rule in (
        UnreadTensorsError.rule,
        UnsupportedFormatError.rule,
    )
    return UNREAD if known else UNREADABLE


def _print_traceback(error: Exception) -> None:
    """Print the traceback of a bug on standard error, if that is open."""
    with suppress(OSError):
        click.echo(safe("".join(traceback.format_exception(error)), keep="\n\t", limit=1 << 20), err=True)


def _one_line(text: str) -> str:
    """An error of several lines in one, with its remedy set apart."""
    what, _, remedy = text.partition("\n  remedy ")
    said = ", ".join(" ".join(line.split()) for line in what.splitlines())
    return f"{said}; remedy: {' '.join(remedy.split())}" if remedy else said


def _say(text: str) -> None:
    """One line on standard error, if that can be written to."""
    try:
        click.echo(f"Error: {safe(text)}", err=True)
    except OSError:
        _let_go(sys.stderr)


def _print(text: str, code: int) -> None:
    """The error as an object on standard output, in one line; it is no report, as its verdict tells."""
    with suppress(OSError):  # what cannot be printed has been said
        told = {"schema": SCHEMA, "verdict": "error", "error": text, "exit_code": code}
        click.echo(dumps(told, indent=None))


def _let_go(*streams: IO[str] | None) -> None:
    """What is still buffered goes nowhere, so that Python does not try again when it ends."""
    for stream in streams:
        with suppress(OSError, AttributeError):  # a test's own stream is no file
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # type: ignore[union-attr]
