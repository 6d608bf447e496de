"""Blocks of ggml's low-bit IQ types: indices into grids of 4 or 8 magnitudes, and signs.

`ggml_grids.json` has the grids: entries of 4 or 8 small integers, digits in base 64 characters (see its key
`encoding`). A code is an element of the grid times its sign, as the byte of an int8; those of IQ1 are 8 times
their value, as their offset delta is an eighth. Fields are named as in ggml-common.h. Source: ggml-quants.c
of llama-cpp-python 0.3.36 and gguf 0.19.0, bit-equal to both.
"""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

from qload.layouts.ggml import DECODERS, SCALE_BYTES, BlockCodes, Decoder, copied, fields_in_turn, halves
from qload.layouts.packing import byte_values
from qload.lazy_torch import Tensor, torch


@cache
def grid_on(name: str, device: torch.device) -> Tensor:
    """Copy a grid to a device: int16 (entries, 4 or 8). Copies stay, for CUDA graphs."""
    return grid(name).to(device)


@cache
def grid(name: str) -> Tensor:
    """Read a grid: int16 (entries, 4 or 8), on the CPU."""
    stored = json.loads((Path(__file__).parent / "ggml_grids.json").read_text())["grids"][name]
    digits = torch.frombuffer(bytearray(b64decode(stored["digits"])), dtype=torch.uint8)
    places = fields_in_turn(digits, stored["bits"])
    values = torch.tensor(stored["values"], dtype=torch.int16)[places.long()]
    return values.reshape(-1, stored["elements"])


def _magnitudes(name: str, index: Tensor) -> Tensor:
    """Entries of a grid: (N, B, n) -> int16 (N, B, n, elements)."""
    return grid_on(name, index.device)[index.long()]


def _int8_values(blocks: Tensor) -> Tensor:
    """Return the values of codes that are bytes of int8: float32 (256,)."""
    return byte_values(torch.int8, blocks.device)


def _int16(field: Tensor) -> Tensor:
    """Read uint16 values of bytes as int32."""
    return copied(field).view(torch.int16).to(torch.int32) & 0xFFFF


def _int32(field: Tensor) -> Tensor:
    """Read uint32 values of bytes as int64."""
    return copied(field).view(torch.int32).to(torch.int64) & 0xFFFFFFFF


def _seven_signs(field: Tensor) -> Tensor:
    """Complete 7 sign bits by an eighth that makes their number even: (..., n) -> bytes."""
    parity = field ^ field >> 4
    parity = parity ^ parity >> 2
    return field | (parity ^ parity >> 1) << 7 & 0x80


def _signed(magnitudes: Tensor, signs: Tensor) -> Tensor:
    """Codes of magnitudes (N, B, n, e) and of the bits of signs, in order: uint8 (N, B, n e)."""
    negative = fields_in_turn(signs.to(torch.uint8), 1)
    flat = magnitudes.flatten(-2)
    return torch.where(negative.bool(), -flat, flat).to(torch.uint8)


def _signs_of_words(words: Tensor) -> Tensor:
    """Four groups of 7 sign bits in the low bits of each word: (N, B, n) -> (N, B, 4 n) bytes."""
    shifts = 7 * torch.arange(4, device=words.device)
    return _seven_signs((words[..., None] >> shifts & 127).flatten(-2))


def _iq2_xxs(blocks: Tensor) -> BlockCodes:
    pairs = blocks[..., 2:].reshape(*blocks.shape[:-1], 8, 8)
    words = _int32(pairs[..., 4:]).flatten(-2)
    magnitudes = _magnitudes("iq2_xxs", pairs[..., :4].flatten(-2))
    scales = halves(blocks[..., :2]) * (0.5 + (words >> 28).float()) * 0.25
    return BlockCodes(_signed(magnitudes, _signs_of_words(words)), scales, lookup=_int8_values(blocks))


def _iq2_xs(blocks: Tensor) -> BlockCodes:
    words = _int16(blocks[..., 2:66])
    scales = halves(blocks[..., :2]) * (0.5 + fields_in_turn(blocks[..., 66:], 4).float()) * 0.25
    codes = _signed(_magnitudes("iq2_xs", words & 511), _seven_signs(words >> 9))
    return BlockCodes(codes, scales, lookup=_int8_values(blocks))


def _iq2_s(blocks: Tensor) -> BlockCodes:
    index = blocks[..., 2:34].to(torch.int32) | fields_in_turn(blocks[..., 66:74], 2).to(torch.int32) << 8
    scales = halves(blocks[..., :2]) * (0.5 + fields_in_turn(blocks[..., 74:], 4).float()) * 0.25
    return BlockCodes(
        _signed(_magnitudes("iq2_s", index), blocks[..., 34:66]),
        scales,
        lookup=_int8_values(blocks),
    )


