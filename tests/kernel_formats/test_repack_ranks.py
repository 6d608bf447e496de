"""Refusals and optional tensors depend on the whole layer: every rank decides equally."""

from typing import Any

import pytest
import torch
from torch import Tensor

from qload.errors import RepackError
from qload.formats import (
    Fp8Config,
    Fp8Weight,
    GPTQConfig,
    GPTQWeight,
    Marlin24Config,
    Marlin24Weight,
    ModelOptNVFP4Weight,
    NVFP4Config,
)
from qload.layouts import Stored, StoredMinusOneUnmasked, ZeroPoints, gptq, marlin_24
from qload.loader import ConfiguredFormat, FormatLoader
from qload.parallel import FakeWorld
from qload.repacking import RepackingLoader
from qload.spec import Config, Weight
from qload.storage import MemoryStorage
from qload.testing import assert_same_bits
from qload.weights import Weights

N, K = 256, 256
worlds = pytest.mark.parametrize("world", [2, 4])
splits = pytest.mark.parametrize("split", ["col", "row"])


def integers(group: int = 64, zero: int = 8, zeros: ZeroPoints | None = None, **changed: Tensor) -> Any:
    """Build a GPTQ layer with `zero` as first zero point and 8 for all others."""
    known = GPTQConfig(4, group, zeros or Stored())
    noise, groups = torch.Generator().manual_seed(zero), known.groups(K)
    points = torch.full((groups, N), 8, dtype=torch.int32)
    points[0, 0] = zero
    return GPTQWeight(
        config=known,
        qweight=changed.get("qweight", gptq.rows(4).pack(torch.randint(0, 16, (K, N), generator=noise))),
        qzeros=known.zeros.write(points, gptq.columns(4)),
        scales=torch.ones(groups, N, dtype=torch.float16),
        g_idx=changed.get("g_idx", known.in_order(K).int()),
    )


