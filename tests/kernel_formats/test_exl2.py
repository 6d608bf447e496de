"""EXL2 for ExLlama's kernels: byte-equal to exllamav2, restored bit for bit, refused beyond its limits."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from qload.detect import loader_from_config
from qload.errors import ArgumentError, NotWarmError, RepackError
from qload.formats import Exl2Weight
from qload.kernel_formats import Exl2KernelWeight, repack, restore
from qload.kernels.scratch import ScratchRequest, add_scratch_request, multiply, warm_up
from qload.parallel import Rank
from qload.storage import MemoryStorage
from qload.testing import assert_same_bits
from qload.weights import Weights
from tests.formats.exl2_layers import draw, weights
from tests.paths import cases

pytestmark = pytest.mark.usefixtures("seen_texts")

MIXED = [(8, 64), (6, 64), (5, 32), (4, 64), (3, 64), (2, 16)]
every_fixture = pytest.mark.parametrize("folder", cases("exl2"), ids=lambda folder: folder.name)


def read(folder: Path) -> tuple[Any, dict[str, Tensor]]:
    """Read the typed weight, and the tensors of exllamav2."""
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    tensors = load_file(folder / "model.safetensors")
    source = Weights(MemoryStorage(tensors), loader=loader_from_config(config))
    weight = source.get_weights(next(iter(tensors)).rpartition(".")[0])
    return weight, load_file(folder / "expected" / "expected.safetensors")


def kernel_weight(weight: Exl2Weight) -> Exl2KernelWeight:
    repacked = repack(weight, "exllama")
    assert isinstance(repacked, Exl2KernelWeight)
    return repacked


def assert_restored(kernel: Exl2KernelWeight, weight: Exl2Weight) -> None:
    restored = restore(kernel)
    assert (restored.config, restored.layer) == (weight.config, weight.layer)
    for name, tensor in weight.fields().items():
        assert_same_bits(restored.fields()[name], tensor)


@every_fixture
def test_every_kernel_tensor_has_the_bytes_of_exllamav2(folder: Path) -> None:
    weight, owner = read(folder)

    kernel = kernel_weight(weight)

    assert_same_bits(kernel.q_weight, owner["repacked.shuffled.q_weight"])
    assert_same_bits(kernel.q_group_map, owner["repacked.q_group_map"])
    assert_same_bits(kernel.q_perm.to(torch.int16), owner["repacked.q_perm"])


@every_fixture
def test_a_kernel_weight_has_the_values_of_exllamav2_and_is_restored(folder: Path) -> None:
    weight, owner = read(folder)

    kernel = kernel_weight(weight)

    assert torch.equal(kernel.dequantize().T, owner["expected.weight"].float())
    assert_restored(kernel, weight)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16])
def test_all_widths_are_restored(dtype: torch.dtype) -> None:
    drawn = draw(*MIXED, N=64)
    weight = drawn.weight(q_invperm=drawn.tensors["q_invperm"].to(dtype))

    kernel = kernel_weight(weight)

    assert_same_bits(kernel.dequantize(), drawn.meaning())
    assert kernel.q_perm.dtype == torch.int32
    assert_restored(kernel, weight)


def test_a_share_is_repacked_and_restored() -> None:
    share = weights(draw(*MIXED, N=64).named("a"), Rank(1, 2)).get_weights_col("a")
    assert isinstance(share, Exl2Weight)

    kernel = kernel_weight(share)

    assert_same_bits(kernel.dequantize(), share.dequantize())
    assert_restored(kernel, share)


def test_trap_48_the_map_of_mixed_groups_counts_down_to_the_last_row() -> None:
    """Groups of 4 and 8 rows of 8 bits, then one of 16 rows of 2 bits."""
    pairs = kernel_weight(draw((8, 4), (8, 8), (2, 16)).weight()).q_group_map.reshape(-1, 2).tolist()

    assert pairs[:4] == [[0, 4], [0, 3], [0, 2], [0, 1]]
    assert pairs[4:12] == [[1, left] for left in range(8, 0, -1)]
    assert pairs[12:] == [[2, left] for left in range(16, 0, -1)]


def test_trap_48_rows_beyond_32767_keep_their_place() -> None:
    """TGI sorts signed 16-bit values, in another order from 32,768 on."""
    drawn = draw((8, 36_000), (4, 4_000))
    weight = drawn.weight()

    kernel = kernel_weight(weight)

    assert torch.equal(kernel.q_perm.long(), torch.argsort(weight.q_invperm.long()))
    assert kernel.q_group_map[1].item() == 36_000 - (1 << 16)
    assert_same_bits(kernel.dequantize(), drawn.meaning())
    assert_restored(kernel, weight)


def test_trap_48_kernels_get_1_256_of_the_scale_and_the_stored_one_stays() -> None:
    weight = draw(*MIXED, largest=2.0**-10).weight()
    kernel = kernel_weight(weight)

    once, twice = kernel.divided_scale_max, kernel.divided_scale_max

    assert_same_bits(once, (weight.q_scale_max.float() / 256).half())
    assert_same_bits(twice, once)
    assert_same_bits(kernel.q_scale_max, weight.q_scale_max)


def test_trap_50_a_kernel_that_writes_into_its_tensors_leaves_the_checkpoints_alone() -> None:
    drawn = draw(*MIXED)
    weight = drawn.weight()
    before = {name: tensor.clone() for name, tensor in weight.fields().items()}

    for tensor in kernel_weight(weight).fields().values():
        tensor.fill_(1)
    for tensor in restore(kernel_weight(weight)).fields().values():
        tensor.fill_(1)

    for name, tensor in weight.fields().items():
        assert_same_bits(tensor, before[name])
    assert_same_bits(kernel_weight(weight).dequantize(), drawn.meaning())


@pytest.mark.parametrize(
    ("groups", "reason"),
    [
        pytest.param([(4, 8), (8, 4)], "the widths of its groups rise", id="widths that rise"),
        pytest.param([(8, 65_536)], "a group has 65536 rows; kernels count", id="a long group"),
        pytest.param([(8, 52_432)] * 5 + [(8, 4)], "q_weight has 65541 rows", id="many words"),
    ],
)  # fmt: skip
def test_groups_beyond_the_limits_of_kernels_are_refused(groups: list[tuple[int, int]], reason: str) -> None:
    title = "layer: exl2 to ExLlama's kernels: cannot repack"
    with pytest.raises(RepackError, match=f"^{title}\n  reason   {reason}"):
        kernel_weight(draw(*groups).weight())


class ScratchLayer(nn.Module):
    """Layer with a product through the scratch space of ExLlama layers."""

    def __init__(self, N: int) -> None:
        super().__init__()
        self.typed = kernel_weight(draw(*MIXED, N=N).weight())
        self.need = ScratchRequest("q_weight", *reversed(self.typed.shape))
        add_scratch_request(self, self.need)
        self.register_buffer("q_weight", self.typed.q_weight)

    def forward(self, x: Tensor) -> Tensor:
        return multiply(self, x, self.typed, "q_weight", None)


def test_trap_49_scratch_space_fits_the_largest_layer_and_never_shrinks() -> None:
    small, large = ScratchLayer(32), ScratchLayer(64)
    model, K, cpu = nn.ModuleList([small, large]), sum(rows for _, rows in MIXED), torch.device("cpu")

    assert warm_up(nn.ModuleList(), 8) == {}
    nbytes = warm_up(model, 8)[cpu]

    assert nbytes == large.need.bytes(8) >= 2 * K * 64
    assert warm_up(nn.ModuleList([small]), 4)[cpu] == nbytes
    assert warm_up(model, 16)[cpu] > nbytes


def test_trap_49_a_layer_multiplies_only_with_scratch_space() -> None:
    layer, x = ScratchLayer(32), torch.eye(304, dtype=torch.float16)
    with pytest.raises(NotWarmError):
        layer(x)

    warm_up(layer, 304)

    assert_same_bits(layer(x), layer.typed.dequantize().half().T.contiguous())
    with pytest.raises(ArgumentError, match="at most 304 tokens"):
        layer(x.repeat(2, 1))