def _iq3_xxs(blocks: Tensor) -> BlockCodes:
    words = _int32(blocks[..., 66:])
    scales = halves(blocks[..., :2]) * (0.5 + (words >> 28).float()) * 0.5
    codes = _signed(_magnitudes("iq3_xxs", blocks[..., 2:66]), _signs_of_words(words))
    return BlockCodes(codes, scales, lookup=_int8_values(blocks))


def _iq3_s(blocks: Tensor) -> BlockCodes:
    index = blocks[..., 2:66].to(torch.int32) | fields_in_turn(blocks[..., 66:74], 1).to(torch.int32) << 8
    scales = halves(blocks[..., :2]) * (1 + 2 * fields_in_turn(blocks[..., 106:], 4))
    return BlockCodes(
        _signed(_magnitudes("iq3_s", index), blocks[..., 74:106]),
        scales,
        lookup=_int8_values(blocks),
    )


def _with_delta(index: Tensor, negative: Tensor) -> Tensor:
    """Codes of IQ1: 8 times the entries of the grid, plus or minus 1 for each entry."""
    delta = 1 - 2 * negative.to(torch.int16)
    return (8 * _magnitudes("iq1_s", index) + delta[..., None]).flatten(-2).to(torch.uint8)


def _iq1_s(blocks: Tensor) -> BlockCodes:
    words = _int16(blocks[..., 34:])
    shifts = 3 * torch.arange(4, device=blocks.device)
    high = (words[..., None] >> shifts & 7).flatten(-2)
    negative = (words >> 15).repeat_interleave(4, -1)
    scales = halves(blocks[..., :2]) * (2 * (words >> 12 & 7) + 1)
    return BlockCodes(
        _with_delta(blocks[..., 2:34].to(torch.int32) | high << 8, negative),
        scales,
        lookup=_int8_values(blocks) / 8,
    )


def iq1_m_scale(field: Tensor) -> Tensor:
    """Read the float16 scale in the highest four bits of four words: bytes (..., 8) -> float32 (..., 1)."""
    shifts = 4 * torch.arange(4, device=field.device)
    bits = (_int16(field) >> 12 << shifts).sum(-1, keepdim=True)
    return bits.to(torch.int16).view(torch.float16).float()


def _iq1_m(blocks: Tensor) -> BlockCodes:
    words = _int16(blocks[..., 48:])
    small = (words[..., None] >> 3 * torch.arange(4, device=blocks.device) & 7).flatten(-2)
    high = fields_in_turn(blocks[..., 32:48], 4).to(torch.int32)
    index = blocks[..., :32].to(torch.int32) | (high & 7) << 8
    scales = iq1_m_scale(blocks[..., 48:]) * (2 * small + 1)
    return BlockCodes(_with_delta(index, high >> 3), scales, lookup=_int8_values(blocks) / 8)


ALL_DECODERS: Mapping[str, Decoder] = {
    **DECODERS,
    "IQ2_XXS": _iq2_xxs,
    "IQ2_XS": _iq2_xs,
    "IQ2_S": _iq2_s,
    "IQ3_XXS": _iq3_xxs,
    "IQ3_S": _iq3_s,
    "IQ1_S": _iq1_s,
    "IQ1_M": _iq1_m,
}

IQ1_M_SCALE = (48, 56)


def scale_bytes(name: str) -> tuple[int, int, Callable[[Tensor], Tensor]] | None:
    """Bytes of a block with float scales, start and stop, and their decoder; None for other types."""
    if name == "IQ1_M":
        return *IQ1_M_SCALE, iq1_m_scale
    return (*SCALE_BYTES[name], halves) if name in SCALE_BYTES else None


def sample_blocks(name: str, rows: int, count: int, nbytes: int) -> Tensor:
    """Blocks of random codes, with powers of two for their float scales: uint8 (rows, count, nbytes)."""
    generator = torch.Generator().manual_seed(rows * count)
    blocks = torch.randint(256, (rows, count, nbytes), dtype=torch.uint8, generator=generator)
    powers = torch.randint(-3, 1, (rows, count, 2), generator=generator)
    if name in SCALE_BYTES:
        start, stop = SCALE_BYTES[name]
        blocks[..., start:stop] = (2.0**powers).half().view(torch.uint8)[..., : stop - start]
    elif name == "IQ1_M":
        nibbles = torch.tensor((0, 0, 4, 3))  # of 0.25, the lowest first
        blocks[..., 49:56:2] = blocks[..., 49:56:2] & 15 | nibbles.to(torch.uint8) << 4
    elif name == "MXFP4":
        blocks[..., :1] = (powers[..., :1] + 127).to(torch.uint8)
    else:  # UE4M3
        blocks[..., :4] = 8 * (torch.arange(4) + 5).to(torch.uint8)
    return blocks
