"""What no quantizer can act on: values, shapes and settings, refused by name and by all ranks alike."""

from typing import Any

import pytest
import torch
from torch import Tensor

from qload.detect import DefaultWeightsLoader, loader_from_config
from qload.errors import ArgumentError, CastError, CutError, MismatchError, QloadError, ShapeError
from qload.parallel import FakeWorld, Rank
from qload.quantize import BNB4Quantizer, BNBInt8Quantizer, EETQQuantizer, Fp8Quantizer, QuantizingLoader
from qload.quantize.policy import mlp_only
from qload.spec import Layer
from qload.storage import MemoryStorage
from qload.testing import assert_same_bits
from qload.weights import Weights

pytestmark = pytest.mark.usefixtures("seen_texts")

EVERY = [
    Fp8Quantizer("tensor"),
    Fp8Quantizer("channel"),
    Fp8Quantizer("block", (64, 64)),
    EETQQuantizer(),
    BNBInt8Quantizer(),
    BNB4Quantizer(),
]
every = pytest.mark.parametrize("quantizer", EVERY, ids=repr)


def view(quantizer: Any, rank: Rank | None = None, statistics: Any = "whole", **layers: Tensor) -> Weights:
    loader = QuantizingLoader(DefaultWeightsLoader(), quantizer, statistics=statistics)
    storage = MemoryStorage({f"{name}.weight": tensor for name, tensor in layers.items()})
    return Weights(storage, loader=loader, process_group=rank)


def wrong(row: int, value: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """(128, 64) ones, and one value that is none of them."""
    weight = torch.ones(128, 64, dtype=dtype)
    weight[row, 3] = value
    return weight


@every
@pytest.mark.parametrize("load", [Weights.get_weights, Weights.get_weights_col, Weights.get_weights_row])
def test_what_one_rank_could_not_quantize_all_refuse_with_the_stored_place(quantizer: Any, load: Any) -> None:
    for rank in FakeWorld(2):
        with pytest.raises(MismatchError, match=r"a\.weight: cannot be quantized\n.*\n.* nan at \(100, 3\)"):
            load(view(quantizer, rank, a=wrong(100, torch.nan)), "a")


def test_what_fp16_does_not_hold_in_one_share_all_ranks_refuse() -> None:
    for rank in FakeWorld(2):
        with pytest.raises(CastError, match="float16 overflows\n  got      1e"):
            view(BNBInt8Quantizer(), rank, a=wrong(100, 1e9)).get_weights_col("a")


@pytest.mark.parametrize(
    ("load", "name"),
    [
        (lambda w: w.get_weights_col("a"), r"a\[64:128\].*(.|\n)*\(36, 3\)"),
        (lambda w: w.get_weights_row("a"), r"a\[0:128, 32:64\].*(.|\n)*\(100, 3\)"),
        (lambda w: w.get_weights_col_packed("a", 2), r"a\[96:128\].*(.|\n)*\(4, 3\)"),
        (lambda w: w.get_weights("a"), r"a\.weight(.|\n)*\(100, 35\)"),
    ],
    ids=["outputs", "inputs", "packed", "whole"],
)
def test_a_share_that_is_quantized_alone_says_which_it_is(load: Any, name: str) -> None:
    weight = torch.ones(128, 64)
    weight[100, 3] = weight[100, 35] = torch.nan
    if "35" in name:
        weight[100, 3] = 1

    with pytest.raises(MismatchError, match=name):
        load(view(Fp8Quantizer(), Rank(1, 2), "share", a=weight))


@every
@pytest.mark.parametrize("shape", [(0, 64), (64, 0)])
@pytest.mark.parametrize("statistics", ["whole", "share"])
def test_a_layer_without_elements_is_refused(quantizer: Any, shape: tuple[int, int], statistics: str) -> None:
    with pytest.raises(ShapeError, match=r"a\.weight: wrong shape\n  expected \(N, K\), each at least 1"):
        view(quantizer, None, statistics, a=torch.ones(shape)).get_weights("a")


@every
@pytest.mark.parametrize(("value", "way"), [(1e300, r"overflows\n  got      1e\+300")])
def test_what_float32_does_not_hold_is_refused_with_its_value(quantizer: Any, value: float, way: str) -> None:
    with pytest.raises(CastError, match=rf"a\.weight: a cast from float64 to float(16|32) {way}"):
        view(quantizer, a=wrong(1, value, torch.float64)).get_weights("a")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("quantizer", "tensor"), [(EETQQuantizer(), "weight_scales"), (BNBInt8Quantizer(), "weight")]
)
def test_an_output_that_would_be_zeros_is_refused_and_one_of_zeros_is_not(
    quantizer: Any, tensor: str, dtype: torch.dtype
) -> None:
    weight = torch.ones(64, 64, dtype=dtype)
    weight[7], weight[9] = 0, 2.0**-26

    with pytest.raises(
        CastError, match=rf"a\.{tensor}: .* to float16 underflows(.|\n)*leave this layer plain"
    ):
        view(quantizer, a=weight).get_weights("a")
    weight[9, 0] = 1
    assert_same_bits(view(quantizer, a=weight).get_weights("a").dequantize()[7], torch.zeros(64))


