"""Quantized while loading: the same model at every world size, and nothing quantized twice."""

from typing import Any

import pytest
import torch
from torch import Tensor

from qload.errors import ArgumentError, CutError, DtypeError, MismatchError
from qload.formats import Fp8Config, Fp8Weight, UnquantizedConfig, UnquantizedWeight
from qload.loader import ConfiguredFormat, FormatLoader
from qload.loader.exclusion import Exclusions
from qload.parallel import ALONE, FakeWorld, Rank
from qload.quantize import (
    BNB4Quantizer,
    BNBInt8Quantizer,
    EETQQuantizer,
    Fp8Quantizer,
    QuantizingLoader,
    loading,
)
from qload.quantize.policy import Modules, mlp_only
from qload.spec import Layer
from qload.storage import MemoryStorage
from qload.testing import assert_same_bits
from qload.weights import Weights
from tests.formats.fp8_layers import codes, layer

pytestmark = pytest.mark.usefixtures("seen_texts")

PLAIN = ConfiguredFormat(UnquantizedWeight, UnquantizedConfig())
BLOCKS = ConfiguredFormat(Fp8Weight, Fp8Config("block", (128, 128)))
QUANTIZERS = [
    pytest.param(Fp8Quantizer("tensor"), id="tensor"),
    pytest.param(Fp8Quantizer("channel"), id="channel"),
    pytest.param(Fp8Quantizer("block", (16, 12)), id="block"),
]
N, K = 128, 96


