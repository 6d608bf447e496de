"""The emulators, at addresses worked out by hand from the lane formulas."""

import ast
import sys
from pathlib import Path

import pytest
import torch

from qload.testing import emulators

K, N = 32, 128


def words(*shape: int, **fields: int) -> torch.Tensor:
    """Zeros but for the flat words given as w<index>=value."""
    out = torch.zeros(shape, dtype=torch.int64)
    for name, value in fields.items():
        out.view(-1)[int(name[1:])] = value
    return out.int()


def found(codes: torch.Tensor) -> list[tuple[int, int]]:
    """The coordinates of what is not zero."""
    return [(int(row), int(column)) for row, column in codes.nonzero()]


def modules_imported(path: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    named = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    relative = {"." for node in nodes if isinstance(node, ast.ImportFrom) and node.level}
    absolute = {node.module or "." for node in nodes if isinstance(node, ast.ImportFrom)}
    return {name.split(".")[0] for name in named | absolute} | relative


def test_the_emulators_import_nothing_but_torch_and_the_standard_library() -> None:
    files = sorted(Path(emulators.__file__).parent.glob("emulators*.py"))
    assert files
    for file in files:
        assert modules_imported(file) - sys.stdlib_module_names == {"torch"}, file


# A word of Marlin's is 4 * lane + j within the 128 (or, at 8 bits, 256) words of a 16 x 64 tile.
@pytest.mark.parametrize(
    ("word", "nibble", "place"),
    [
        (0, 4, (1, 0)),
        (0, 1, (8, 0)),
        (0, 2, (0, 8)),
        (1, 0, (0, 16)),
        (4, 0, (2, 0)),
        (16, 0, (0, 1)),
        (127, 7, (15, 63)),
        (128, 0, (0, 64)),
        (256, 0, (16, 0)),
    ],
)
def test_a_4_bit_marlin_nibble_lies_where_its_lane_multiplies_it(word, nibble, place) -> None:
    stored = words(K // 16, N * 2, **{f"w{word}": 1 << 4 * nibble})
    assert found(emulators.marlin_codes(stored, 4)) == [place]


@pytest.mark.parametrize(
    ("word", "byte", "place"),
    [
        (0, 2, (1, 0)),
        (0, 1, (8, 0)),
        (1, 0, (0, 8)),
        (8, 0, (2, 0)),
        (32, 0, (0, 1)),
        (255, 3, (15, 63)),
        (256, 0, (0, 64)),
        (512, 0, (16, 0)),
    ],
)
def test_an_8_bit_marlin_byte_lies_where_its_lane_multiplies_it(word, byte, place) -> None:
    stored = words(K // 16, N * 4, **{f"w{word}": 1 << 8 * byte})
    assert found(emulators.marlin_codes(stored, 8)) == [place]


@pytest.mark.parametrize("read", [emulators.marlin_codes, emulators.marlin_24_codes, emulators.exllama_codes])
@pytest.mark.parametrize("bits", [4, 8])
def test_every_code_is_read_once(read, bits) -> None:
    stored = torch.randint(-(2**31), 2**31, (K, N * bits // 2), generator=torch.Generator().manual_seed(0))
    fields = (stored[..., None] >> torch.arange(0, 32, bits)) & (2**bits - 1)
    codes = read(stored.int(), bits)
    assert codes.numel() == fields.numel()
    assert torch.equal(codes.flatten().sort().values, fields.flatten().sort().values)


def test_grouped_scales_are_stored_eight_columns_apart() -> None:
    columns = emulators.marlin_scales(torch.arange(128).expand(2, 128))
    assert columns[0, [0, 8, 16, 1, 63, 64]].tolist() == [0, 1, 2, 8, 63, 64]


def test_one_group_of_scales_is_stored_in_pairs() -> None:
    columns = emulators.marlin_scales(torch.arange(64).expand(1, 64))
    assert columns[0, [0, 1, 8, 9, 16, 2, 31, 32]].tolist() == [0, 1, 2, 3, 4, 8, 31, 32]


def test_the_order_of_scales_can_be_said() -> None:
    stored = torch.arange(64).expand(1, 64)
    assert emulators.marlin_scales(stored, grouped=True)[0, [8, 16, 1]].tolist() == [1, 2, 8]
    weight = emulators.marlin_weight(words(1, 128), stored, bits=4, grouped=True)
    assert weight[0, [8, 16, 1]].tolist() == [-8, -16, -64]


@pytest.mark.parametrize(
    ("bits", "word", "field", "column"),
    [
        (4, 0, 4, 8),
        (4, 0, 1, 16),
        (8, 0, 2, 8),
        (8, 0, 1, 16),
        (8, 1, 0, 32),
        (8, 2, 0, 1),
        (8, 16, 0, 64),
    ],
)
def test_marlin_zeros_are_permuted_then_interleaved(bits, word, field, column) -> None:
    stored = words(1, N * bits // 32, **{f"w{word}": 1 << bits * field})
    assert found(emulators.marlin_zeros(stored, bits)) == [(0, column)]


def test_a_marlin_row_returns_to_its_input_with_the_scale_of_its_group() -> None:
    qweight = words(2, 128, w0=0x1)  # stored row 0 is code 1, all else 0: values -7 and -8
    scales = torch.tensor([[1.0], [2.0]]).expand(2, 64)
    perm = (torch.arange(32) + 1) % 32
    one = torch.ones(32, dtype=torch.int32)
    whole = emulators.marlin_weight(qweight, scales, bits=4, g_idx=one, perm=perm)
    assert whole[[1, 2, 16, 17, 0], 0].tolist() == [-7, -8, -8, -16, -16]
    part = emulators.marlin_weight(qweight, scales, bits=4, g_idx=one, perm=perm, is_k_full=False)
    assert part[[1, 2], 0].tolist() == [-14, -16]


@pytest.mark.parametrize(("dtype", "raised"), [(torch.float16, 2.0**8), (torch.bfloat16, 2.0**120)])
def test_the_exponent_bias_of_fp8_scales_is_divided_out(dtype, raised) -> None:
    qweight = words(1, 256, w0=0x3C)  # e4m3 1.5
    scales = torch.full((1, 64), 0.5, dtype=dtype)
    plain = emulators.fp8_marlin_weight(qweight, scales, exponent_bias=False)
    fused = emulators.fp8_marlin_weight(qweight, scales * raised, exponent_bias=True)
    assert found(plain) == [(0, 0)]
    assert plain[0, 0] == 0.75
    assert torch.equal(plain, fused)


@pytest.mark.parametrize(
    ("byte", "place"),
    [
        (0, (0, 0)),
        (1, (0, 16)),
        (2, (0, 8)),
        (4, (0, 32)),
        (8, (1, 0)),
        (16, (0, 1)),
        (127, (1, 63)),
        (128, (0, 64)),
        (256, (2, 0)),
    ],
)
def test_a_scale_of_a_byte_lies_beside_that_of_the_next_group(byte, place) -> None:
    stored = torch.zeros(4 * 128, dtype=torch.uint8)
    stored[byte] = 1
    assert found(emulators.marlin_byte_scales(stored.reshape(4, 128))) == [place]


@pytest.mark.parametrize(
    ("byte", "place"),
    [(0, (0, 0)), (1, (0, 16)), (2, (0, 8)), (4, (0, 32)), (8, (0, 1)), (64, (0, 64)), (128, (1, 0))],
)
def test_a_scale_of_a_byte_of_vllm_0_33_lies_in_the_row_of_its_group(byte, place) -> None:
    stored = torch.zeros(4 * 128, dtype=torch.uint8)
    stored[byte] = 1
    assert found(emulators.marlin_byte_scales(stored.reshape(4, 128), paired=False)) == [place]


@pytest.mark.parametrize(
    ("dtype", "bias", "scale", "value"),
    [
        (torch.float16, 14, 0b10110_000, 1.0),
        (torch.bfloat16, 126, 0b10110_000, 1.0),
        (torch.float16, 14, 0b01110_100, 1.5 * 2.0**-8),
        (torch.bfloat16, 126, 0b01110_100, 1.5 * 2.0**-120),  # the highest bit is missed
        (torch.bfloat16, 0, 128, 2.0),
        (torch.bfloat16, 0, 0, 0.0),  # an exponent of -127 becomes 0
    ],
)
def test_a_four_bit_float_is_shifted_into_place_and_scaled(dtype, bias, scale, value) -> None:
    qweight = words(2, 128, w0=0xB3)  # rows 0 and 8 of column 0: e2m1 1.5 and -1.5
    scales = torch.full((2, 64), scale, dtype=torch.uint8)
    factor = torch.tensor([2.0 ** (bias - 7)]).to(dtype) if bias else None
    read = emulators.fp4_marlin_weight(qweight, scales, factor)
    new = emulators.fp4_marlin_vllm_0_33_weight(
        qweight, scales, None if factor is None else factor.float(), dtype=dtype
    )
    for each in (read, new):
        assert each[[0, 8], 0].tolist() == [1.5 * value, -1.5 * value]
        assert each.count_nonzero() == 2 * (value != 0)


@pytest.mark.parametrize(
    ("bits", "word", "field", "place"),
    [
        (4, 0, 4, (1, 0)),
        (4, 0, 1, (8, 0)),
        (4, 0, 2, (0, 4)),
        (4, 1, 0, (0, 1)),
        (4, 4, 0, (2, 0)),
        (4, 16, 0, (0, 8)),
        (4, 32, 0, (0, 16)),
        (8, 0, 2, (1, 0)),
        (8, 1, 0, (0, 4)),
        (8, 2, 0, (0, 1)),
    ],
)
def test_a_kept_code_lies_where_its_lane_multiplies_it(bits, word, field, place) -> None:
    stored = words(K // 32, N * bits // 2, **{f"w{word}": 1 << bits * field})
    assert found(emulators.marlin_24_codes(stored, bits)) == [place]


@pytest.mark.parametrize(
    ("address", "row", "column"),
    [(0, 0, 0), (1, 4, 0), (2, 0, 1), (3, 4, 1), (4, 1, 0), (8, 8, 0), (64, 2, 0), (128, 64, 0), (256, 0, 2)],
)
def test_metadata_lies_at_its_flat_address(address, row, column) -> None:
    meta = torch.zeros(2, 256, dtype=torch.int16)  # K = 64, N = 128
    meta[address // 256, address % 256] = 2 << 6  # quad 1, second value
    positions = emulators.marlin_24_positions(meta, 128)
    assert positions.nonzero().tolist() == [[4 * column + 1, 1, row]]


@pytest.mark.parametrize("bits", [4, 8])
def test_dropped_inputs_are_zero_and_kept_ones_lie_at_their_positions(bits) -> None:
    bias = 2 ** (bits - 1)
    stored = words(2, 64 * bits // 2, w0=bias + 1)
    meta = torch.full((2, 128), -0x2223, dtype=torch.int16)  # 0xDDDD: positions 1 and 3 of each quad
    scales = torch.tensor([[2.0], [4.0]]).expand(2, 64)
    weight = emulators.marlin_24_weight(stored, meta, scales, bits=bits)
    assert weight[:8, 0].tolist() == [0, 2, 0, -2 * bias, 0, -2 * bias, 0, -2 * bias]
    assert weight[60:, 63].tolist() == [0, -4 * bias, 0, -4 * bias]


def test_grouped_2_4_scales_are_stored_four_columns_apart_and_one_group_as_it_is() -> None:
    stored = torch.arange(64).expand(2, 64)
    assert emulators.marlin_24_scales(stored)[0, :9].tolist() == [0, 2, 4, 6, 1, 3, 5, 7, 8]
    assert torch.equal(emulators.marlin_24_scales(stored, grouped=False), stored)
    assert torch.equal(emulators.marlin_24_scales(stored[:1]), stored[:1])


@pytest.mark.parametrize(
    ("bits", "word", "value", "row", "code"),
    [
        (2, 0, 0x2 << 16, 1, 2),
        (2, 0, 0x3 << 2, 2, 3),
        (3, 1, 0x5 << 3, 12, 5),
        (3, 2, 0x3 << 16, 21, 3),
        (3, 0, 1 << 15, 30, 1),
        (3, 2, 1 << 15, 30, 4),
        (3, 1, 1 << 31, 31, 2),
        (4, 0, 0x9 << 16, 1, 9),
        (4, 0, 0x9 << 4, 2, 9),
        (8, 1, 0x7F << 8, 5, 0x7F),
    ],
)
def test_an_exllama_field_holds_its_code(bits, word, value, row, code) -> None:
    codes = emulators.exllama_codes(words(2 * bits, 1, **{f"w{word}": value}), bits)
    assert found(codes) == [(row, 0)]
    assert codes[row, 0] == code


@pytest.mark.parametrize(("mask", "value"), [(False, -8.0), (True, 0.0)])
def test_an_exllama_zero_point_wraps_only_when_masked(mask, value) -> None:
    sevens = words(1, 3) - 1
    weight = emulators.exllama_weight(
        words(3, 32), sevens, torch.ones(1, 32), bits=3, g_idx=words(32), mask=mask
    )
    assert weight.unique().tolist() == [value]


def test_an_exllama_row_returns_to_its_input_with_the_group_of_its_stored_row() -> None:
    qweight = words(4, 8, w0=0x3)  # stored row 0, column 0
    order = (torch.arange(32) + 1) % 32
    scales = torch.tensor([[1.0], [10.0]]).expand(2, 8)
    group = torch.arange(32, dtype=torch.int32) // 16
    weight = emulators.exllama_weight(qweight, words(2, 1), scales, bits=4, g_idx=group, q_perm=order)
    assert weight[[1, 2, 0], 0].tolist() == [2, -1, -10]


def test_a_3_bit_zero_point_may_straddle_two_words() -> None:
    qzeros = words(1, 3, w0=1 << 31, w1=1)  # column 10 takes bits 30..32
    weight = emulators.exllama_weight(
        words(3, 32), qzeros, torch.ones(1, 32), bits=3, g_idx=words(32), zero_offset=0
    )
    assert weight[0].nonzero().tolist() == [[10]]
    assert weight[0, 10] == -6


def test_a_product_is_rounded_once() -> None:
    # bfloat16 steps by 2**-7 at one: the weight, or each addend alone, would round away.
    x = torch.tensor([[1, 2.0**-8, 2.0**-8], [1, -1, 0]], dtype=torch.bfloat16)
    y = emulators.multiply(x, torch.tensor([[1 + 2.0**-12], [1], [1]]))
    assert y.dtype == torch.bfloat16
    assert y.flatten().tolist() == [1 + 2.0**-7, 2.0**-12]
