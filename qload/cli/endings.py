"""How a command ends that cannot end well: one line on standard error at most, and an exit code."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO

import click

from qload.cli.text import safe
from qload.errors import ArgumentError, QloadError

UNREADABLE = 1
WRONG = 2  # the command, what it runs in, or where it writes to
INTERRUPTED = 130  # 128 + SIGINT, as a shell reports it
READER_LEFT = 141  # 128 + SIGPIPE: neither 0 nor 1, because no verdict was delivered


@contextmanager
def endings() -> Iterator[None]:
    """Inside, an interrupt, a reader that leaves, a full disk and qload's own errors become exit codes."""
    try:
        if sys.stdout is None:
            raise OSError("closed")
        yield
    except KeyboardInterrupt:
        click.echo(err=True)  # the terminal has just printed ^C
        raise click.exceptions.Exit(INTERRUPTED) from None
    except BrokenPipeError:
        _let_go(sys.stdout, sys.stderr)
        raise click.exceptions.Exit(READER_LEFT) from None
    except OSError as error:
        _say(f"{error.filename or 'standard output'}: {error.strerror or error}")
        _let_go(sys.stdout)
        raise click.exceptions.Exit(WRONG) from None
    except QloadError as error:
        _say(", ".join(" ".join(line.split()) for line in str(error).splitlines()))
        raise click.exceptions.Exit(WRONG if isinstance(error, ArgumentError) else UNREADABLE) from None


def _say(text: str) -> None:
    """One line on standard error, if that can be written to."""
    try:
        click.echo(f"Error: {safe(text)}", err=True)
    except OSError:
        _let_go(sys.stderr)


def _let_go(*streams: IO[str] | None) -> None:
    """What is still buffered goes nowhere, so that Python does not try again when it ends."""
    for stream in streams:
        with suppress(OSError, AttributeError):  # a test's own stream is no file
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # type: ignore[union-attr]
