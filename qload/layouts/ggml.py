"""Blocks of ggml: codes, scales and offsets of each type without a codebook.

A block has the codes of 32 to 256 inputs of an output and their scales. A decoder takes the blocks of a
layer, uint8 (N, B, bytes), and returns

    w = (value(code) - zero) * scale - offset

with all products in float32, in the order of ggml: a scale of a K type is the product d * sc of a float16
and a small integer, rounded once, and an offset is dmin * m. Fields are named as in ggml-common.h; offsets of
fields in bytes are in the slices. Source: ggml-quants.c of llama-cpp-python 0.3.36 and gguf 0.19.0,
bit-equal to both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from qload.lazy_torch import Tensor, torch

E2M1_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # without the sign of zero
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
POWERS_OF_3 = (1, 3, 9, 27, 81)
UE4M3_ZEROS = (0, 0x7F)  # bytes of scales that ggml reads as 0


@dataclass(frozen=True, eq=False)
class BlockCodes:
    """Decoded blocks.

    Attributes
    ----------
    codes
        uint8 (N, B, elements).
    scales
        float32 (N, B, elements / run): `run` inputs share one.
    offsets
        float32 like the scales, subtracted after the product; None: no offsets.
    zero
        Zero point of all codes.
    lookup
        Value of each code, float32; None: the code itself.
    """

    codes: Tensor
    scales: Tensor
    offsets: Tensor | None = None
    zero: int = 0
    lookup: Tensor | None = None


Decoder = Callable[[Tensor], BlockCodes]


def copied(field: Tensor) -> Tensor:
    """Copy a field of blocks, whose first byte may lie at any place, so that its words are aligned."""
    return field.clone(memory_format=torch.contiguous_format)


def halves(field: Tensor) -> Tensor:
    """Read float16 values of bytes (..., 2 n) as float32 (..., n)."""
    return copied(field).view(torch.float16).float()


def small_table(values: tuple[int, ...], device: torch.device) -> Tensor:
    """Write a float32 table number by number: a CUDA graph cannot capture a copy from the host."""
    return torch.stack([torch.full((), value, dtype=torch.float32, device=device) for value in values])


def nibbles(field: Tensor) -> Tensor:
    """All low halves of the bytes of a field, then all high halves: (..., n) -> (..., 2 n)."""
    return torch.cat((field & 15, field >> 4), -1)


def fields_in_turn(field: Tensor, bits: int) -> Tensor:
    """Fields of `bits` bits of each byte, the lowest first: (..., n) -> (..., 8 n / bits)."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=field.device)
    return (field[..., None] >> shifts & (1 << bits) - 1).flatten(-2)


def fields_by_plane(field: Tensor, bits: int, run: int = 32) -> Tensor:
    """Lowest fields of each `run` of bytes, then the next ones: (..., n) -> (..., 8 n / bits)."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=field.device)[:, None]
    planes: Tensor = field.reshape(*field.shape[:-1], -1, 1, run) >> shifts & (1 << bits) - 1
    return planes.flatten(-3)


def pack_in_turn(codes: Tensor, bits: int) -> Tensor:
    """Invert `fields_in_turn`: (..., n) -> (..., n * bits / 8)."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device)
    return (codes.reshape(*codes.shape[:-1], -1, len(shifts)) << shifts).sum(-1, dtype=torch.uint8)


