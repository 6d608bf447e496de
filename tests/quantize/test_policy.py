"""Who is quantized while loading: by whole names and blocks, never by a part of a name."""

import pytest
import torch

from qload import DefaultWeightsLoader, Fp8Quantizer, MemoryStorage, QuantizingLoader, Weights
from qload.architecture.model_tables import TABLES
from qload.architecture.table import spellings
from qload.errors import ArgumentError, MismatchError
from qload.quantize.policy import ROUTERS, Modules, block_of, is_router, mlp_only

pytestmark = pytest.mark.usefixtures("seen_texts")


@pytest.mark.parametrize(
    ("prefix", "quantized"),
    [
        ("model.layers.0.mlp.gate_proj", True),
        ("model.layers.31.mlp.down_proj", True),
        ("model.layers.3.mlp.gate_up_proj", True),
        ("model.layers.3.block_sparse_moe.experts.7.w1", True),
        ("model.layers.3.feed_forward.w2", True),
        ("model.layers.3.feed_forward.w3", True),
        ("transformer.h.3.mlp.c_fc", True),
        ("transformer.h.3.mlp.c_proj", True),
        ("transformer.h.3.attn.c_proj", False),
        ("model.layers.3.self_attn.q_proj", False),
        ("model.layers.3.mlp.gate", False),
        ("lm_head", False),
        ("model.embed_tokens", False),
    ],
)
def test_only_the_projections_of_the_mlp_are_quantized(prefix: str, quantized: bool) -> None:
    assert mlp_only().quantizes(prefix) == quantized


@pytest.mark.parametrize(
    ("block", "quantized"), [(0, False), (1, True), (9, True), (30, True), (31, False), (310, True)]
)
def test_the_first_and_the_last_block_stay_plain_where_that_is_asked(block: int, quantized: bool) -> None:
    policy = mlp_only(blocks=32, first_and_last=False)

    assert policy.quantizes(f"model.layers.{block}.mlp.up_proj") == quantized


def test_a_model_of_one_block_is_left_plain() -> None:
    assert not mlp_only(blocks=1, first_and_last=False).quantizes("model.layers.0.mlp.up_proj")


def test_without_the_number_of_blocks_the_last_one_is_not_known() -> None:
    with pytest.raises(ArgumentError, match="the number of decoder blocks"):
        mlp_only(first_and_last=False)


def test_a_fused_layer_of_which_one_part_is_left_out_is_refused() -> None:
    with pytest.raises(MismatchError, match=r"a\.k_proj left out, a\.q_proj not"):
        Modules(without=("k_proj",)).quantizes("a.qkv_proj")


@pytest.mark.parametrize(
    ("prefix", "block"),
    [
        ("model.layers.12.mlp", 12),
        ("transformer.h.3.mlp", 3),
        ("layers.x.y", None),
        ("layers.\u0663.y", None),
    ],
)
def test_a_block_is_the_number_behind_its_segment(prefix: str, block: int | None) -> None:
    assert block_of(prefix) == block


def test_routers_are_those_of_the_architecture_tables() -> None:
    """A row with an output for each expert, or one in all, chooses or weighs; nothing else is called so."""
    rows = [row for table in TABLES.values() for row in table.rows]
    firsts = [row for row in rows if row.shape.split()[0] in ("experts", "1") and not row.tensor]
    routers = {name for row in firsts for name in spellings(row.name)}
    others = {name for row in rows for name in spellings(row.name)} - routers

    assert {name.rpartition("{layer}.")[2] for name in routers} == set(ROUTERS)
    assert not any(is_router(name) for name in others)


@pytest.mark.parametrize("name", ROUTERS)
def test_no_policy_has_a_router_quantized(name: str) -> None:
    prefix, like = f"model.layers.0.{name}", f"model.layers.0.{name}_proj"
    stored = {f"{each}.weight": torch.randn(8, 16) for each in (prefix, like)}
    loader = QuantizingLoader(DefaultWeightsLoader(), Fp8Quantizer(), policy=Modules())
    weights = Weights(MemoryStorage(stored), loader=loader)

    assert weights.get_weights(prefix).format == "unquantized"
    assert weights.get_weights(like).format == "fp8"
    assert loader.left_out(prefix) == "a router, which is never quantized while loading"
    assert loader.made(loader.describe(weights, prefix), torch.device("cpu")) is None
