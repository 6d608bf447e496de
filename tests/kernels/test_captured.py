"""Linears in a CUDA graph: no way to multiply a stored or a repacked layer reads or copies on the host."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from qload import layers
from qload.checkpoint import open_checkpoint
from qload.errors import RepackError
from qload.formats import FORMATS, ComfyAWQConfig, ComfyAWQWeight, Exl2Weight, MXFP4ExpertsWeight
from qload.kernel_formats import Exl2KernelWeight, GPTQMarlinWeight, repack, restore
from qload.kernels.linear import copy_into
from qload.layouts.exl2 import Exl2Groups
from qload.spec import Weight
from qload.testing import assert_same_bits
from tests.kernels.captured_layers import LAYERS, loaded, orders
from tests.paths import FIXTURES, cases
from tests.support.fake_gpu import fake_capture, fake_like

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# Types with grids, which the first call copies to the device: a graph is captured after a call.
GRIDS = {f"layers.{name}" for name in ("iq1_m", "iq1_s", "iq2_s", "iq2_xs", "iq2_xxs", "iq3_s", "iq3_xxs")}
TURNED = {"comfy/w4a8_convrot_8x256"}  # by signs, which the first call copies to the device
WITHOUT_SCALES = {"modelopt/nvfp4_svd_16x128"}  # of inputs
GGUF_TYPES = FIXTURES / "gguf" / "all_types" / "model.gguf"


def call_on_fake_gpu(weight: Weight, dtype: torch.dtype, activations: Any) -> None:
    if type(weight) is GPTQMarlinWeight:  # as get_linear does on a GPU, ahead of a capture
        with suppress(RepackError):
            weight = repack(weight, "strips")
    linear: Any = weight.get_linear(activations=activations, maximum="own")
    stored: Weight = linear.typed
    with fake_capture():
        fake = stored.holding({name: fake_like(tensor) for name, tensor in stored.fields().items()})
        x = torch.empty(3, weight.shape[1], dtype=dtype, device="cuda")
        y = fake.get_linear(activations=activations, maximum="own")(x)
    assert (tuple(y.shape), y.dtype, y.device.type) == ((3, weight.shape[0]), dtype, "cuda")


@pytest.mark.parametrize("name", LAYERS)
def test_a_capture_of_a_linear_reads_nothing_on_the_host(name: str) -> None:
    weight = loaded(FIXTURES / name)
    if name in TURNED:
        weight = weight.without_transforms()
    ways = ["declared", "unquantized"]
    if weight.activations is None or name in WITHOUT_SCALES:
        ways.remove("declared")
    for held in orders(weight):
        for dtype in DTYPES:
            for activations in ways:
                call_on_fake_gpu(held, dtype, activations)


def test_every_format_of_a_matrix_is_captured() -> None:
    held: set[type[Weight]] = {type(loaded(FIXTURES / name)) for name in LAYERS}
    awq = ComfyAWQWeight(  # no fixture has it
        config=ComfyAWQConfig(64),
        weight=torch.ones(8, 64, dtype=torch.int8),
        weight_scale=torch.ones(2, 8, dtype=torch.float16),
        weight_zeros=torch.ones(2, 8, dtype=torch.float16),
    )
    for dtype in DTYPES:
        call_on_fake_gpu(awq, dtype, "unquantized")

    assert held | {ComfyAWQWeight} == {
        each for each in FORMATS if not each.plain and each is not MXFP4ExpertsWeight
    }


EXL2 = pytest.mark.parametrize("folder", cases("exl2"), ids=lambda folder: folder.name)


@EXL2
def test_exl2_of_exllamas_order_is_multiplied_as_it_is_stored(folder: Path) -> None:
    weight = loaded(folder)
    shuffled = repack(weight, "exllama")
    linear: Any = shuffled.get_linear()

    assert type(shuffled) is Exl2KernelWeight
    assert type(linear.typed) is Exl2Weight
    assert_same_bits(linear.typed.dequantize(), shuffled.dequantize())
    for name, tensor in restore(shuffled).fields().items():
        assert_same_bits(linear.typed.fields()[name], tensor)
    linear.q_weight.zero_()
    copy_into(linear, shuffled)
    assert_same_bits(linear.q_weight, weight.fields()["q_weight"])


@EXL2
def test_codes_that_are_gathered_are_those_that_are_unpacked(folder: Path) -> None:
    weight: Any = loaded(folder)
    groups = Exl2Groups.read(weight.q_groups, weight.q_weight.shape[0])

    assert_same_bits(groups.gather(weight.q_weight, weight.layer.K), groups.unpack(weight.q_weight))


@pytest.mark.parametrize(
    "prefix",
    [each.prefix for each in layers(GGUF_TYPES) if not each.plain and each.prefix not in GRIDS],
)
def test_blocks_of_gguf_are_captured(prefix: str) -> None:
    with open_checkpoint(GGUF_TYPES) as weights:
        call_on_fake_gpu(weights.get_weights(prefix), torch.bfloat16, "unquantized")
