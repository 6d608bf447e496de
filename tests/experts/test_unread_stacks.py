"""Stacks that cannot be read: the whole reason, under the name of each of their tensors."""

from typing import Any

import pytest

from qload import dtypes
from qload.dtypes import Dtype
from qload.experts import stack_finder
from qload.storage import TensorInfo
from tests.experts.mixtures import HIDDEN, INNER, E, config, lead
from tests.experts.test_hostile_stacks import Headers

pytestmark = pytest.mark.usefixtures("seen_texts")

LEAD = f"{lead('qwen3_moe')}."
FP8, BF16, FP32, U8 = dtypes.float8_e4m3fn, dtypes.bfloat16, dtypes.float32, dtypes.uint8
MATRIX = (E, HIDDEN, INNER)
SQUARE = (E, HIDDEN, HIDDEN)
UNKNOWN = {"model_type": "a_type_of_no_table", "hidden_size": None}
Infos = dict[str, tuple[Dtype, tuple[int, ...]]]

# Tensors, entries of the config, the name at the start of the reason, and the rest of it.
TABLE: list[tuple[Infos, dict[str, Any], str, str]] = [
    (
        {"down_proj": (FP8, (E + 1, HIDDEN, INNER)), "down_proj_scale": (FP32, (E + 1, HIDDEN))},
        {},
        "down_proj",
        f"of shape [4, 64, 96]: 1 to {E} experts are expected",
    ),
    (
        {"down_proj": (FP8, (0, HIDDEN, INNER)), "down_proj_scale": (FP32, (E,))},
        {},
        "down_proj",
        f"of shape [0, 64, 96]: 1 to {E} experts are expected",
    ),
    (
        {"down_proj": (FP8, MATRIX), "down_proj_scale": (FP32, (E + 1,)), "down_proj.other": (FP32, (1,))},
        {},
        "",
        f"{LEAD}down_proj_scale of shape [4]: 1 to {E} experts are expected",
    ),
    (
        {"down_proj": (dtypes.int32, MATRIX)},
        {},
        "down_proj",
        "of shape [3, 64, 96]: no format has weight of int32",
    ),
    (
        {"down_proj_weight_packed": (FP8, MATRIX)},
        {},
        "down_proj_weight_packed",
        "of shape [3, 64, 96]: no format has weight_packed of float8_e4m3fn",
    ),
    (
        {"down_proj_blocks": (dtypes.int8, (E, HIDDEN, 3, 16))},
        {},
        "down_proj_blocks",
        "of shape [3, 64, 3, 16]: no format has weight_packed of int8",
    ),
    (
        {"down_proj_blocks": (U8, (E, HIDDEN, 3, 16)), "down_proj_scales": (FP32, (E, HIDDEN, 3))},
        {},
        "down_proj_blocks",
        "of shape [3, 64, 3, 16]: MXFP4 needs scales of uint8 or float8_e8m0fnu",
    ),
    (
        {"down_proj": (FP8, (*MATRIX, 1)), "down_proj_scale": (FP32, (E,))},
        {},
        "down_proj",
        "of shape [3, 64, 96, 1]: 3 axes are expected",
    ),
    (
        {"down_proj_blocks": (U8, (E, HIDDEN, 3, 16, 1)), "down_proj_scales": (U8, (E, HIDDEN, 3))},
        {},
        "down_proj_blocks",
        "of shape [3, 64, 3, 16, 1]: 4 axes are expected",
    ),
    *(
        (
            {"down_proj": (dtype, MATRIX), "down_proj_bias": (FP32, (E, HIDDEN))},
            {},
            "down_proj",
            "of shape [3, 64, 96]: no scale with a known name is stored beside it",
        )
        for dtype in (U8, dtypes.int8)
    ),
    (
        {"down_proj": (FP8, SQUARE), "down_proj_scale": (FP32, (E, 5, 7)), "down_proj_bias": (FP32, (E, 64))},
        UNKNOWN,
        "down_proj",
        "of shape [3, 64, 64]: neither scales (weight_scale of shape [3, 5, 7]) nor config show the order of "
        "outputs and inputs",
    ),
    (
        {"down_proj": (FP8, SQUARE)},
        UNKNOWN,
        "down_proj",
        "of shape [3, 64, 64]: neither scales nor config show the order of outputs and inputs",
    ),
    (
        {"down_proj": (FP8, MATRIX), "down_proj_weight_scale": (FP32, (*MATRIX, 1))},
        {},
        "down_proj_weight_scale",
        "of shape [3, 64, 96, 1]: no known layout of weight_scale for E experts of 64 outputs and 96 inputs",
    ),
]


