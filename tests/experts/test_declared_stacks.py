"""Stacks of a new format are found by its declaration alone."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from qload import MemoryStorage, formats, with_experts
from qload.experts import ExpertStacks
from qload.storage import WeightStorage
from tests.examples import pages

pytestmark = pytest.mark.usefixtures("seen_texts")

EXPERTS, COUNT = "model.layers.0.mlp.experts", 3


def single() -> dict[str, Tensor]:
    """Return the tensors of each expert of the format on the page `format`."""
    tensors = {}
    for e in range(COUNT):
        for at, name in enumerate(("gate_proj", "up_proj", "down_proj")):
            tensors[f"{EXPERTS}.{e}.{name}.nibbles"] = torch.full((64, 32), 3 * e + at).to(torch.uint8)
            tensors[f"{EXPERTS}.{e}.{name}.steps"] = torch.full((64, 2), float(e + at)).half()
    return tensors


def stacked(tensors: dict[str, Tensor], join: Callable[[str, str], str]) -> dict[str, Tensor]:
    ends = [name.removeprefix(f"{EXPERTS}.0.") for name in tensors if f"{EXPERTS}.0." in name]
    return {
        f"{EXPERTS}.{join(*end.split('.'))}": torch.stack(
            [tensors[f"{EXPERTS}.{e}.{end}"] for e in range(COUNT)]
        )
        for end in ends
    }


@pytest.fixture
def _rows4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "FORMATS", (*formats.FORMATS, pages.module("format").Rows4Weight))


def found(tensors: dict[str, Tensor], **sizes: int) -> WeightStorage:
    return with_experts(MemoryStorage(tensors), sizes)


@pytest.mark.usefixtures("_rows4")
@pytest.mark.parametrize("mark", "._")
def test_each_expert_is_a_row_of_every_tensor(mark: str) -> None:
    tensors = single()
    storage = found(stacked(tensors, lambda matrix, field: f"{matrix}{mark}{field}"))

    assert {*storage.keys()} == {*tensors}
    for name, tensor in tensors.items():
        assert torch.equal(storage.read(name), tensor)


@pytest.mark.usefixtures("_rows4")
def test_a_tensor_of_fewer_experts_leaves_the_matrix_unread() -> None:
    stacks = stacked(single(), "{}.{}".format)
    steps = f"{EXPERTS}.up_proj.steps"
    stacks[steps] = stacks[steps][:-1]

    storage = found(stacks)

    assert isinstance(storage, ExpertStacks)
    assert storage.unread.keys() == {f"{EXPERTS}.up_proj.nibbles", steps}
    assert f"{steps} of shape [2, 64, 2]: the first axis is not of the 3 experts" in storage.unread[steps]


@pytest.mark.usefixtures("_rows4")
def test_names_of_codes_without_one_more_axis_or_their_dtype_are_no_stacks() -> None:
    flat = {name.replace(".0.gate", ".gate"): tensor for name, tensor in single().items()}
    floats = {name: each.float() for name, each in stacked(single(), "{}.{}".format).items()}

    assert not isinstance(found(flat), ExpertStacks)
    assert not isinstance(found(floats), ExpertStacks)


@pytest.mark.usefixtures("_rows4")
def test_codes_of_a_numbered_expert_are_no_stack() -> None:
    deep = {name: tensor[None] for name, tensor in single().items()}

    assert not isinstance(found(deep), ExpertStacks)
