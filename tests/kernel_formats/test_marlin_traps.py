"""Numbered traps of shapes, orders, workspaces and activations; `test_traps.py` has the others."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from qload.detect import loader_from_config
from qload.errors import AmbiguousIndexError, PatternError, RepackError, ShapeError
from qload.formats import AWQWeight, GPTQWeight
from qload.kernel_formats import repack, restore
from qload.kernels import KERNELS, DequantizeLinearKernel, MarlinLinearKernel, MPLinearKernel
from qload.layouts import Stored, awq, gptq
from qload.methods import marlin_24_make_workspace, marlin_make_workspace, marlin_zero_points
from qload.storage import MemoryStorage
from qload.testing import assert_same_bits, assert_within_bound
from qload.testing.emulators import marlin_codes, marlin_scales, marlin_zeros
from qload.weights import Weights
from tests.kernel_formats.marlin_layers import layer, row_share
from tests.kernel_formats.test_fp8_marlin import pack as pack_fp8
from tests.kernel_formats.test_traps import awq_of
from tests.kernels.mp_layers import Case
from tests.kernels.test_mp_modules import prepared

pytestmark = pytest.mark.usefixtures("seen_texts")

every_kernel = pytest.mark.parametrize("kind", KERNELS, ids=lambda kind: kind.name)


def loaded(case: Case, g_idx: Tensor, target: Any) -> Any:
    tensors = {f"a.{name}": tensor for name, tensor in case.weight().fields().items()} | {"a.g_idx": g_idx}
    config = {
        "quant_method": "gptq", "bits": 4, "group_size": case.group, "checkpoint_format": "gptq_v2",
    }  # fmt: skip
    return Weights(MemoryStorage(tensors), loader=loader_from_config(config, target=target)).get_weights("a")


@pytest.mark.parametrize("target", [None, "marlin", "exllama"])
def test_trap_25_an_index_of_zeros_is_one_group_and_is_refused_for_several(target: str | None) -> None:
    """Exporters write zeros for "in order" too: over several groups the two readings differ."""
    nothing, one = torch.zeros(256, dtype=torch.int32), Case(group=-1)

    assert_same_bits(loaded(one, nothing, target).dequantize(), one.weight().dequantize())
    with pytest.raises(AmbiguousIndexError, match="g_idx: all zero, with two readings"):
        loaded(Case(), nothing, target)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("layout", ["gptq", "gptq_v2", "exllama", "marlin"])
def test_trap_30_every_width_keeps_its_values_beside_tiles_it_does_not_fill(layout: str, bits: int) -> None:
    weight = Case(bits=bits, N=96, K=160, zeros=Stored()).weight()
    if layout == "marlin" and bits in (2, 3):
        with pytest.raises(RepackError, match=f"reads 4 or 8 bits, got {bits}"):
            repack(weight, layout)
        return

    packed = repack(weight, layout)

    assert_same_bits(packed.dequantize(), weight.dequantize())
    assert_same_bits(restore(packed).fields()["qweight"], weight.qweight)


@pytest.mark.parametrize(("bits", "fill"), [(2, 16), (3, 32), (4, 8), (8, 4)])
def test_trap_30_codes_that_fill_no_word_are_refused(bits: int, fill: int) -> None:
    with pytest.raises(PatternError, match=f"multiple of {fill}"):
        gptq.rows(bits).pack(torch.zeros(fill + 1, 32, dtype=torch.int32))
    assert DequantizeLinearKernel.can_implement(Case(bits=bits, K=256 + fill // 2).config) == (
        False,
        f"needs K and N in multiples of {fill}, the codes of whole words; got K = {256 + fill // 2}",
    )


def test_trap_30_a_code_of_3_bits_straddles_two_words() -> None:
    codes = torch.zeros(32, 1, dtype=torch.int32)
    codes[10] = 0b101  # bits 30, 31 and 32 of the stream

    assert [word & 0xFFFFFFFF for word in gptq.rows(3).pack(codes).flatten().tolist()] == [1 << 30, 1, 0]


@pytest.mark.parametrize("act", [False, True], ids=["in order", "act order"])
@pytest.mark.parametrize("bits", [4, 8])
def test_trap_31_repacked_words_are_the_closed_form(bits: int, act: bool) -> None:
    weight = layer(256, 128, 64, bits=bits, act=act, sym=False)
    codes = gptq.rows(bits).unpack(weight.qweight)

    packed: Any = repack(weight, "marlin")

    order = torch.arange(256) if packed.perm is None else packed.perm.long()
    assert (packed.perm is not None) == act
    assert_same_bits(marlin_codes(packed.qweight, bits).int(), codes[order])


@pytest.mark.parametrize("bits", [4, 8])
def test_trap_31_awq_of_the_same_matrix_has_the_same_words(bits: int) -> None:
    case = Case(bits=bits, N=128, zeros=Stored())

    one, two = repack(case.weight(), "marlin"), repack(awq_of(case, 32), "marlin")

    for name, tensor in one.fields().items():
        assert_same_bits(two.fields()[name], tensor)


def counting(K: int, group: int) -> GPTQWeight:
    """Build a layer with scale n in column n, in every group."""
    weight = layer(K, 64, group)
    weight.scales.copy_(torch.arange(64.0).expand_as(weight.scales))
    return weight


@pytest.mark.parametrize(
    ("weight", "grouped"),
    [
        pytest.param(counting(128, 64), True, id="two groups"),
        pytest.param(counting(128, -1), False, id="one group"),
        pytest.param(counting(128, 128), False, id="a group of all rows"),
        pytest.param(row_share(counting(128, 64), 1, 2), False, id="a share with one group of two"),
        pytest.param(row_share(counting(256, 64), 1, 2), True, id="a share with two groups of four"),
    ],
)
def test_trap_32_the_order_of_scales_depends_on_the_local_groups(weight: GPTQWeight, grouped: bool) -> None:
    stored = repack(weight, "marlin").fields()["scales"]

    assert (stored.shape[0] > 1) == grouped
    assert stored[0, :4].tolist() == ([0, 8, 16, 24] if grouped else [0, 1, 8, 9])
    assert_same_bits(marlin_scales(stored, grouped), torch.arange(64.0).half().expand_as(stored).contiguous())


@pytest.mark.parametrize("group", [-1, 128, 64])
def test_trap_33_zero_points_have_the_order_of_groups_even_for_one(group: int) -> None:
    weight: AWQWeight = awq_of(Case(K=128, N=72, group=group, zeros=Stored()), group)
    zeros = Stored().read(weight.qzeros, awq.columns(4))  # type: ignore[arg-type]

    stored = repack(weight, "marlin").fields()["qzeros"]

    assert stored.shape[1] * 8 % 64 == 0
    assert_same_bits(marlin_zeros(stored, 4)[: zeros.shape[0], :72].int(), zeros)
    with pytest.raises(PatternError, match="multiple of 64, got 72"):
        marlin_zero_points(torch.zeros(1, 72, dtype=torch.int32), 1, 72, 4)


@pytest.mark.parametrize(("N", "count"), [(128, 64), (4096, 2048), (192, 128)])
def test_trap_35_a_sparse_workspace_has_64_locks_for_128_columns(N: int, count: int) -> None:
    workspace = marlin_24_make_workspace(N, torch.device("cpu"))

    assert (workspace.numel(), workspace.dtype, int(workspace.count_nonzero())) == (count, torch.int32, 0)


def test_trap_35_a_workspace_is_large_enough_zero_and_a_layers_own() -> None:
    """16 locks for 64 columns by the old rule, four a multiprocessor by the new."""
    (kernel, one), (_, two) = (prepared(MarlinLinearKernel, Case(N=9600, K=128, group=-1)) for _ in "ab")

    kernel.apply_weights(one, torch.ones(3, 128).half())

    assert one.workspace.numel() >= 9600 // 64 * 16
    assert marlin_make_workspace("cpu").numel() >= 4 * 192  # multiprocessors of the largest chip of 2025
    assert not one.workspace.any()
    assert one.workspace.data_ptr() != two.workspace.data_ptr()
    assert "workspace" not in one.state_dict()


@pytest.mark.parametrize("group", [-1, 64])
@pytest.mark.parametrize("act", [False, True], ids=["in order", "act order"])
@pytest.mark.parametrize("world", [1, 2])
def test_trap_36_k_is_full_unless_an_act_order_of_groups_is_cut(act: bool, group: int, world: int) -> None:
    whole = layer(256, 64, group, act=act)

    configs: list[Any] = [repack(row_share(whole, rank, world), "marlin").config for rank in range(world)]

    assert [config.is_k_full for config in configs] == [not (act and group > 0 and world > 1)] * world
    assert [config.act_order for config in configs] == [act and group > 0] * world


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "three dimensions": lambda x: x.reshape(2, 3, 256),
    "one dimension": lambda x: x[0],
    "every second row": lambda x: x[::2],
    "a transposed matrix": lambda x: x.T.contiguous().T,
    "a part of wider rows": lambda x: torch.cat([x, x], 1)[:, 128:384],
    "one row repeated": lambda x: x[:1].expand(5, 256),
    "no row": lambda x: x[:0],
    "no row in three dimensions": lambda x: x.reshape(2, 3, 256)[:, :0],
}


@every_kernel
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_trap_40_an_input_of_any_shape_and_stride_is_multiplied(
    kind: type[MPLinearKernel], view: Callable[[Tensor], Tensor]
) -> None:
    kernel, layer = prepared(kind, Case(act_order=True))
    x = view(torch.randn(6, 256, generator=torch.Generator().manual_seed(0)).half())

    got = kernel.apply_weights(layer, x)

    assert tuple(got.shape) == (*x.shape[:-1], 64)
    flat = x.contiguous().reshape(-1, 256)
    if flat.shape[0]:
        assert_within_bound(lambda _: got.reshape(-1, 64), kernel.typed(layer), flat)


def test_trap_41_four_bytes_of_fp8_are_a_word_and_rows_that_fill_none_are_padded() -> None:
    weight = torch.randn(64, 102, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)

    packed = pack_fp8(weight, torch.tensor(1.0))

    assert packed.qweight.shape[0] % 4 == 0
    assert torch.equal(packed.dequantize(), weight.float())
    assert_same_bits(marlin_codes(packed.qweight, 8)[:102, :64].to(torch.uint8), weight.view(torch.uint8).T)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (64,), (64, 1), (1, 64)], ids=str)
def test_trap_41_a_scale_of_any_shape_covers_its_outputs(shape: tuple[int, ...]) -> None:
    scale = (torch.arange(64) % 8 + 1.0).reshape(shape) if 64 in shape else torch.full(shape, 3.0)
    weight = torch.ones(64, 128).to(torch.float8_e4m3fn)

    packed = pack_fp8(weight, scale)

    assert torch.equal(packed.dequantize(), scale.reshape(-1, 1).expand(64, 128))


def test_trap_41_block_scales_are_expanded_and_need_the_block_size() -> None:
    weight, scale = torch.ones(128, 256).to(torch.float8_e4m3fn), torch.tensor([[1.0, 2.0]])

    packed = pack_fp8(weight, scale, block=(128, 128))

    assert packed.dequantize()[5].tolist() == [1.0] * 128 + [2.0] * 128
    with pytest.raises(ShapeError, match="blocks of scales need weight_block_size"):
        pack_fp8(weight, scale)
