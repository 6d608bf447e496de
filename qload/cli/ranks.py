"""The processes that torchrun starts, as a group; nothing where a verb runs on its own."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@contextmanager
def ranks() -> "Iterator[ProcessGroup | None]":
    """The group of all processes of this torchrun, or None."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:  # which torchrun sets
        yield None
        return
    from torch import distributed

    distributed.init_process_group("gloo")
    try:
        yield distributed.group.WORLD
    finally:
        distributed.destroy_process_group()