def search(infos: Infos, **changes: Any) -> stack_finder.FoundStacks:
    headers = {f"{LEAD}{name}": TensorInfo(dtype, shape, "file") for name, (dtype, shape) in infos.items()}
    return stack_finder.search(Headers(**headers), config("qwen3_moe", **changes))


@pytest.mark.parametrize(("infos", "changes", "name", "reason"), TABLE)
def test_every_tensor_of_an_unread_stack_has_the_whole_reason(
    infos: Infos, changes: dict[str, Any], name: str, reason: str
) -> None:
    found = search(infos, **changes)

    text = f"experts in one tensor, {LEAD}{name} {reason}" if name else reason
    assert found.stacks == []
    assert found.unread == {f"{LEAD}{each}": text for each in infos}


@pytest.mark.parametrize("shape", [(E + 1, 1, 1), ()])
def test_scales_of_too_many_experts_or_of_none_are_unread(shape: tuple[int, ...]) -> None:
    infos: Infos = {"down_proj_scale_inv": (FP32, shape)}
    infos |= {"0.down_proj.weight": (FP8, (HIDDEN, INNER))}
    name = f"{LEAD}down_proj_scale_inv"

    assert search(infos).unread == {
        name: f"scales of experts in one tensor, {name} of shape {list(shape)}: 1 to {E} experts are expected"
    }


def test_an_unread_matrix_leaves_the_others_and_their_neighbours_alone() -> None:
    infos: Infos = {
        "down_proj": (FP8, (E + 1, HIDDEN, INNER)),
        "gate_up_proj": (FP8, (E, 2 * INNER, HIDDEN)),
        "gate_up_proj_scale": (FP32, (E, 2 * INNER)),
        "down_proj_scale": (FP32, (E + 1, HIDDEN)),
        "down_proj_like": (FP32, (1,)),
        "down_projection": (FP32, (1,)),
    }
    found = search(infos)

    assert [stack.source for stack in found.stacks] == [f"{LEAD}gate_up_proj", f"{LEAD}gate_up_proj_scale"]
    assert [[*stack.parts] for stack in found.stacks] == [
        ["gate_proj.weight", "up_proj.weight"],
        ["gate_proj.weight_scale", "up_proj.weight_scale"],
    ]
    assert found.unread.keys() == {f"{LEAD}down_proj{end}" for end in ("", "_scale", "_like")}


@pytest.mark.parametrize("changes", [UNKNOWN, {"num_experts": E - 1}])
def test_floats_that_are_no_stack_of_their_type_are_tensors_like_any_other(changes: dict[str, Any]) -> None:
    found = search({"down_proj": (BF16, MATRIX)}, **changes)

    assert (found.stacks, found.unread) == ([], {})


def test_tensors_beyond_a_header_of_names_are_unread_with_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack_finder, "MAX_NAMES", 2 * E)
    found = search({"down_proj": (FP8, MATRIX), "down_proj_scale": (FP32, (E, HIDDEN))})
    assert (len(found.stacks), found.unread) == (2, {})

    monkeypatch.setattr(stack_finder, "MAX_NAMES", 2 * E - 1)
    found = search({"down_proj": (FP8, MATRIX), "down_proj_scale": (FP32, (E, HIDDEN))})
    reason = f"more than {2 * E - 1} tensors of experts in all"
    assert (found.stacks, found.unread) == (
        [],
        {f"{LEAD}down_proj": reason, f"{LEAD}down_proj_scale": reason},
    )
