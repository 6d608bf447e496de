"""What a checkpoint holds beside its layers is known by its name, dtype and shape, and nothing else is."""

from itertools import product

import pytest
import torch

from qload.experts import with_experts
from qload.loader import Heads
from qload.storage import MemoryStorage, TensorInfo
from qload.weights.exemptions import (
    BUFFER,
    CACHE_SCALE,
    CACHE_ZERO,
    OF_ATTENTION,
    OF_PROJECTIONS,
    ROUTES,
    STACK,
    ZEROS_OF_ATTENTION,
    ZEROS_OF_PROJECTIONS,
    exemption,
    unread_reason,
)
from qload.weights.ledger import LoadReport
from qload.weights.weights import MAX_COMPARED_NAMES, NEAR_NAMES, SortedNames, along

ATTENTIONS = ("attn", "self_attn", "cross_attn", "attention", "self_attention", "cross_attention", "mixer")
PROJECTIONS = tuple(f"{letters}_proj" for letters in ("q", "k", "v", "kv", "qk", "qkv"))
ONE = TensorInfo(torch.float32, (1,))


@pytest.mark.parametrize(
    ("owners", "names", "reason"),
    [
        (ATTENTIONS, OF_ATTENTION, CACHE_SCALE),
        (PROJECTIONS, OF_PROJECTIONS, CACHE_SCALE),
        (ATTENTIONS, ZEROS_OF_ATTENTION, CACHE_ZERO),
        (PROJECTIONS, ZEROS_OF_PROJECTIONS, CACHE_ZERO),
    ],
)
def test_scales_and_zero_points_of_caches_belong_to_attention(
    owners: tuple[str, ...], names: set[str], reason: str
) -> None:
    for owner, name in product(owners, sorted(names)):
        assert exemption(f"layers.0.{owner}.{name}", ONE) == reason
        assert exemption(f"{owner}.{name}", ONE) == reason
        assert exemption(f"layers.0.my{owner}.{name}", ONE) is None
        assert exemption(f"layers.0.{owner}.x.{name}", ONE) is None
        assert exemption(f"layers.0.{owner}.{name}s", ONE) is None
    assert exemption(sorted(names)[0], ONE) is None


def test_the_names_of_caches_are_these() -> None:
    """Each is written by some tool; a name that is lost makes a finding on a sound checkpoint."""
    for name in (
        "self_attn.q_scale", "self_attn.k_scale", "self_attn.v_scale", "attn.kv_scale",
        "self_attn.prob_scale", "attn.prob_output_scale",
        "attention.kv_cache_scaling_factor", "attention.kv_cache_rcp_scaling_factor",
        "attn.k_cache_scaling_factor", "attn.v_cache_scaling_factor", "k_proj.k_scale", "v_proj.v_scale",
        "qkv_proj.kv_scale", "k_proj.output_scale",
    ):  # fmt: skip
        assert exemption(f"layers.0.{name}", ONE) == CACHE_SCALE
    for name in ("self_attn.k_zero_point", "self_attn.v_zero_point", "k_proj.k_bias", "v_proj.v_bias"):
        assert exemption(f"layers.0.{name}", ONE) == CACHE_ZERO
    for name in ("self_attn.output_scale", "k_proj.q_scale", "self_attn.k_bias", "k_proj.k_zero_point"):
        assert exemption(f"layers.0.{name}", ONE) is None


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "exempt"),
    [
        ("a.position_ids", torch.int64, (1, 8), True),
        ("a.mask", torch.bool, (8, 8), True),
        ("a.num_batches_tracked", torch.int32, (), True),
        ("a.steps", torch.uint8, (8,), True),
        ("a.steps", torch.uint8, (8, 1), False),
        ("a.words", torch.int32, (8, 8), False),
        ("a.bias", torch.uint8, (1, 1, 8, 8), True),
        ("a.masked_bias", torch.uint8, (1, 1, 8, 8), True),
        ("a.mask", torch.uint8, (1, 1, 8, 8), True),
        ("a.words", torch.uint8, (1, 1, 8, 8), False),
        ("a.mask", torch.uint8, (1, 8, 8), False),
        ("a.mask", torch.uint8, (1, 1, 1, 8, 8), False),
        ("a.masked_bias", torch.float32, (), True),
        ("a.mask", torch.float16, (8, 8), True),
        ("a.attn_mask", torch.bfloat16, (8, 8), True),
        ("a.attention_mask", torch.float64, (8, 8), True),
        ("a.causal_mask", torch.float32, (8, 8), True),
        ("a.my_mask", torch.float32, (8, 8), False),
        ("a.masks", torch.float32, (8, 8), False),
        ("mask.a", torch.float32, (8, 8), False),
        ("a.bias", torch.float32, (1, 1, 8, 8), True),
        ("a.bias", torch.float32, (1, 8, 8), False),
        ("a.bias", torch.float32, (8,), False),
        ("a.freqs_cis", torch.complex64, (8, 8), True),
        ("a.freqs", torch.complex64, (8, 8), True),
        ("a.freqs", torch.float32, (8, 8), False),
        ("a.steps", torch.float32, (8,), False),
        ("a.steps", torch.complex64, (8,), False),
        ("a.qweight", torch.int32, (8,), False),
        ("a.g_idx", torch.int64, (8,), False),
    ],
)
def test_a_buffer_is_of_whole_numbers_that_are_no_codes(
    name: str, dtype: torch.dtype, shape: tuple[int, ...], exempt: bool
) -> None:
    assert exemption(name, TensorInfo(dtype, shape)) == (BUFFER if exempt else None)