def pack_by_plane(codes: Tensor, bits: int, run: int = 32) -> Tensor:
    """Invert `fields_by_plane`: (..., n) -> (..., n * bits / 8)."""
    planes = codes.reshape(*codes.shape[:-1], -1, 8 // bits, run)
    return pack_in_turn(planes.transpose(-1, -2).flatten(-3), bits)


def _q4_0(blocks: Tensor) -> BlockCodes:
    return BlockCodes(nibbles(blocks[..., 2:]), halves(blocks[..., :2]), zero=8)


def _q4_1(blocks: Tensor) -> BlockCodes:
    return BlockCodes(nibbles(blocks[..., 4:]), halves(blocks[..., :2]), -halves(blocks[..., 2:4]))


def _q5_0(blocks: Tensor) -> BlockCodes:
    codes = nibbles(blocks[..., 6:]) | fields_in_turn(blocks[..., 2:6], 1) << 4
    return BlockCodes(codes, halves(blocks[..., :2]), zero=16)


def _q5_1(blocks: Tensor) -> BlockCodes:
    codes = nibbles(blocks[..., 8:]) | fields_in_turn(blocks[..., 4:8], 1) << 4
    return BlockCodes(codes, halves(blocks[..., :2]), -halves(blocks[..., 2:4]))


def _q8_0(blocks: Tensor) -> BlockCodes:
    return BlockCodes(blocks[..., 2:] ^ 0x80, halves(blocks[..., :2]), zero=128)


def _q2_k(blocks: Tensor) -> BlockCodes:
    small = blocks[..., :16]
    d, dmin = halves(blocks[..., 80:82]), halves(blocks[..., 82:84])
    return BlockCodes(fields_by_plane(blocks[..., 16:80], 2), d * (small & 15), dmin * (small >> 4))


def _q3_k(blocks: Tensor) -> BlockCodes:
    codes = fields_by_plane(blocks[..., 32:96], 2) | fields_by_plane(blocks[..., :32], 1) << 2
    low, high = nibbles(blocks[..., 96:104]), fields_by_plane(blocks[..., 104:108], 2, run=4)
    small = (low | high << 4).to(torch.int8) - 32
    return BlockCodes(codes, halves(blocks[..., 108:]) * small, zero=4)


def _six_bits(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Unpack the 8 scales and 8 minima of 6 bits in 12 bytes."""
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = torch.cat((first & 63, third & 15 | first >> 6 << 4), -1)
    minima = torch.cat((second & 63, third >> 4 | second >> 6 << 4), -1)
    return scales, minima


def _q4_k(blocks: Tensor) -> BlockCodes:
    scales, minima = _six_bits(blocks[..., 4:16])
    d, dmin = halves(blocks[..., :2]), halves(blocks[..., 2:4])
    return BlockCodes(fields_by_plane(blocks[..., 16:], 4), d * scales, dmin * minima)


def _q5_k(blocks: Tensor) -> BlockCodes:
    scales, minima = _six_bits(blocks[..., 4:16])
    d, dmin = halves(blocks[..., :2]), halves(blocks[..., 2:4])
    codes = fields_by_plane(blocks[..., 48:], 4) | fields_by_plane(blocks[..., 16:48], 1) << 4
    return BlockCodes(codes, d * scales, dmin * minima)


def _q6_k(blocks: Tensor) -> BlockCodes:
    low = fields_by_plane(blocks[..., :128], 4, run=64)
    codes = low | fields_by_plane(blocks[..., 128:192], 2) << 4
    small = blocks[..., 192:208].contiguous().view(torch.int8)
    return BlockCodes(codes, halves(blocks[..., 208:]) * small, zero=32)


def _iq4_nl(blocks: Tensor) -> BlockCodes:
    return BlockCodes(
        nibbles(blocks[..., 2:]), halves(blocks[..., :2]), lookup=small_table(IQ4_VALUES, blocks.device)
    )


def _iq4_xs(blocks: Tensor) -> BlockCodes:
    low, high = fields_in_turn(blocks[..., 4:8], 4), fields_in_turn(blocks[..., 2:4], 2)
    scales = halves(blocks[..., :2]) * ((low | high << 4).to(torch.int8) - 32)
    return BlockCodes(
        fields_by_plane(blocks[..., 8:], 4, run=16), scales, lookup=small_table(IQ4_VALUES, blocks.device)
    )


def _tq1_0(blocks: Tensor) -> BlockCodes:
    powers = small_table(POWERS_OF_3, blocks.device).to(torch.uint8)[:, None]
    runs = (blocks[..., :32], powers), (blocks[..., 32:48], powers), (blocks[..., 48:52], powers[:4])
    digits = [(field[..., None, :] * power).flatten(-2) for field, power in runs]  # modulo 256
    codes = (torch.cat(digits, -1).to(torch.int16) * 3 >> 8).to(torch.uint8)
    return BlockCodes(codes, halves(blocks[..., 52:]), zero=1)


def _tq2_0(blocks: Tensor) -> BlockCodes:
    return BlockCodes(fields_by_plane(blocks[..., :64], 2), halves(blocks[..., 64:]), zero=1)


def _mxfp4(blocks: Tensor) -> BlockCodes:
    exponents = blocks[..., :1].to(torch.int32)
    bits = torch.where(exponents < 2, 0x200000 << exponents, exponents - 1 << 23)  # 2**(exponent - 128)
    return BlockCodes(
        nibbles(blocks[..., 1:]), bits.view(torch.float32), lookup=small_table(E2M1_DOUBLED, blocks.device)
    )


def _nvfp4(blocks: Tensor) -> BlockCodes:
    stored = blocks[..., :4].to(torch.int32)
    exponents, mantissas = stored >> 3 & 15, stored & 7
    normal = torch.ldexp(1 + mantissas / 8, exponents - 8)
    scales = torch.where(exponents == 0, mantissas * 2.0**-10, normal)
    for zero in UE4M3_ZEROS:
        scales = scales.masked_fill(stored == zero, 0)
    return BlockCodes(
        fields_by_plane(blocks[..., 4:], 4, run=8), scales, lookup=small_table(E2M1_DOUBLED, blocks.device)
    )


def _q1_0(blocks: Tensor) -> BlockCodes:
    return BlockCodes(
        fields_in_turn(blocks[..., 2:], 1),
        halves(blocks[..., :2]),
        lookup=small_table((-1, 1), blocks.device),
    )


def _q2_0(blocks: Tensor) -> BlockCodes:
    return BlockCodes(fields_in_turn(blocks[..., 2:], 2), halves(blocks[..., :2]), zero=1)


# Bytes of a block with its float16 scales.
SCALE_BYTES: Mapping[str, tuple[int, int]] = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS", "Q1_0", "Q2_0"), (0, 2)),
    **dict.fromkeys(("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S"), (0, 2)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 4)),
    "Q2_K": (80, 84),
    "Q3_K": (108, 110),
    "Q6_K": (208, 210),
    "TQ1_0": (52, 54),
    "TQ2_0": (64, 66),
}

# Bytes of a block that have no codes; in types that weights are restored to.
HEADERS: Mapping[str, tuple[slice, ...]] = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0"), (slice(0, 2),)),
    **dict.fromkeys(("Q4_1", "Q5_1"), (slice(0, 4),)),
    "MXFP4": (slice(0, 1),),
    "NVFP4": (slice(0, 4),),
    "Q2_K": (slice(0, 16), slice(80, 84)),
    "Q3_K": (slice(96, 110),),
    **dict.fromkeys(("Q4_K", "Q5_K"), (slice(0, 16),)),
    "Q6_K": (slice(192, 210),),
}

CODE_PACKERS: Mapping[str, Callable[[Tensor], Tensor]] = {  # codes of blocks -> their bytes
    **dict.fromkeys(("Q4_0", "Q4_1", "MXFP4"), partial(pack_by_plane, bits=4, run=16)),
    **dict.fromkeys(
        ("Q5_0", "Q5_1"),
        lambda codes: torch.cat((pack_in_turn(codes >> 4, 1), pack_by_plane(codes & 15, 4, run=16)), -1),
    ),
    "Q8_0": lambda codes: codes ^ 0x80,
    "NVFP4": partial(pack_by_plane, bits=4, run=8),
    "Q2_K": partial(pack_by_plane, bits=2),
    "Q3_K": lambda codes: torch.cat((pack_by_plane(codes >> 2, 1), pack_by_plane(codes & 3, 2)), -1),
    "Q4_K": partial(pack_by_plane, bits=4),
    "Q5_K": lambda codes: torch.cat((pack_by_plane(codes >> 4, 1), pack_by_plane(codes & 15, 4)), -1),
    "Q6_K": lambda codes: torch.cat((pack_by_plane(codes & 15, 4, run=64), pack_by_plane(codes >> 4, 2)), -1),
}


def read_header(kind: str, blocks: Tensor) -> Tensor:
    """Return the bytes of blocks that have no codes: (N, B, bytes) -> (N, B, n)."""
    return torch.cat([blocks[..., part] for part in HEADERS[kind]], -1)


def encode(kind: str, codes: Tensor, header: Tensor, elements: int) -> Tensor:
    """Invert the decoder of a type in `CODE_PACKERS`.

    Parameters
    ----------
    kind
        Name of the type.
    codes
        (N, K), uint8.
    header
        The other bytes of the blocks of each output, as `read_header` returns them: (N, n), uint8.
    elements
        Codes of a block.
    """
    N, K = codes.shape
    packed = CODE_PACKERS[kind](codes.reshape(N, K // elements, elements))
    blocks = packed.new_empty(*packed.shape[:2], packed.shape[2] + header.shape[1] * elements // max(1, K))
    has_codes = torch.ones(blocks.shape[2], dtype=torch.bool, device=blocks.device)
    for part in HEADERS[kind]:
        has_codes[part] = False
    blocks[..., has_codes] = packed
    blocks[..., ~has_codes] = header.reshape(N, K // elements, -1)
    return blocks


DECODERS: Mapping[str, Decoder] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "TQ1_0": _tq1_0,
    "TQ2_0": _tq2_0,
    "MXFP4": _mxfp4,
    "NVFP4": _nvfp4,
    "Q1_0": _q1_0,
    "Q2_0": _q2_0,
}