def test_an_output_of_float64_that_float32_has_no_room_for_is_refused() -> None:
    weight = torch.ones(4, 64, dtype=torch.float64)
    weight[2], weight[3] = 1e-60, 1e-70

    with pytest.raises(
        CastError, match=r"float64 to float32 underflows\n  got      1e-60 \(2 values in all\)\n"
    ):
        view(BNB4Quantizer(), a=weight).get_weights("a")


def test_a_world_whose_shares_fill_no_tile_of_eetq_is_offered_another() -> None:
    weight = torch.ones(128, 512)
    for rank in FakeWorld(4):
        with pytest.raises(CutError, match=r"a.*: cannot cut N = 128 at 32 for 4 ranks(.|\n)*world sizes 2"):
            view(EETQQuantizer(), rank, a=weight).get_weights_col("a")
        with pytest.raises(ShapeError, match=r"\(32, 512\)\n  remedy   cut \(128, 512\) into fewer shares"):
            view(EETQQuantizer(), rank, "share", a=weight).get_weights_col("a")


def test_a_layer_that_fills_no_tile_of_eetq_is_at_fault_itself() -> None:
    with pytest.raises(ShapeError) as caught:
        view(EETQQuantizer(), Rank(1, 2), "share", a=torch.ones(96, 64)).get_weights_col("a")

    assert (caught.value.got, caught.value.hint) == ((96, 64), "")


def test_parts_of_one_input_and_different_outputs_fuse_in_4_bits() -> None:
    """K = 1: only each part's own config tells its N."""
    layers = {name: torch.linspace(-1, 1, N)[:, None] for name, N in {"q": 8, "k": 4}.items()}
    quantizer = BNB4Quantizer(blocksize=2)

    fused = view(quantizer, **layers).get_multi_weights_col(["q", "k"])

    alone = [
        quantizer.quantize(weight, Layer((len(weight),), 1, (len(weight), 1)), weight.dtype)
        for weight in layers.values()
    ]
    assert_same_bits(fused.dequantize(), torch.cat([weight.dequantize() for weight in alone]))


def test_a_loader_that_repacks_is_none_to_quantize_with() -> None:
    inner: Any = loader_from_config(None, target="auto")

    with pytest.raises(ArgumentError, match="inner\n  expected a loader of the checkpoint's own types"):
        QuantizingLoader(inner, Fp8Quantizer())


@pytest.mark.parametrize(
    "make",
    [
        lambda: BNB4Quantizer(blocksize="64"),  # type: ignore[arg-type]
        lambda: BNB4Quantizer(blocksize=2.5),  # type: ignore[arg-type]
        lambda: Fp8Quantizer("block", "ab"),  # type: ignore[arg-type]
        lambda: Fp8Quantizer("block", (1.5, 2)),  # type: ignore[arg-type]
        lambda: Fp8Quantizer("block", (1, 2, 3)),  # type: ignore[arg-type]
        lambda: Fp8Quantizer("block", (0, 2)),
        lambda: Fp8Quantizer(activation_scale_ub=-1),
        lambda: Fp8Quantizer(activation_scale_ub=torch.inf),
        lambda: Fp8Quantizer(activation_scale_ub="x"),  # type: ignore[arg-type]
        lambda: QuantizingLoader(DefaultWeightsLoader(), Fp8Quantizer(), dtype=torch.int8),
        lambda: mlp_only(blocks="2"),  # type: ignore[arg-type]
        lambda: mlp_only(blocks=2.5),  # type: ignore[arg-type]
        lambda: mlp_only(blocks=2.5, first_and_last=False),  # type: ignore[arg-type]
    ],
)
def test_settings_of_another_kind_are_refused(make: Any) -> None:
    with pytest.raises(ArgumentError) as caught:
        make()

    assert isinstance(caught.value, QloadError)
    assert caught.value.argument in (
        "blocksize", "fp8: block", "fp8: activation_scale_ub", "dtype", "blocks",
    )  # fmt: skip
