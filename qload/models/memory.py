"""Device memory that a model needs, computed from headers, and the free memory of a device."""

from itertools import chain
from pathlib import Path

import torch
from torch import nn

from qload.errors import NotEnoughMemoryError
from qload.formats import ROLES
from qload.spec import Role
from qload.storage import WeightStorage

MEMINFO_FILE = Path("/proc/meminfo")  # Linux only
CAST_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def stored_bytes(storage: WeightStorage, dtype: torch.dtype | None) -> int:
    """Return the bytes of all tensors of a checkpoint, with plain floats in the `dtype` of the load."""
    total = 0
    for name in storage.keys():  # noqa: SIM118, a storage is not a dict
        info, role = storage.info(name), ROLES.get(name.rpartition(".")[2], Role.FLOAT)
        is_cast = role is Role.FLOAT and info.dtype in CAST_DTYPES
        itemsize = dtype.itemsize if dtype is not None and is_cast else info.dtype.itemsize
        total += info.nbytes // info.dtype.itemsize * itemsize
    return total


def free_bytes(device: torch.device) -> int | None:
    """Return the free memory of a device in bytes; None if the system does not report it."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = MEMINFO_FILE.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def check_memory(device: torch.device, needed: int, free: int | None) -> None:
    """Raise NotEnoughMemoryError for a device with fewer free bytes than needed."""
    if free is not None and free < needed:
        raise NotEnoughMemoryError(str(device), needed, free)


def tensor_bytes(*modules: nn.Module) -> int:
    """Return the bytes of all tensors of modules; shared tensors count once."""
    tensors = chain.from_iterable(chain(module.parameters(), module.buffers()) for module in modules)
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())
