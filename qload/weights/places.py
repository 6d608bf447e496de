"""Where tensors are put, and which part of them is read."""

import torch

from qload.errors import ArgumentError


def device_of(device: torch.device | str) -> torch.device:
    """A device of torch's, or ArgumentError."""
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise ArgumentError("device", "a device of torch's, as cpu or cuda:0", repr(device)) from error


def along(dim: int, start: int, stop: int) -> tuple[slice, ...]:
    """The slices that take [start, stop) of a dimension, and all of those before it."""
    return (*[slice(None)] * dim, slice(start, stop))
