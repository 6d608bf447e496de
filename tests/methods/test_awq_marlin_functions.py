"""Marlin's functions on plain tensors: by hand, as inverses, and what they refuse."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn

from qload.errors import ArgumentError, ShapeError
from qload.kernels import scalar_types
from qload.layouts import awq, marlin
from qload.methods import (
    GPTQ_MARLIN_MIN_THREAD_K,
    GPTQ_MARLIN_MIN_THREAD_N,
    GPTQ_MARLIN_TILE,
    MARLIN_SUPPORTED_GROUP_SIZES,
    awq_to_marlin_zero_points,
    get_scale_perms,
    marlin_make_empty_g_idx,
    marlin_make_workspace,
    marlin_permute_scales,
    marlin_zero_points,
    pack_cols,
    replace_parameter,
    set_weight_attrs,
    unpack_cols,
    verify_marlin_supported,
    verify_marlin_supports_shape,
)
from qload.testing import assert_same_bits
from qload.testing.emulators import marlin_scales, marlin_zeros
from tests.paths import cases

BITS = st.sampled_from([4, 8])


def codes(rows: int, columns: int, bits: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2**bits, (rows, columns), generator=generator, dtype=torch.int32)


def test_the_constants_are_those_of_the_kernel() -> None:
    assert MARLIN_SUPPORTED_GROUP_SIZES == [-1, 32, 64, 128]
    assert (GPTQ_MARLIN_MIN_THREAD_N, GPTQ_MARLIN_MIN_THREAD_K, GPTQ_MARLIN_TILE) == (64, 128, 16)


def test_scales_of_groups_stand_eight_columns_apart_and_single_ones_in_pairs() -> None:
    grouped, single = get_scale_perms()

    assert grouped == [i + 8 * j for i in range(8) for j in range(8)]
    assert single == [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]


@pytest.mark.parametrize(
    ("group", "rows", "third"),
    [
        pytest.param(64, 2, 16, id="groups"),
        pytest.param(-1, 1, 8, id="one group"),
        pytest.param(128, 1, 8, id="a group of all rows"),
    ],
)
def test_the_order_of_scales_depends_on_whether_there_are_groups(group: int, rows: int, third: int) -> None:
    s = torch.arange(rows * 64).reshape(rows, 64).half()

    permuted = marlin_permute_scales(s, 128, 64, group)

    assert permuted[0, 2] == third
    assert_same_bits(marlin_scales(permuted), s)


@pytest.mark.parametrize("folder", cases("awq_marlin"), ids=lambda folder: folder.name)
def test_scales_and_zero_points_have_the_bytes_that_vllm_writes(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    stored = {n.rpartition(".")[2]: t for n, t in load_file(folder / "model.safetensors").items()}
    owner = load_file(folder / "expected" / "expected.safetensors")
    (K, N), groups = owner["expected.weight"].shape, stored["scales"].shape[0]

    scales = marlin_permute_scales(stored["scales"], K, N, config["group_size"])
    zeros = awq_to_marlin_zero_points(stored["qzeros"], groups, N, config["bits"])

    assert_same_bits(scales, owner["repacked.marlin.scales"])
    assert_same_bits(zeros, owner["repacked.marlin.qzeros"])


@pytest.mark.usefixtures("seen_texts")
def test_scales_of_another_number_of_groups_than_the_group_size_says_are_refused() -> None:
    with pytest.raises(
        ShapeError, match=r"s: wrong shape\n  expected \(2, 64\) = \(G, N\)\n  got      \(1, 64"
    ):
        marlin_permute_scales(torch.ones(1, 64), 128, 64, 64)


def test_a_word_has_the_first_column_in_its_low_bits() -> None:
    columns = torch.arange(8).unsqueeze(0)

    assert pack_cols(columns, 4, 1, 8).tolist() == [[0x76543210]]
    assert pack_cols(columns, 8, 1, 8).tolist() == [[0x03020100, 0x07060504]]


@given(bits=BITS, rows=st.integers(1, 5), words=st.integers(1, 4), seed=st.integers(0, 99))
def test_unpacking_undoes_packing(bits: int, rows: int, words: int, seed: int) -> None:
    N = words * 32 // bits
    q_w = codes(rows, N, bits, seed)

    packed = pack_cols(q_w, bits, rows, N)

    assert (packed.dtype, tuple(packed.shape)) == (torch.int32, (rows, words))
    assert_same_bits(unpack_cols(packed, bits, rows, N), q_w)


@given(bits=BITS, groups=st.integers(1, 4), tiles=st.integers(1, 3), seed=st.integers(0, 99))
def test_zero_points_of_awq_are_the_same_numbers_in_marlins_order(
    bits: int, groups: int, tiles: int, seed: int
) -> None:
    zp = codes(groups, 64 * tiles, bits, seed)

    words = awq_to_marlin_zero_points(awq.columns(bits).pack(zp), groups, 64 * tiles, bits)

    assert_same_bits(words, marlin_zero_points(zp, groups, 64 * tiles, bits))
    assert_same_bits(marlin_zeros(words, bits).int(), zp)
    assert_same_bits(marlin.zeros(bits).unpack(words), zp)


@pytest.mark.usefixtures("seen_texts")
@pytest.mark.parametrize(
    ("call", "text"),
    [
        pytest.param(lambda: pack_cols(torch.zeros(2, 8), 3, 2, 8), "num_bits\n.*4 or 8", id="bits"),
        pytest.param(lambda: pack_cols(torch.zeros(2, 8), 4, 2, 16), r"q_w: .*\n.*\(2, 16\)", id="shape"),
        pytest.param(lambda: pack_cols(torch.zeros(2, 9), 4, 2, 9), "size_n\n.*multiple of 8", id="words"),
        pytest.param(
            lambda: unpack_cols(torch.zeros(2, 2).int(), 8, 2, 16), r"\(2, 4\) = \(K, N\*8/32\)", id="packed"
        ),
        pytest.param(lambda: pack_cols(torch.full((1, 8), 16), 4, 1, 8), "0 <= code < 16", id="a code of 16"),
        pytest.param(
            lambda: awq_to_marlin_zero_points(torch.zeros(1, 8).int(), 2, 64, 4),
            r"\(G, N\*4/32\)",
            id="zeros",
        ),
        pytest.param(
            lambda: marlin_zero_points(torch.zeros(1, 72).int(), 1, 72, 4), "72", id="no whole tile"
        ),
        pytest.param(lambda: marlin_permute_scales(torch.ones(1, 64), 64, 64, 0), "-1 or at least 1", id="g"),
    ],
)
def test_what_does_not_fit_is_a_value_error_that_says_what_would(call: object, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        call()  # type: ignore[operator]


@pytest.mark.usefixtures("seen_texts")
@pytest.mark.parametrize(
    ("kind", "has_zp"),
    [
        pytest.param(scalar_types.uint4, True, id="uint4"),
        pytest.param(scalar_types.uint8, True, id="uint8"),
        pytest.param(scalar_types.uint4b8, False, id="uint4b8"),
        pytest.param(scalar_types.uint8b128, False, id="uint8b128"),
    ],
)
def test_marlin_reads_a_type_with_zero_points_or_with_a_bias(kind: object, has_zp: bool) -> None:
    verify_marlin_supported(kind, 128, has_zp=has_zp)

    with pytest.raises(ArgumentError, match=f"quant_type\n.*\n.*{kind}"):
        verify_marlin_supported(kind, 128, has_zp=not has_zp)
    with pytest.raises(ArgumentError, match=r"group_size\n.*-1, 32, 64, 128\n.*48"):
        verify_marlin_supported(kind, 48, has_zp=has_zp)


@pytest.mark.usefixtures("seen_texts")
@pytest.mark.parametrize(
    ("shape", "text"),
    [
        pytest.param((64, 128, 256, 128), None, id="fits"),
        pytest.param((64, 128, 128, 256), None, id="one group"),
        pytest.param((64, 128, 256, -1), None, id="no groups"),
        pytest.param((72, 128, 128, 128), "output_size.*\n.*min_thread_n = 64\n.*72", id="N"),
        pytest.param((64, 192, 192, 64), "input_size.*\n.*min_thread_k = 128\n.*192", id="K"),
        pytest.param((64, 128, 512, 256), "group_size = 256, as input_size = 512.*\n.*128", id="group"),
    ],
)
def test_a_shape_is_refused_with_the_rule_and_the_numbers(shape: tuple[int, ...], text: str | None) -> None:
    if text is None:
        verify_marlin_supports_shape(*shape)
        return

    with pytest.raises(ValueError, match=text):
        verify_marlin_supports_shape(*shape)


def test_a_workspace_made_on_the_cpu_serves_the_largest_chip() -> None:
    workspace = marlin_make_workspace("cpu")

    assert (workspace.dtype, workspace.ndim, int(workspace.count_nonzero())) == (torch.int32, 1, 0)
    assert workspace.numel() >= 192  # multiprocessors of the largest chip of 2025, GB202


@pytest.mark.gpu
def test_a_workspace_has_a_lock_for_every_multiprocessor() -> None:
    workspace = marlin_make_workspace(torch.device("cuda"))

    assert workspace.numel() >= torch.cuda.get_device_properties(0).multi_processor_count
    assert int(workspace.count_nonzero()) == 0


def test_an_empty_index_says_that_rows_are_in_order() -> None:
    index = marlin_make_empty_g_idx(torch.device("cpu"))

    assert (index.dtype, index.numel(), index.requires_grad) == (torch.int32, 0, False)


def test_a_replaced_parameter_has_neither_tags_nor_a_loader() -> None:
    layer = nn.Linear(2, 2, bias=False)
    set_weight_attrs(layer.weight, {"input_dim": 1, "weight_loader": print})

    replace_parameter(layer, "weight", torch.zeros(3, dtype=torch.int32))

    assert (layer.weight.dtype, layer.weight.requires_grad) == (torch.int32, False)
    assert not hasattr(layer.weight, "input_dim")
    assert not hasattr(layer.weight, "weight_loader")
    assert [name for name, _ in layer.named_parameters()] == ["weight"]


@pytest.mark.usefixtures("seen_texts")
def test_a_tag_is_set_once() -> None:
    param = nn.Parameter(torch.zeros(1))
    set_weight_attrs(param, {"input_dim": 0})
    set_weight_attrs(param, None)

    with pytest.raises(ArgumentError, match="input_dim"):
        set_weight_attrs(param, {"output_dim": 1, "input_dim": 1})

    assert param.input_dim == 0
    assert not hasattr(param, "output_dim")
