"""The device that an option names, if it is here."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def checked_device(device: str) -> "torch.device":
    """The CPU or a CUDA device of this machine; ArgumentError for any other."""
    from qload.errors import ArgumentError
    from qload.weights.places import device_of

    where = device_of(device)
    if where.type not in ("cpu", "cuda"):
        raise ArgumentError("device", "cpu or a CUDA device", str(where))
    return where
