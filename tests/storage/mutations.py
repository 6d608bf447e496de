"""Mutated safetensors files: `python -m tests.fuzz 1000000 0` tries a million of them.

Each is a small valid file with changed bytes, numbers or words in its header. For every file, parsing raises
only errors of qload, and the offsets of a valid header stay within its file.
"""

import random
from collections.abc import Iterator
from itertools import pairwise

from qload.errors import StorageError
from qload.storage import parse_header

SEEDS = (
    b'{"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},"b":{"dtype":"I8","shape":[],"data_offsets":[24,25]}}',
    b'{"__metadata__":{"format":"pt"},"w":{"dtype":"BF16","shape":[4],"data_offsets":[0,8]}}   ',
    b'{"x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"y":{"dtype":"F16","shape":[1,1],"data_offsets":[0,2]}}',
)
DATA = (25, 8, 2)
TOKENS = (
    b"-1",
    b"0",
    b"1",
    b"24",
    b"25",
    b"1e3",
    b"1.0",
    b"true",
    b"null",
    b"NaN",
    b"[]",
    b"{}",
    b'""',
    b'"F32"',
    b'"F4"',
    b"9" * 30,
    b"4611686018427387904",
    b"[0,0]",
    b'"a":',
    b",",
    b"}",
    b'"\\ud800"',
    b"\xff",
    b"[" * 500,
)


def mutations(count: int, seed: int = 0) -> Iterator[bytes]:
    """Yield `count` files, reproducible by seed."""
    chance = random.Random(seed)
    for _ in range(count):
        which = chance.randrange(len(SEEDS))
        header, data = bytearray(SEEDS[which]), DATA[which]
        for _ in range(chance.choice((1, 1, 1, 2, 4))):
            at = chance.randrange(len(header) + 1)
            to = min(len(header), at + chance.choice((0, 1, 1, 2, 5)))
            header[at:to] = chance.choice(TOKENS) if chance.random() < 0.5 else bytes([chance.randrange(256)])
        length = (
            len(header) if chance.random() < 0.9 else chance.choice((0, 1, 1 << 63, len(header) + 1, 10**8))
        )
        yield (
            length.to_bytes(8, "little")
            + bytes(header)
            + bytes(max(0, data + chance.choice((0, 0, 0, 1, -1))))
        )


def try_one(file: bytes) -> bool:
    """Return whether the header of a file is valid; catch only errors of qload."""
    try:
        header = parse_header(file, len(file), "mutated")
    except StorageError:
        return False
    spans = sorted((entry.begin, entry.end) for entry in header.tensors.values())
    assert all(8 <= begin <= end <= len(file) for begin, end in spans)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
    return True