def sparse(*, canonical: bool) -> Marlin24Weight:
    """Build a layer of weight 0; without `canonical` the metadata of one quad is unusual."""
    positions = marlin_24.choose_positions(torch.zeros(K, N, dtype=torch.bool))
    if not canonical:
        positions[0, 0], positions[1, 0] = 0, 1
    return Marlin24Weight(
        config=Marlin24Config(64),
        B_24=marlin_24.rows(4).pack(torch.full((K // 2, N), 8)),
        B_meta=marlin_24.write_positions(positions),
        s=torch.ones(K // 64, N, dtype=torch.float16),
    )


def fp8(first: float) -> Fp8Weight:
    scales = torch.ones(N // 64, K // 64)
    scales[0, 0] = first
    weight = torch.ones(N, K).to(torch.float8_e4m3fn)
    return Fp8Weight(config=Fp8Config("block", (64, 64)), weight=weight, weight_scale=scales)


def nvfp4(first: float) -> ModelOptNVFP4Weight:
    scales = torch.full((N, K // 16), 2.0)
    scales[0, 0] = first
    return ModelOptNVFP4Weight(
        config=NVFP4Config(),
        weight=torch.zeros(N, K // 2, dtype=torch.uint8),
        weight_scale=scales.to(torch.float8_e4m3fn),
        weight_scale_2=torch.ones(1),
    )


def claimed_config(weight: Weight) -> Config:
    """Return the config as claimed by files."""
    if isinstance(weight, GPTQWeight):
        return GPTQConfig(4, weight.config.group_size, weight.config.zeros)
    known: Config = weight.config
    return known


def load_on_ranks(
    weight: Weight, split: str, world: int, layout: str, *, strict: bool = True, **options: Any
) -> list[Weight | str]:
    """Load on every rank: the weight, or the text of the refusal."""
    tensors = {f"a.{name}": tensor for name, tensor in weight.fields().items()}
    inner = FormatLoader(ConfiguredFormat(type(weight), claimed_config(weight)))
    loader, results = RepackingLoader(inner, layout, strict=strict, **options), []
    for rank in FakeWorld(world):
        source = Weights(MemoryStorage(tensors), loader=loader, process_group=rank, nonfinite="allow")
        try:
            results.append(getattr(source, f"get_weights_{split}")("a"))
        except RepackError as error:
            results.append(str(error))
    return results


HALF = {"dtype": torch.float16, "exponent_bias": True}
BRAIN = {"dtype": torch.bfloat16}
REFUSED = [
    pytest.param(
        integers(zero=16, zeros=StoredMinusOneUnmasked()),
        "marlin",
        {},
        "zero point of 16",
        id="zero point 16",
    ),
    pytest.param(
        integers(zero=16, zeros=StoredMinusOneUnmasked()), "awq", {}, "zero point of 16", id="16 as AWQ"
    ),
    pytest.param(integers(group=112), "marlin", {}, "one group, got 112", id="a rank within one group"),
    pytest.param(integers(group=96), "awq", {}, "into groups of 96", id="a rank within one group as AWQ"),
    pytest.param(integers(zero=7), "marlin_24", {}, "zero point is not 8", id="one zero point for 2:4"),
    pytest.param(sparse(canonical=False), "exllama", {}, "kept row 0 of column 0", id="metadata of one quad"),
    pytest.param(fp8(1e6), "marlin", HALF, "overflows", id="one scale too large"),
    pytest.param(fp8(1e-12), "marlin", HALF, "underflows", id="one scale too small"),
    pytest.param(nvfp4(-2), "marlin", BRAIN, "1 of 4096 scales", id="one scale with a sign"),
    pytest.param(nvfp4(float("nan")), "marlin", BRAIN, "are NaN", id="one scale that is NaN"),
]


def half_sparse() -> GPTQWeight:
    codes = torch.full((K, N), 8)
    codes[:4, 0] = 1
    return integers(qweight=gptq.rows(4).pack(codes))  # type: ignore[no-any-return]


@worlds
@splits
@pytest.mark.parametrize(("weight", "layout", "options", "reason"), REFUSED)
def test_all_ranks_refuse_with_equal_errors(
    weight: Weight, layout: str, options: dict[str, Any], reason: str, split: str, world: int
) -> None:
    refused = load_on_ranks(weight, split, world, layout, **options)

    assert len(set(refused)) == 1
    assert isinstance(refused[0], str)
    assert reason in refused[0]


@worlds
@splits
def test_a_missing_pattern_on_one_rank_is_refused_by_all(split: str, world: int) -> None:
    refused = load_on_ranks(half_sparse(), split, world, "marlin_24")

    assert len(set(refused)) == 1
    assert isinstance(refused[0], str)
    assert "to marlin_24: cannot repack" in refused[0]


@worlds
@splits
@pytest.mark.parametrize(("weight", "layout", "options", "reason"), REFUSED)
def test_without_strict_every_rank_keeps_the_stored_format(
    weight: Weight, layout: str, options: dict[str, Any], reason: str, split: str, world: int
) -> None:
    results = load_on_ranks(weight, split, world, layout, strict=False, **options)

    assert {type(each) for each in results} == {type(weight)}
    assert reason


@worlds
@splits
@pytest.mark.parametrize(("zero", "kept"), [(8, False), (7, True)])
def test_zero_points_are_left_out_by_all_ranks_or_by_none(
    zero: int, kept: bool, split: str, world: int
) -> None:
    weight = integers(zero=zero)

    results: list[Any] = load_on_ranks(weight, split, world, "marlin")

    assert {each.config.zero_point for each in results} == {kept}
    whole = torch.cat([each.dequantize() for each in results], 0 if split == "col" else 1)
    assert_same_bits(whole, weight.dequantize())


@worlds
@splits
def test_canonical_metadata_is_repacked_by_all(split: str, world: int) -> None:
    results = load_on_ranks(sparse(canonical=True), split, world, "exllama")

    assert {type(each).__name__ for each in results} == {"ExllamaWeight"}


@worlds
@pytest.mark.parametrize(("layout", "wholes"), [("marlin", 0), ("marlin_24", 1)])
def test_only_the_share_of_codes_is_read_unless_they_decide(layout: str, wholes: int, world: int) -> None:
    weight = integers()
    weight.qweight.fill_(-0x77777778)
    storage = MemoryStorage({f"a.{name}": tensor for name, tensor in weight.fields().items()})
    loader = RepackingLoader(FormatLoader(ConfiguredFormat(GPTQWeight, claimed_config(weight))), layout)

    source = Weights(storage, loader=loader, process_group=next(iter(FakeWorld(world))))
    source.get_weights_col("a")

    words, rest = weight.qweight.nbytes, sum(t.nbytes for t in weight.fields().values())
    assert storage.bytes_read < words // world + wholes * words + 3 * (rest - words)
    assert storage.bytes_read > words // world + wholes * words
    assert source.report().complete


@worlds
def test_fused_parts_decide_together(world: int) -> None:
    parts = {"q": integers(zero=8), "k": integers(zero=7)}
    tensors = {
        f"{p}.{name}": tensor for p, weight in parts.items() for name, tensor in weight.fields().items()
    }
    loader = RepackingLoader(FormatLoader(ConfiguredFormat(GPTQWeight, claimed_config(parts["q"]))), "marlin")

    results: list[Any] = [
        Weights(MemoryStorage(tensors), loader=loader, process_group=rank).get_multi_weights_col(["q", "k"])
        for rank in FakeWorld(world)
    ]

    assert {each.config.zero_point for each in results} == {True}
