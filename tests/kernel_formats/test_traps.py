"""Numbered traps of weight loading: zero points, groups and Marlin.

Tests of other modules cover the numbers that are missing.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qload.detect import loader_from_config
from qload.errors import CutError, DivideError, IndexValueError, MismatchError, RepackError
from qload.formats import AWQConfig, AWQWeight, GPTQConfig, GPTQWeight, MarlinConfig, MarlinWeight
from qload.kernel_formats import PanelsWeight, repack, restore
from qload.kernels import ExllamaLinearKernel, MarlinLinearKernel
from qload.layouts import STORED_MINUS_ONE, Stored, StoredMinusOne, StoredMinusOneUnmasked, awq, gptq
from qload.loader import ConfiguredFormat, FormatLoader
from qload.parallel import FakeWorld, Rank
from qload.storage import MemoryStorage
from qload.testing import assert_reads_back, assert_same_bits
from qload.weights import Weights
from tests.kernels.mp_layers import Case, row_share


def awq_of(case: Case, group: int) -> AWQWeight:
    plain = case.weight()
    packing = awq.columns(case.bits)
    return AWQWeight(
        config=AWQConfig(group, case.bits),
        qweight=packing.pack(gptq.rows(case.bits).unpack(plain.qweight)),
        qzeros=packing.pack(Stored().read(plain.qzeros, gptq.columns(case.bits))),
        scales=plain.scales,
    )


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("convention", [STORED_MINUS_ONE, Stored()], ids=lambda c: c.name)
def test_trap_17_every_zero_point_survives_its_convention(bits: int, convention: StoredMinusOne) -> None:
    zeros = (torch.arange(256 * 32) % 2**bits).reshape(256, 32)

    assert torch.equal(
        convention.read(convention.write(zeros, gptq.columns(bits)), gptq.columns(bits)), zeros
    )


@given(words=st.lists(st.integers(-(2**31), -1), min_size=8, max_size=8))
def test_trap_18_words_with_the_sign_bit_set_unpack_without_it(words: list[int]) -> None:
    packed = torch.tensor([words], dtype=torch.int32)

    codes = gptq.rows(4).unpack(packed)

    assert 0 <= int(codes.min()) <= int(codes.max()) <= 15
    assert torch.equal(gptq.rows(4).pack(codes), packed)
    assert int(codes[-1].min()) >= 8


def test_trap_19_awq_through_gptq_means_what_awq_means() -> None:
    weight = awq_of(Case(zeros=Stored(), N=64, K=64), 32)

    for layout in ("gptq", "gptq_v2", "exllama", "marlin"):
        assert_same_bits(repack(weight, layout).dequantize(), weight.dequantize())
    assert awq.columns(4).pack(torch.arange(8)[None]).item() == 0x75316420


@pytest.mark.parametrize("target", ["gptq", "exllama", "marlin"])
def test_trap_20_awq_with_one_group_has_rows_of_group_0(target: str) -> None:
    """Other loaders compute negative sizes and groups, K // -1 and k // -1."""
    weight = awq_of(Case(group=-1, zeros=Stored()), -1)

    packed = repack(weight, target)

    assert_same_bits(packed.dequantize(), weight.dequantize())
    if "g_idx" in packed.fields():
        assert not packed.fields()["g_idx"].any()


@pytest.mark.parametrize("desc_act", [True, False, None])
def test_trap_21_act_order_is_read_from_the_data_whatever_the_flag(desc_act: bool | None) -> None:
    case = Case(act_order=True)
    tensors = {f"a.{name}": tensor for name, tensor in case.weight().fields().items()}
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gptq_v2"}
    if desc_act is not None:
        config["desc_act"] = desc_act
    loader = loader_from_config(config, target="marlin")

    for name in ("get_weights", "get_weights_row", "get_weights_col"):
        loaded = getattr(Weights(MemoryStorage(tensors), loader=loader), name)("a")
        assert loaded.config.act_order
        assert_same_bits(loaded.dequantize(), case.weight().dequantize())


@pytest.mark.parametrize("layout", ["marlin", "exllama"])
def test_trap_22_row_shares_in_act_order_keep_all_scales_and_sum_to_the_product(layout: str) -> None:
    case = Case(act_order=True, group=64)
    whole, x = case.weight(scale=1.0), (torch.arange(2 * 256) % 5 - 2).reshape(2, 256).double()

    parts = [repack(row_share(case, whole, place, 2), layout) for place in range(2)]

    assert all(part.fields()["scales"].shape[0] == 4 for part in parts)
    total = sum(
        piece @ part.dequantize().double().T for piece, part in zip(x.chunk(2, 1), parts, strict=True)
    )
    assert torch.equal(torch.as_tensor(total), x @ whole.dequantize().double().T)