def test_a_table_of_routes_is_of_whole_numbers() -> None:
    assert exemption("layers.0.gate.tid2eid", TensorInfo(torch.int32, (8, 2))) == ROUTES
    assert exemption("layers.0.gate.tid2eid", TensorInfo(torch.float32, (8, 2))) is None
    assert exemption("layers.0.gate.tid2eid.words", TensorInfo(torch.int32, (8, 2))) is None


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "unread"),
    [
        ("layers.0.mlp.experts.wi", torch.float8_e4m3fn, (8, 4, 4), True),
        ("layers.0.any.name", torch.uint8, (8, 4, 4), True),
        ("layers.0.any.name", torch.int16, (8, 4, 4, 2), True),
        ("layers.0.mlp.experts.wi", torch.float8_e4m3fn, (4, 4), False),
        ("layers.0.mlp.experts.wi", torch.bfloat16, (8, 4, 4), False),  # floats are what they are
        ("layers.0.mlp.experts.wi", torch.bool, (8, 4, 4), False),
        ("layers.0.mlp.experts.down_proj_blocks", torch.uint8, (8, 4, 4, 16), False),  # of a format
        ("layers.0.mlp.experts.down_proj_scales", torch.uint8, (8, 4, 4), False),
    ],
)
def test_codes_of_three_axes_that_nothing_used_are_of_a_stack(
    name: str, dtype: torch.dtype, shape: tuple[int, ...], unread: bool
) -> None:
    storage = MemoryStorage({name: torch.zeros(shape).to(dtype)})
    assert unread_reason(name, storage) == (STACK if unread else None)


def test_a_stack_that_was_looked_at_has_its_own_reason() -> None:
    stored = {
        "model.moe.down_proj": torch.zeros(2, 4, 4).to(torch.float8_e4m3fn),
        "model.moe.down_proj_weight_scale": torch.ones(2),
    }
    storage = with_experts(MemoryStorage(stored), {})
    for name in stored:
        reason = unread_reason(name, storage)
        assert reason is not None
        assert "model.moe.down_proj of shape [2, 4, 4]" in reason
        assert "order of outputs and inputs" in reason


def test_few_names_are_shown_and_those_near_are_compared() -> None:
    names = SortedNames(f"a.{number:05}" for number in reversed(range(MAX_COMPARED_NAMES)))
    more = SortedNames(f"a.{number:05}" for number in range(MAX_COMPARED_NAMES + 1))

    assert names.under("a.", "b.") == [f"a.{number:05}" for number in range(6)]
    assert names.under("a.0000", most=2) == ["a.00000", "a.00001"]
    assert names.under("a.00001", "a.00003") == ["a.00001", "a.00003"]
    assert names.under("b") == []
    assert len(names.near("a.02000")) == MAX_COMPARED_NAMES
    assert more.near("a.02000") == [
        f"a.{number:05}" for number in range(2000 - NEAR_NAMES, 2000 + NEAR_NAMES)
    ]
    assert more.near("a") == [f"a.{number:05}" for number in range(NEAR_NAMES)]
    assert more.near("b") == [
        f"a.{number:05}" for number in range(MAX_COMPARED_NAMES + 1 - NEAR_NAMES, MAX_COMPARED_NAMES + 1)
    ]


def test_a_report_is_complete_where_nothing_is_left_over_twice_or_unread() -> None:
    sound = LoadReport(["a"], [], {}, {"b": "why"}, ["n"])
    assert sound.complete
    assert str(sound).splitlines() == [
        "1 used, 0 unused, 0 more than once, 1 exempted", "  exempted  b: why", "  note      n",
    ]  # fmt: skip
    for report in (
        LoadReport(["a"], ["b"], {}, {}, []),
        LoadReport(["a"], [], {"a": 2}, {}, []),
        LoadReport(["a"], [], {}, {}, [], {"c": "later"}),
    ):
        assert not report.complete
    assert str(report).splitlines() == [
        "1 used, 0 unused, 0 more than once, 0 exempted, 1 not read", "  not read  c: later",
    ]  # fmt: skip


def test_a_slice_of_a_dimension_takes_all_of_those_before() -> None:
    assert along(0, 1, 3) == (slice(1, 3),)
    assert along(2, 1, 3) == (slice(None), slice(None), slice(1, 3))


@pytest.mark.parametrize(
    ("heads", "layers", "world", "parts"),
    [
        (Heads(4, 2), [("a", 8)], 1, [(0, 4, 1), (4, 6, 1), (6, 8, 1)]),
        (Heads(4, 2), [("a", 8)], 2, [(0, 4, 1), (4, 6, 1), (6, 8, 1)]),
        (Heads(4, 2), [("a", 16)], 4, [(0, 8, 1), (8, 12, 2), (12, 16, 2)]),
        (Heads(4, 1), [("q", 8), ("k", 2), ("v", 2)], 4, [(0, None, 1), (0, None, 4), (0, None, 4)]),
        (Heads(4, 4), [("q", 8), ("k", 8), ("v", 8)], 4, [(0, None, 1)] * 3),
        (Heads(4), [("q", 8)], 4, [(0, None, 1)]),
        (Heads(keys=2), [("k", 8), ("v", 8)], 4, [(0, None, 2)] * 2),
        (Heads(1, 1), [("a", 3)], 1, [(0, 1, 1), (1, 2, 1), (2, 3, 1)]),
    ],
)
def test_heads_become_parts(
    heads: Heads, layers: list[tuple[str, int]], world: int, parts: list[tuple[int, int | None, int]]
) -> None:
    assert [(part.start, part.stop, part.copies) for part in heads.parts(layers, world)] == parts
