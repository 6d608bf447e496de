"""What `Weights` is told: where tensors are put, who shares them, their other names, which part is read."""

from collections.abc import Mapping, Sequence

import torch

from qload.errors import ArgumentError, check_type
from qload.parallel import ALONE, ProcessGroup, Rank


def device_of(device: torch.device | str) -> torch.device:
    """A device of torch's, or ArgumentError; also for a CUDA device that is not here."""
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ArgumentError("device", "a device of torch's, as cpu or cuda:0", repr(device)) from error
    here = torch.cuda.device_count() if found.type == "cuda" and torch.cuda.is_available() else 0
    if found.type == "cuda" and (found.index or 0) >= here:
        raise ArgumentError("device", f"cpu, or one of {here} CUDA devices that torch sees here", str(found))
    return found


def group_of(group: ProcessGroup | None) -> ProcessGroup:
    """A group, of this process alone if there is none; ArgumentError for a rank outside of its world."""
    found = ALONE if group is None else group
    if not isinstance(found, ProcessGroup):
        raise ArgumentError("process_group", "None, or anything with rank() and size()", repr(group))
    Rank(found.rank(), found.size())
    return found


def aliases_of(aliases: Mapping[str, Sequence[str]] | None) -> dict[str, Sequence[str]]:
    """Names, each with a list of others, or ArgumentError."""
    check_type("aliases", aliases, Mapping[str, Sequence[str] | str] | None)
    for name, others in (aliases or {}).items():
        if isinstance(others, str):  # a sequence too, of letters
            raise ArgumentError("aliases", f"a list of names for {name}", repr(others))
    return dict(aliases or {})


def along(dim: int, start: int, stop: int) -> tuple[slice, ...]:
    """The slices that take [start, stop) of a dimension, and all of those before it."""
    return (*[slice(None)] * dim, slice(start, stop))
