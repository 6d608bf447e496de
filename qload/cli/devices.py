"""The device that an option names, if it is here."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def checked_device(device: str) -> "torch.device":
    """The CPU or a CUDA device of this machine; ArgumentError for any other."""
    import torch

    from qload.errors import ArgumentError
    from qload.weights.places import device_of

    where = device_of(device)
    if where.type not in ("cpu", "cuda"):
        raise ArgumentError("device", "cpu or a CUDA device", str(where))
    if where.type == "cuda" and not (
        torch.cuda.is_available() and (where.index or 0) < torch.cuda.device_count()
    ):
        raise ArgumentError("device", f"one of {torch.cuda.device_count()} CUDA devices", str(where))
    return where
