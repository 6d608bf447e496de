"""What a model takes of a device's memory, known before any of it is read, and what is free there."""

from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor, nn

from qload.errors import NotEnoughMemoryError
from qload.formats import ROLES
from qload.spec import Role
from qload.storage import TensorInfo, WeightStorage

MEMORY_FILE = Path("/proc/meminfo")  # Linux' own; elsewhere nobody says what is free
AVAILABLE = "MemAvailable:"


def stored_bytes(storage: WeightStorage, dtype: torch.dtype | None = None) -> int:
    """Bytes of all tensors of a checkpoint; plain floats count in the `dtype` that a load casts them to."""
    return sum(_bytes(name, storage.info(name), dtype) for name in storage.keys())  # noqa: SIM118, it is no dict


def _bytes(name: str, info: TensorInfo, dtype: torch.dtype | None) -> int:
    role = ROLES.get(name.rpartition(".")[2], Role.FLOAT)
    plain = role is Role.FLOAT and info.dtype in (torch.float16, torch.bfloat16, torch.float32)
    return info.nbytes // info.dtype.itemsize * dtype.itemsize if plain and dtype is not None else info.nbytes


def free_bytes(device: torch.device) -> int | None:
    """How much memory a device has to give; None where nobody says."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = MEMORY_FILE.read_text().splitlines()
    except OSError:
        return None
    found = (line.split() for line in lines if line.startswith(AVAILABLE))
    return next((int(words[1]) * 1024 for words in found), None)


def check_memory(device: torch.device, needed: int, free: int | None) -> None:
    """NotEnoughMemoryError where a device is known to have fewer bytes free than are needed."""
    if free is not None and free < needed:
        raise NotEnoughMemoryError(str(device), needed, free)


def held_bytes(*modules: nn.Module) -> int:
    """Bytes of all tensors of modules, each counted once."""
    return sum({each.data_ptr(): each.nbytes for each in _tensors(*modules)}.values())


def _tensors(*modules: nn.Module) -> Iterator[Tensor]:
    for module in modules:
        yield from chain(module.parameters(), module.buffers())
