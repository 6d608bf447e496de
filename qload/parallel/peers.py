"""Connection of the GPUs of a world on one machine, so that kernels sum over the ranks."""

from __future__ import annotations

import logging
import platform
from hashlib import sha256
from pathlib import Path

from qload import devices
from qload.errors import ArgumentError
from qload.lazy_torch import torch
from qload.parallel.process_group import Collectives

log: logging.Logger = logging.getLogger("qload")

BOOT_FILE = Path("/proc/sys/kernel/random/boot_id")
HANDLE_BYTES, DIGEST_BYTES = 64, 32


def connect_peers(ranks: Collectives, device: torch.device) -> devices.PeerSums | None:
    """Connect the GPUs of all ranks; None on every rank if one of them cannot be connected.

    `ranks` gather tensors of the CPU. `device`: of this rank.
    """
    own, reason = None, ""
    try:
        own = devices.OwnPeerMemory(ranks.rank(), ranks.size(), device)
    except (ArgumentError, RuntimeError) as error:
        reason = str(error)
    cards = _gather(
        ranks, b"" if own is None else _card(device) + own.handle, 2 * DIGEST_BYTES + HANDLE_BYTES
    )
    if own is None or not _are_connectable(cards):
        log.info("sums over ranks use NCCL: %s", reason or "not a GPU of one machine for each rank")
        if own is not None:
            own.close()
        return None
    sums = None
    try:
        sums = own.connect([card[2 * DIGEST_BYTES :] for card in cards])
    except RuntimeError as error:
        reason = str(error)
    if all(_gather(ranks, b"" if sums is None else b"1", 1)):
        return sums
    log.info("sums over ranks use NCCL: %s", reason or "another rank has no access to its peers")
    own.close()
    return None


def _gather(ranks: Collectives, message: bytes, size: int) -> list[bytes]:
    """Gather a message of `size` bytes, or an empty one, from each rank."""
    padded = torch.tensor([[len(message) > 0, *message.ljust(size, b"\0")]], dtype=torch.uint8)
    rows = ranks.gathered(padded, dim=0).tolist()
    return [bytes(row[1:]) if row[0] else b"" for row in rows]


def _card(device: torch.device) -> bytes:
    """Digests of this machine and of its GPU."""
    boot = BOOT_FILE.read_bytes() if BOOT_FILE.is_file() else b""
    machine = sha256(platform.node().encode() + boot).digest()
    return machine + sha256(str(torch.cuda.get_device_properties(device).uuid).encode()).digest()


def _are_connectable(cards: list[bytes]) -> bool:
    """Return whether all ranks have memory, on one machine, each on a GPU of its own."""
    machines = {card[:DIGEST_BYTES] for card in cards}
    devices = {card[DIGEST_BYTES : 2 * DIGEST_BYTES] for card in cards}
    return all(cards) and len(machines) == 1 and len(devices) == len(cards)