@pytest.mark.parametrize("world", [2, 4])
def test_trap_23_a_cut_inside_a_group_is_repacked_by_every_rank(world: int) -> None:
    """K = 384 in groups of 128: rank 0 sees groups in order, rank 1 does not."""
    case = Case(K=384, group=128)
    whole = case.weight()

    parts = [repack(row_share(case, whole, place, world), "marlin") for place in range(world)]

    assert_same_bits(torch.cat([part.dequantize() for part in parts], 1), whole.dequantize())


def test_trap_24_a_trivial_index_takes_the_fast_path_although_desc_act_is_true() -> None:
    tensors = {f"a.{name}": tensor for name, tensor in Case().weight().fields().items()}
    config = {
        "quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "checkpoint_format": "gptq_v2",
    }  # fmt: skip

    loaded = Weights(MemoryStorage(tensors), loader=loader_from_config(config, target="auto")).get_weights(
        "a"
    )

    assert isinstance(loaded, PanelsWeight)
    assert (loaded.perm, loaded.config.act_order) == (None, False)


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("layout", ["exllama", "marlin"])
def test_trap_26_an_index_of_any_integer_dtype_is_repacked_and_restored(
    layout: str, dtype: torch.dtype
) -> None:
    case = Case(act_order=True)
    fields = {**case.weight().fields(), "g_idx": case.weight().g_idx.to(dtype)}
    weight = GPTQWeight(config=GPTQConfig(4, 32, Stored()), **fields)

    packed = repack(weight, layout)

    assert_same_bits(packed.dequantize(), weight.dequantize())
    assert_same_bits(restore(packed).fields()["g_idx"], weight.g_idx)


@pytest.mark.usefixtures("seen_texts")
def test_trap_26_an_index_out_of_range_raises_before_a_kernel_reads_there() -> None:
    fields = Case().weight().fields()
    fields["g_idx"][7] = 8

    with pytest.raises(IndexValueError, match=r"expected 0 <= index < 8\n  got      8 at 7"):
        GPTQWeight(config=GPTQConfig(4, 32, Stored()), **fields)


@pytest.mark.usefixtures("seen_texts")
@pytest.mark.parametrize("target", [None, "marlin", "exllama"])
def test_trap_27_layers_in_different_act_order_do_not_fuse(target: str | None) -> None:
    tensors = {
        f"{name}.{field}": tensor
        for name, seed in (("q", 1), ("k", 2))
        for field, tensor in Case(act_order=True, seed=seed).weight().fields().items()
    }
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gptq_v2"}
    loader = loader_from_config(config, target=target)  # type: ignore[call-overload]

    with pytest.raises(MismatchError, match="parts of a fused layer differ in g_idx, from row"):
        Weights(MemoryStorage(tensors), loader=loader).get_multi_weights_col(["q", "k"])


def test_trap_28_asymmetric_zero_points_stay_despite_a_symmetric_claim() -> None:
    """A kernel without zero points would read every weight one or more scales off."""
    case = Case(zeros=Stored())
    tensors = {f"a.{name}": tensor for name, tensor in case.weight().fields().items()}
    config = {
        "quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "checkpoint_format": "gptq_v2",
    }  # fmt: skip

    loaded = Weights(MemoryStorage(tensors), loader=loader_from_config(config, target="marlin")).get_weights(
        "a"
    )

    assert loaded.fields()["qzeros"].any()
    assert_same_bits(loaded.dequantize(), case.weight().dequantize())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("layout", ["exllama", "marlin"])
def test_trap_29_scales_of_any_dtype_are_reordered_and_never_cast(layout: str, dtype: torch.dtype) -> None:
    fields = Case().weight().fields()
    fields["scales"] = torch.tensor([1e-8, 3e-5, 1.0, 6e4]).to(dtype).repeat(8, 16)
    weight = GPTQWeight(config=GPTQConfig(4, 32, Stored()), **fields)

    packed = repack(weight, layout)

    assert packed.fields()["scales"].dtype == dtype
    assert_same_bits(packed.dequantize(), weight.dequantize())
    assert_same_bits(restore(packed).fields()["scales"], weight.scales)


