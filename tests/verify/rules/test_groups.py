"""Projections of one input have one act order: each is compared with its siblings, and with nothing else."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from qload.verify import Finding, verify
from tests.verify.checkpoints import GPTQ, gptq, model

pytestmark = pytest.mark.usefixtures("seen_texts")

LAYER = "model.layers.0"
ORDER = torch.tensor([1, 0, 0, 1, 1, 1, 0, 0, 1, 0, 1, 0, 0, 1, 1, 0], dtype=torch.int32)
ANOTHER = ORDER.flip(0).roll(3)
SIBLINGS = (
    ("self_attn", ("q_proj", "k_proj", "v_proj")),
    ("mlp", ("gate_proj", "up_proj")),
    ("block_sparse_moe.experts.1", ("w1", "w3")),
)
# What shares its input with none of the others, though it stands beside them.
APART = {"self_attn": "o_proj", "mlp": "down_proj", "block_sparse_moe.experts.1": "w2"}


def told(folder: Path, orders: dict[str, Tensor]) -> tuple[Finding, ...]:
    tensors: dict[str, Tensor] = {}
    for prefix, order in orders.items():
        tensors |= {**gptq(prefix), f"{prefix}.g_idx": order.clone()}
    return verify(model(folder, tensors, quantization_config={**GPTQ, "desc_act": True})).findings


def test_the_two_orders_have_as_many_rows_of_each_group() -> None:
    assert not torch.equal(ORDER, ANOTHER)
    assert torch.equal(ORDER.bincount(), ANOTHER.bincount())


@pytest.mark.parametrize(
    ("parent", "first", "other"),
    [(parent, names[0], other) for parent, names in SIBLINGS for other in names[1:]],
)
def test_each_sibling_in_another_order_is_named(parent: str, first: str, other: str, tmp_path: Path) -> None:
    names = dict(SIBLINGS)[parent]
    orders = {f"{LAYER}.{parent}.{name}": ANOTHER if name == other else ORDER for name in names}
    (finding,) = told(tmp_path, orders)

    assert (finding.rule, finding.tensor) == ("group-order", f"{LAYER}.{parent}.{other}.g_idx")
    assert f"not the act order of {LAYER}.{parent}.{first}.g_idx" in finding.message


@pytest.mark.parametrize("missing", ["q_proj", "v_proj"])
def test_two_of_three_siblings_are_compared(missing: str, tmp_path: Path) -> None:
    there = [name for name in SIBLINGS[0][1] if name != missing]
    orders = {f"{LAYER}.self_attn.{there[0]}": ORDER, f"{LAYER}.self_attn.{there[1]}": ANOTHER}
    (finding,) = told(tmp_path, orders)

    assert (finding.rule, finding.tensor) == ("group-order", f"{LAYER}.self_attn.{there[1]}.g_idx")


@pytest.mark.parametrize(("parent", "names"), SIBLINGS)
def test_one_order_of_siblings_is_sound_and_others_have_their_own(
    parent: str, names: tuple[str, ...], tmp_path: Path
) -> None:
    orders = {f"{LAYER}.{parent}.{name}": ORDER for name in names}
    orders[f"{LAYER}.{parent}.{APART[parent]}"] = ANOTHER
    orders |= {f"model.layers.1.{parent}.{name}": ANOTHER for name in (*names, APART[parent])}

    assert told(tmp_path, orders) == ()