def plain(seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A weight whose every output has another size, so that no two shares have one scale."""
    noise = torch.randn(N, K, generator=torch.Generator().manual_seed(seed))
    return (noise * (1 + torch.arange(N)[:, None]) * (1 + seed)).to(dtype)


STORED = {"q.weight": plain(0), "k.weight": plain(1), "norm.weight": torch.ones(K, dtype=torch.bfloat16)}


def weights(
    quantizer: Fp8Quantizer,
    rank: Rank = ALONE,
    *formats: ConfiguredFormat,
    tensors: dict[str, Tensor] = STORED,
    **settings: Any,
) -> Weights:
    loader = QuantizingLoader(FormatLoader(*formats, PLAIN), quantizer, **settings)
    return Weights(MemoryStorage(tensors), loader=loader, process_group=rank)


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_every_load_is_a_share_of_the_quantized_whole_at_every_world_size(
    quantizer: Fp8Quantizer, world: int
) -> None:
    q, k = (weights(quantizer).get_weights(name).dequantize() for name in "qk")
    for rank in FakeWorld(world):
        view, here = weights(quantizer, rank), rank.rank()

        assert_same_bits(view.get_weights("q").dequantize(), q)
        assert_same_bits(view.get_weights_col("q").dequantize(), q.chunk(world)[here])
        assert_same_bits(view.get_weights_row("q").dequantize(), q.chunk(world, 1)[here])
        halves = torch.cat([half.chunk(world)[here] for half in q.chunk(2)])
        assert_same_bits(view.get_weights_col_packed("q", 2).dequantize(), halves)
        both = view.get_multi_weights_col(["q", "k"])
        assert_same_bits(both.dequantize(), torch.cat([q.chunk(world)[here], k.chunk(world)[here]]))
        assert isinstance(both, Fp8Weight)
        assert both.layer.whole == (2 * N, K)
        assert both.layer.parts == (N // world, N // world)


def test_the_ledger_counts_what_was_stored_once() -> None:
    view = weights(Fp8Quantizer("tensor"))
    view.get_weights_col_packed("q", 2)
    view.get_weights("k")
    view.get_weights("norm")

    assert view.report().complete
    assert not view.report().twice


@pytest.mark.parametrize("per", ["channel", "tensor"])
def test_a_rank_reads_the_layer_once_or_its_share_alone(per: Any) -> None:
    """Whatever shares a scale: only who has read all values knows what has to be refused."""
    views = {name: weights(Fp8Quantizer(per), Rank(1, 4), statistics=name) for name in ("whole", "share")}

    for view in views.values():
        view.get_weights_col("q")

    read = {name: view.storage.bytes_read for name, view in views.items()}  # type: ignore[attr-defined]
    assert read == {"whole": N * K * 2, "share": N // 4 * K * 2}
    assert not views["whole"].report().twice


@pytest.mark.parametrize("world", [1, 2])
def test_a_large_layer_is_quantized_in_runs_of_outputs_to_the_same_bits(
    world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = weights(Fp8Quantizer()).get_weights("q")
    monkeypatch.setattr(loading, "TILE_OUTPUTS", 24)
    monkeypatch.setattr(loading, "BLOCK_ELEMENTS", 50 * K)
    seen = []

    class Watched(Fp8Quantizer):
        def quantize(self, weight: Tensor, layer: Layer, dtype: torch.dtype) -> Fp8Weight:
            seen.append((layer.name, weight.shape[0]))
            return super().quantize(weight, layer, dtype)

    for rank in FakeWorld(world):
        got = weights(Watched(), rank).get_weights_col("q")

        assert_same_bits(got.dequantize(), whole.dequantize().chunk(world)[rank.rank()])
        assert got.layer.whole == (N, K)
    assert seen == [("q[0:48]", 48), ("q[48:96]", 48), ("q[96:128]", 32)] * world


@pytest.mark.parametrize(
    ("quantizer", "runs"),
    [
        (Fp8Quantizer("channel"), 2),
        (Fp8Quantizer("tensor"), 1),
        (Fp8Quantizer("block", (16, 12)), 1),
        (EETQQuantizer(), 2),
        (BNB4Quantizer(), 1),
        (BNBInt8Quantizer(), 2),
    ],
    ids=lambda value: None if isinstance(value, int) else getattr(value, "per", value.format),
)
def test_only_outputs_with_scales_of_their_own_are_quantized_in_runs(
    quantizer: Any, runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {"q.weight": torch.cat([plain(0), plain(1)], 1)[:, :128]}
    whole = weights(quantizer, tensors=tensors).get_weights("q")
    monkeypatch.setattr(loading, "TILE_OUTPUTS", 64)
    monkeypatch.setattr(loading, "BLOCK_ELEMENTS", 64 * 128)
    seen, inner = [], type(quantizer).quantize

    def quantize(self: Any, weight: Tensor, *options: Any) -> Any:
        seen.append(tuple(weight.shape))
        return inner(self, weight, *options)

    monkeypatch.setattr(type(quantizer), "quantize", quantize)
    got = weights(quantizer, tensors=tensors).get_weights("q")

    assert seen == [(N // runs, 128)] * runs
    assert_same_bits(got.dequantize(), whole.dequantize())


def test_statistics_of_the_share_are_cheaper_and_another_model() -> None:
    whole = weights(Fp8Quantizer("tensor"), Rank(1, 2)).get_weights_row("q")
    view = weights(Fp8Quantizer("tensor"), Rank(1, 2), statistics="share")

    share = view.get_weights_row("q")

    assert view.storage.bytes_read == N * K // 2 * 2  # type: ignore[attr-defined]
    half = plain(0)[:, K // 2 :].float()
    assert share.weight_scale.tolist() == [float(half.abs().max() / 448)]  # type: ignore[attr-defined]
    assert (share.layer, share.config) == (whole.layer, whole.config)
    assert not torch.equal(share.dequantize(), whole.dequantize())


@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_statistics_of_the_share_go_through_every_load(quantizer: Fp8Quantizer) -> None:
    view = weights(quantizer, Rank(1, 2), statistics="share")
    loads = [
        (view.get_weights("q"), plain(0)),
        (view.get_weights_col("q"), plain(0)[N // 2 :]),
        (view.get_weights_row("q"), plain(0)[:, K // 2 :]),
        (view.get_weights_col_packed("q", 2), torch.cat([plain(0)[32:64], plain(0)[96:]])),
        (view.get_multi_weights_col(["q", "k"]), torch.cat([plain(0)[N // 2 :], plain(1)[N // 2 :]])),
    ]
    for got, want in loads:
        parts = zip(*(torch.split(t, list(got.layer.parts)) for t in (want, got.dequantize())), strict=True)
        for part, dequantized in parts:
            alone = quantizer.quantize(part, Layer((len(part),), part.shape[1], (N, K)), part.dtype)
            assert_same_bits(dequantized, alone.dequantize())


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("statistics", ["whole", "share"])
def test_trap_47_what_is_fp8_already_is_not_touched_and_keeps_its_blocks(statistics: Any, world: int) -> None:
    scale = torch.rand(2, 1, generator=torch.Generator().manual_seed(0))
    stored = {**layer("a", codes(256, 96), scale, "weight_scale_inv"), **STORED}
    for rank in FakeWorld(world):
        view = weights(Fp8Quantizer("tensor"), rank, BLOCKS, tensors=stored, statistics=statistics)
        got: Any = view.get_weights_col("a")

        assert_same_bits(got.weight, codes(256, 96).chunk(world)[rank.rank()])
        assert_same_bits(got.weight_scale, scale.chunk(world)[rank.rank()])
        assert got.config.block == (128, 128)
        assert view.storage.reads["a.weight"] == 1  # type: ignore[attr-defined]


def test_trap_47_layers_left_out_keep_every_setting_of_the_loader() -> None:
    """A policy leaves a layer out by taking the inner loader for it, which still knows its blocks."""
    stored = {**layer("a", codes(256, 96), torch.ones(2, 1), "weight_scale_inv"), **STORED}
    loader = QuantizingLoader(FormatLoader(BLOCKS, PLAIN), Fp8Quantizer())
    view = Weights(MemoryStorage(stored), loader=loader)

    with view.use_loader(loader.inner):
        assert view.get_weights("a").config.block == (128, 128)
        assert isinstance(view.get_weights("q"), UnquantizedWeight)
    assert isinstance(view.get_weights("q"), Fp8Weight)


@pytest.mark.parametrize("world", [1, 2])
def test_trap_47_a_policy_and_the_config_leave_layers_plain(world: int) -> None:
    """Also those of a model of one block, where the first is the last."""
    names = ["model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj", "lm_head"]
    inner = FormatLoader(BLOCKS, PLAIN, exclusions=Exclusions(("lm_head",)))
    policies = {None: [True, True, False], 1: [False, True, False], 3: [False, True, False]}
    for blocks, want in policies.items():
        policy = mlp_only(blocks=blocks, first_and_last=False) if blocks else None
        loader = QuantizingLoader(inner, Fp8Quantizer(), policy=policy)
        storage = MemoryStorage({f"{name}.weight": plain(0) for name in names})
        view = Weights(storage, loader=loader, process_group=Rank(0, world))

        assert [isinstance(view.get_weights_col(name), Fp8Weight) for name in names] == want


def test_parts_of_which_one_is_left_out_do_not_fuse() -> None:
    with pytest.raises(MismatchError, match="k left out, q not"):
        weights(Fp8Quantizer(), policy=Modules(without=("k",))).get_multi_weights_col(["q", "k"])


def test_bytes_of_fp8_that_the_inner_loader_does_not_read_are_refused_not_quantized() -> None:
    with pytest.raises(DtypeError, match="got      float8_e4m3fn"):
        weights(Fp8Quantizer(), tensors={"a.weight": codes(8, 8)}).get_weights("a")


def test_a_plain_part_and_a_quantized_one_do_not_fuse() -> None:
    stored = {**layer("a", codes(256, 96), torch.ones(2, 1), "weight_scale_inv"), **STORED}

    with pytest.raises(MismatchError, match="differ in format"):
        weights(Fp8Quantizer(), ALONE, BLOCKS, tensors=stored).get_multi_weights_col(["a", "q"])


@pytest.mark.parametrize("load", [Weights.get_weights, Weights.get_weights_col])
def test_a_vector_stays_plain(load: Any) -> None:
    got = load(weights(Fp8Quantizer()), "norm")

    assert isinstance(got, UnquantizedWeight)
    assert got.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("load", [Weights.get_weights_col, Weights.get_weights_row])
def test_a_cut_that_the_quantized_layer_does_not_allow_is_refused_by_every_rank_alike(load: Any) -> None:
    texts = set()
    for rank in FakeWorld(2):
        with pytest.raises(CutError, match=r"q\.weight_scale_inv: cannot cut") as caught:
            load(weights(Fp8Quantizer("block", (128, 128)), rank), "q")
        texts.add(str(caught.value))

    assert len(texts) == 1


def test_statistics_there_are_none_of_are_refused() -> None:
    with pytest.raises(ArgumentError, match="expected 'whole' or 'share'"):
        weights(Fp8Quantizer(), statistics="rank")