@pytest.mark.parametrize(("N", "K"), [(64, 160), (72, 128), (8, 32), (200, 288), (96, 96)])
def test_trap_34_a_shape_that_no_thread_block_divides_is_padded_and_cut_off_again(N: int, K: int) -> None:
    case = Case(N=N, K=K, zeros=Stored())
    kernel, layer = MarlinLinearKernel(case.config, "qweight", "scales", "qzeros"), case.layer(case.weight())
    bias = torch.arange(N).half()

    kernel.process_weights_after_loading(layer)

    rows, columns = 16 * layer.qweight.shape[0], layer.scales.shape[1]
    assert (columns % 64, rows % 128) == (0, 0) or (columns % 128, rows % 64) == (0, 0)
    assert_reads_back(lambda x: kernel.apply_weights(layer, x), case.weight(), torch.float16)
    assert torch.equal(kernel.apply_weights(layer, torch.zeros(2, K).half(), bias), bias.expand(2, N))


def test_trap_37_one_group_in_act_order_needs_no_index() -> None:
    case = Case(group=-1, act_order=True)

    packed = repack(case.weight(), "marlin")

    assert (packed.fields().keys() & {"g_idx", "perm"}) == set()
    assert packed.config.group_size == -1


@pytest.mark.usefixtures("seen_texts")
@pytest.mark.parametrize("blocks", [(32, 32, 64), (96, 16, 16), (1, 1, 6)])
def test_trap_38_blocks_that_end_inside_of_a_marlin_tile_are_refused(blocks: tuple[int, ...]) -> None:
    """Narrow key and value blocks would be cut within 64 interleaved columns."""
    tensors = {
        "a.B": torch.zeros(8, 256, dtype=torch.int32),
        "a.s": torch.ones(1, 128, dtype=torch.float16),
    }
    loader = FormatLoader(ConfiguredFormat(MarlinWeight, MarlinConfig(-1)))

    for rank in FakeWorld(2):
        weights = Weights(MemoryStorage(tensors), loader=loader, process_group=rank)
        with pytest.raises((CutError, DivideError), match=r"cuts must be multiples of 64|does not divide"):
            weights.get_weights_col_packed("a", blocks)


@pytest.mark.parametrize("name", ["get_weights", "get_weights_col", "get_weights_row"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_trap_39_sparse_layers_load_every_way_with_either_dtype_of_scales(
    name: str, dtype: torch.dtype
) -> None:
    tensors = {
        "a.B_24": torch.arange(8 * 256, dtype=torch.int32).reshape(8, 256),
        "a.B_meta": torch.full((8, 256), 0x4444, dtype=torch.int16),
        "a.s": torch.ones(2, 128, dtype=dtype),
    }
    config = {"quant_method": "marlin", "checkpoint_format": "marlin_24", "bits": 4, "group_size": 128}
    whole = Weights(MemoryStorage(tensors), loader=loader_from_config(config)).get_weights("a").dequantize()

    parts = [
        getattr(Weights(MemoryStorage(tensors), loader=loader_from_config(config), process_group=rank), name)(
            "a"
        )
        for rank in FakeWorld(2)
    ]

    if name == "get_weights":
        assert_same_bits(parts[0].dequantize(), whole)
    else:
        dim = 0 if name == "get_weights_col" else 1
        assert_same_bits(torch.cat([part.dequantize() for part in parts], dim), whole)


@pytest.mark.usefixtures("seen_texts")
def test_a_zero_point_beyond_marlin_is_refused() -> None:
    case = Case(zeros=StoredMinusOneUnmasked(), bits=4)
    weight = case.weight()
    weight.qzeros.fill_(-1)

    with pytest.raises(RepackError, match="a zero point of 16 does not fit 4 bits"):
        repack(weight, "marlin")
    assert ExllamaLinearKernel.can_implement(case.config) == (True, None)


def test_a_row_share_of_a_marlin_checkpoint_with_one_group_keeps_its_values() -> None:
    """Its scales stay in the order for groups; a kernel would read the single row as one scale per column."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "a.B": torch.randint(-(2**31), 2**31, (16, 128), generator=generator).to(torch.int32),
        "a.s": torch.rand(2, 64, generator=generator).half(),
    }
    loader = FormatLoader(ConfiguredFormat(MarlinWeight, MarlinConfig(128)))
    whole = Weights(MemoryStorage(tensors), loader=loader).get_weights("a").dequantize()

    for place in range(2):
        share = Weights(MemoryStorage(tensors), loader=loader, process_group=Rank(place, 2)).get_weights_row(
            "a"
        )
        packed = repack(share, "marlin")

        assert_same_bits(share.dequantize(), whole[:, 128 * place : 128 * (place + 1)])
        assert_same_bits(packed.dequantize(), share.dequantize())
        assert not torch.equal(packed.fields()["scales"], share.fields()["s"])
        assert_same_bits(restore(packed).fields()["s"], share.fields()["s"])
