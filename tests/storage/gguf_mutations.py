"""Mutated GGUF files: `python -m tests.fuzz 1000000 0` tries a million of them.

Each is a small valid file with changed bytes, lengths, counts, types or offsets. For every file, parsing
raises only errors of qload, and the tensors of a valid header stay within its file.
"""

import random
import struct
from collections.abc import Iterator
from functools import cache
from itertools import pairwise

from qload.errors import StorageError
from qload.storage import parse_gguf_header
from tests.storage.gguf_files import blocks, gguf_file

NUMBERS = (0, 1, 2, 3, 4, 7, 8, 9, 31, 32, 33, 97, 137, 255, 1 << 20, 1 << 31, 1 << 32, 1 << 62, 1 << 63)


@cache
def seeds() -> tuple[bytes, ...]:
    keys = {
        "general.architecture": "llama",
        "general.alignment": 32,
        "a": [1, 2],
        "t": ["x", ""],
        "n": [[1], []],
    }
    first = gguf_file(keys, {"a.weight": blocks("Q8_0", (2, 32)), "b.weight": blocks("F32", (3,))})
    second = gguf_file({"f": 1.5, "b": True}, {"blk.0.ffn_up_exps.weight": blocks("Q4_0", (2, 2, 64))})
    return first, second, gguf_file({}, {"x": blocks("I8", (1,)), "y": blocks("F16", (1, 1, 1, 4))})


def gguf_mutations(count: int, seed: int = 0) -> Iterator[bytes]:
    """Yield `count` files, reproducible by seed."""
    chance = random.Random(seed)
    for _ in range(count):
        file = bytearray(chance.choice(seeds()))
        for _ in range(chance.choice((1, 1, 1, 2, 4))):
            at = chance.randrange(len(file))
            if chance.random() < 0.5:  # a number, where one may be
                number = struct.pack("<Q", chance.choice(NUMBERS))[: chance.choice((4, 8))]
                file[at : at + len(number)] = number
            else:
                to = min(len(file), at + chance.choice((0, 1, 1, 2, 8)))
                file[at:to] = bytes(chance.randrange(256) for _ in range(chance.choice((0, 1, 1, 2))))
        yield bytes(file)


def try_gguf(file: bytes) -> bool:
    """Return whether the header of a file is valid; catch only errors of qload."""
    try:
        parsed = parse_gguf_header(lambda at, count: file[at : at + count], len(file), "mutated")
    except StorageError as error:
        str(error).encode()  # it can be printed
        return False
    spans = sorted((entry.begin, entry.end) for entry in parsed.tensors.values())
    assert all(24 <= begin < end <= len(file) for begin, end in spans)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
    return True
