"""The processes that torchrun starts, as a group; nothing where a verb runs on its own."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from qload.parallel import ProcessGroup

LAUNCHED = "TORCHELASTIC_RUN_ID"  # which torchrun sets
PATIENCE = 86_400.0  # seconds that a process waits for the shares of others; lost ones are noticed at once


@contextmanager
def ranks() -> "Iterator[ProcessGroup | None]":
    """The group of all processes of this torchrun, or None.

    An error that all of them raise is told by the first; the others end quietly.
    """
    if LAUNCHED not in os.environ:
        yield None
        return
    from qload.errors import LostRankError, QloadError
    from qload.parallel import joined_world

    rank = int(os.environ["RANK"])
    try:
        with joined_world(timeout_s=PATIENCE) as group:
            yield group
    except QloadError as error:
        if rank > 0 and not isinstance(error, LostRankError):
            raise click.exceptions.Exit(0) from error
        raise


def by_first_alone(ctx: click.Context) -> None:
    """End every process of this torchrun but the first: what follows is little work, and is said once."""
    if LAUNCHED in os.environ and int(os.environ["RANK"]) > 0:
        ctx.exit(0)
