"""Single tensors: any dimension, any world, any way of saying blocks; one dtype policy for all of them."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from qload.detect import DefaultWeightsLoader
from qload.errors import ArgumentError, CastError, DivideError, MissingTensorError
from qload.parallel import ALONE, FakeWorld, Rank
from qload.spec import Role
from qload.storage import MemoryStorage
from qload.testing import assert_same_bits
from qload.weights import Weights
from tests.example_counts import at_most

DTYPES = [
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.int16, torch.int32,
    torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz,
    torch.float8_e8m0fnu,
]  # fmt: skip


def weights(tensors: dict[str, Tensor], rank: Rank = ALONE, **options: Any) -> Weights:
    return Weights(MemoryStorage(tensors), loader=DefaultWeightsLoader(), process_group=rank, **options)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("shape", "dim"),
    [
        ((12,), 0),
        ((12,), -1),
        ((12, 5), 0),
        ((5, 12), 1),
        ((5, 12), -1),
        ((2, 3, 12), 2),
        ((12, 1, 4), -3),
    ],
)
def test_equal_shares_are_the_whole_along_any_dimension(shape: tuple[int, ...], dim: int, world: int) -> None:
    tensor = torch.arange(torch.Size(shape).numel()).reshape(shape)

    parts = [weights({"t": tensor}, rank).get_sharded("t", dim) for rank in FakeWorld(world)]

    assert_same_bits(torch.cat(parts, dim), tensor)
    assert len({part.shape for part in parts}) == 1


@pytest.mark.usefixtures("seen_texts")
def test_a_dimension_that_does_not_divide_is_refused() -> None:
    with pytest.raises(DivideError, match="t: dimension 1 = 5 does not divide into 2 ranks"):
        weights({"t": torch.zeros(4, 5)}, Rank(0, 2)).get_sharded("t", 1)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_shares_of_a_tensor_in_memory_are_the_whole(dim: int) -> None:
    tensor = torch.arange(24).reshape(4, 6)

    parts = [weights({}, rank).get_tensor_shard(tensor, dim) for rank in FakeWorld(2)]

    assert_same_bits(torch.cat(parts, dim), tensor)


def test_shares_of_a_tensor_in_memory_are_cast_as_those_that_are_stored() -> None:
    mine, tensor = weights({}, Rank(1, 2), dtype=torch.float16), torch.tensor([1.0, 2.0])

    assert_same_bits(mine.get_tensor_shard(tensor, 0), torch.tensor([2.0]).half())
    assert_same_bits(mine.get_tensor_shard(tensor, 0, role=Role.SCALE), torch.tensor([2.0]))
    assert_same_bits(mine.get_tensor_shard(tensor.int(), 0), torch.tensor([2], dtype=torch.int32))


@pytest.mark.usefixtures("seen_texts")
def test_a_tensor_in_memory_that_does_not_divide_is_refused() -> None:
    with pytest.raises(DivideError, match="tensor: dimension 1 = 5 does not divide into 2 ranks"):
        weights({}, Rank(0, 2)).get_tensor_shard(torch.zeros(4, 5), -1)
    with pytest.raises(ArgumentError, match="dim"):
        weights({}).get_tensor_shard(torch.zeros(4, 5), 2)


@pytest.mark.parametrize(
    ("size", "world", "sizes"),
    [
        (5, 4, [2, 2, 1, 0]),
        (17, 2, [9, 8]),
        (3, 8, [1, 1, 1, 0, 0, 0, 0, 0]),
        (0, 2, [0, 0]),
        (6, 3, [2, 2, 2]),
    ],
)
def test_partial_shares_may_be_short_or_empty_at_the_end(size: int, world: int, sizes: list[int]) -> None:
    tensor = torch.arange(size * 2).reshape(2, size)

    parts = [weights({"t": tensor}, rank).get_partial_sharded("t", 1) for rank in FakeWorld(world)]

    assert [part.shape[1] for part in parts] == sizes
    assert_same_bits(torch.cat(parts, 1), tensor)


@given(data=st.data())
@at_most(60)
def test_partial_shares_are_the_whole_for_any_shape_dimension_and_world(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=4))
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    world = data.draw(st.integers(1, 9))
    tensor = torch.arange(torch.Size(shape).numel()).reshape(shape)

    parts = [weights({"t": tensor}, rank).get_partial_sharded("t", dim) for rank in FakeWorld(world)]

    assert_same_bits(torch.cat(parts, dim), tensor)
    assert [part.shape[dim] for part in parts] == sorted((part.shape[dim] for part in parts), reverse=True)


@pytest.mark.usefixtures("seen_texts")
def test_a_scalar_is_read_and_has_no_dimension_to_cut() -> None:
    mine = weights({"t": torch.tensor(3)})

    assert mine.get_tensor("t") == 3
    with pytest.raises(ArgumentError, match=r"a dimension of t, which has shape \(\)"):
        mine.get_sharded("t", 0)


BLOCKS = [
    pytest.param(lambda: 3, [4, 4, 4], id="a count"),
    pytest.param(lambda: [2, 1], [8, 4], id="proportions"),
    pytest.param(lambda: [6, 4, 2], [6, 4, 2], id="sizes"),
    pytest.param(lambda: (6, 4, 2), [6, 4, 2], id="a tuple"),
    pytest.param(lambda: torch.Size([8, 4]), [8, 4], id="a torch.Size"),
    pytest.param(lambda: range(2, 0, -1), [8, 4], id="a range"),
    pytest.param(lambda: np.array([2, 1]), [8, 4], id="numpy integers"),
    pytest.param(lambda: (n for n in (2, 1)), [8, 4], id="a generator"),
    pytest.param(lambda: [12], [12], id="one block"),
    pytest.param(lambda: np.int64(3), [4, 4, 4], id="a numpy count"),
    pytest.param(lambda: torch.tensor([2]), [12], id="one block in a tensor"),
]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(("blocks", "sizes"), BLOCKS)
def test_packed_shares_take_a_piece_of_every_block(
    blocks: Callable[[], Any], sizes: list[int], world: int
) -> None:
    tensor = torch.arange(24).reshape(2, 12)

    parts = [weights({"t": tensor}, rank).get_packed_sharded("t", -1, blocks()) for rank in FakeWorld(world)]

    for rank, part in enumerate(parts):
        assert_same_bits(
            part, torch.cat([block.chunk(world, 1)[rank] for block in tensor.split(sizes, 1)], 1)
        )


@pytest.mark.usefixtures("seen_texts")
@pytest.mark.parametrize(
    ("blocks", "error"),
    [
        (0, ArgumentError),
        (-1, ArgumentError),
        ([], ArgumentError),
        ([3, 0], ArgumentError),
        ([-3, 15], ArgumentError),
        (True, ArgumentError),
        (5, DivideError),
        ([5, 2], DivideError),
        ([1.5, 1.5], ArgumentError),
        ([True, 2], ArgumentError),
        (3.0, ArgumentError),
        (None, ArgumentError),
        ("12", ArgumentError),
    ],
    ids=repr,
)
def test_blocks_that_are_none_are_refused(blocks: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        weights({"t": torch.zeros(12)}).get_packed_sharded("t", 0, blocks)


@pytest.mark.usefixtures("seen_texts")
def test_blocks_that_are_none_are_shown_beside_the_tensor() -> None:
    with pytest.raises(ArgumentError) as caught:
        weights({"t": torch.zeros(12)}).get_packed_sharded("t", 0, [8, -4])

    assert (caught.value.argument, caught.value.got) == ("t: block_sizes", "[8, -4]")


@pytest.mark.usefixtures("seen_texts")
def test_a_packed_read_that_fails_leaves_no_entry() -> None:
    mine = weights({"t": torch.full((2,), 1e9)}, dtype=torch.float16)

    with pytest.raises(CastError):
        mine.get_packed_sharded("t", 0, 2)

    assert not mine.report().used


@pytest.mark.usefixtures("seen_texts")
def test_a_block_that_does_not_divide_is_refused_though_the_whole_does() -> None:
    with pytest.raises(
        DivideError, match="t: dimension 0 = 3 does not divide into 2 ranks\n  a block at 0 of 12"
    ):
        weights({"t": torch.zeros(12)}, Rank(0, 2)).get_packed_sharded("t", 0, [3, 9])


@pytest.mark.usefixtures("seen_texts")
@pytest.mark.parametrize("dim", [2, -3])
def test_a_dimension_there_is_none_of_is_refused(dim: int) -> None:
    with pytest.raises(ArgumentError, match="a dimension of t"):
        weights({"t": torch.zeros(2, 3)}).get_sharded("t", dim)


LOADS = [
    pytest.param(lambda w, name: w.get_tensor(name), id="get_tensor"),
    pytest.param(lambda w, name: w.get_sharded(name, 0), id="get_sharded"),
    pytest.param(lambda w, name: w.get_partial_sharded(name, 0), id="get_partial_sharded"),
    pytest.param(lambda w, name: w.get_packed_sharded(name, 0, 2), id="get_packed_sharded"),
]


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_only_plain_floats_are_cast_whatever_the_load(load: Any, dtype: torch.dtype) -> None:
    tensor = torch.tensor([1, 0, 1, 1]).to(dtype)
    plain = dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)

    got = load(weights({"a.weight": tensor}, dtype=torch.bfloat16), "a.weight")

    assert_same_bits(got, tensor.to(torch.bfloat16) if plain else tensor)


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("name", ["scales", "qweight", "qzeros", "g_idx"])
def test_a_part_of_a_quantized_layer_is_never_cast(load: Any, name: str) -> None:
    tensor = torch.tensor([1.0001, 2, 3, 4])

    assert_same_bits(load(weights({f"a.{name}": tensor}, dtype=torch.float16), f"a.{name}"), tensor)


def test_a_role_can_be_said() -> None:
    mine = weights({"a.mystery": torch.ones(2)}, dtype=torch.float16)

    assert mine.get_tensor("a.mystery").dtype == torch.float16
    assert mine.get_tensor("a.mystery", role=Role.SCALE).dtype == torch.float32


@pytest.mark.usefixtures("seen_texts")
def test_a_cast_that_overflows_is_refused() -> None:
    mine = weights({"a.weight": torch.tensor([1.0, 70000.0, -1e9])}, dtype=torch.float16)

    with pytest.raises(CastError) as caught:
        mine.get_tensor("a.weight")

    assert str(caught.value).splitlines()[:2] == [
        "a.weight: a cast from float32 to float16 overflows",
        "  got      70000 (2 values in all)",
    ]


def test_an_infinity_that_was_stored_is_no_overflow() -> None:
    mine = weights({"a.weight": torch.tensor([float("inf"), float("nan")])}, dtype=torch.float16)

    assert mine.get_tensor("a.weight").tolist()[0] == float("inf")


def test_without_a_dtype_nothing_is_cast() -> None:
    assert weights({"a.weight": torch.tensor([1e30])}).get_tensor("a.weight").dtype == torch.float32


@pytest.mark.usefixtures("seen_texts")
@pytest.mark.parametrize("dtype", [torch.int32, torch.float8_e4m3fn, "float16"])
def test_a_dtype_that_weights_cannot_be_cast_to_is_refused(dtype: Any) -> None:
    with pytest.raises(ArgumentError, match="dtype\n  expected None or one of"):
        weights({}, dtype=dtype)


@pytest.mark.usefixtures("seen_texts")
def test_a_rank_outside_of_its_world_is_refused() -> None:
    class Broken:
        def rank(self) -> int:
            return 2

        def size(self) -> int:
            return 2

    with pytest.raises(ArgumentError, match="0 <= rank < size = 2"):
        Weights(MemoryStorage({}), loader=DefaultWeightsLoader(), process_group=Broken())


@pytest.mark.parametrize(
    ("stored", "value"),
    [
        pytest.param(["x", "alias", "p.x", "p.alias"], "x", id="the name itself"),
        pytest.param(["alias", "p.x", "p.alias"], "alias", id="then its alias"),
        pytest.param(["p.x", "p.alias"], "p.x", id="then the name under the prefix"),
        pytest.param(["p.alias"], "p.alias", id="then an alias of that"),
    ],
)
def test_names_are_looked_for_in_this_order(stored: list[str], value: str) -> None:
    tensors = {name: torch.full((2,), float(i)) for i, name in enumerate(stored)}
    mine = weights(tensors, aliases={"x": ["alias"], "p.x": ["p.alias"]}, prefix="p")

    assert_same_bits(mine.get_sharded("x", 0), tensors[value])
    assert mine.has_tensor("x")
    assert mine.report().used == [value]


@pytest.mark.usefixtures("seen_texts")
def test_a_missing_name_says_what_was_tried_and_what_there_is() -> None:
    mine = weights(
        {"p.a.qweight": torch.zeros(1), "p.a.scales": torch.zeros(1)},
        aliases={"p.a.weight": ["q"]},
        prefix="p",
    )

    with pytest.raises(MissingTensorError) as caught:
        mine.get_tensor("a.weight")

    assert str(caught.value).splitlines()[:2] == [
        "a.weight: not in the checkpoint",
        "  tried    a.weight, p.a.weight, q",
    ]
    assert "p.a.qweight" in str(caught.value)
    assert not mine.has_tensor("a.weight")


@pytest.mark.usefixtures("seen_texts")
def test_what_lies_beside_a_missing_name_is_looked_for_under_the_prefix_too() -> None:
    mine = weights({"model.a.qweight": torch.zeros(1), "model.b.weight": torch.zeros(1)}, prefix="model")

    with pytest.raises(MissingTensorError) as caught:
        mine.get_tensor("a.weight")

    assert list(caught.value.near) == ["model.a.qweight"]


@pytest.mark.usefixtures("seen_texts")
@pytest.mark.parametrize(
    ("options", "text"),
    [
        pytest.param({"aliases": {"x": "other"}}, "aliases\n  expected a list of names for x", id="letters"),
        pytest.param({"process_group": "nccl"}, "process_group\n  expected None, or anything", id="group"),
        pytest.param({"device": "gpu0"}, "device\n  expected a device of torch's", id="device"),
        pytest.param({"device": "cuda:99"}, "device\n  expected cpu, or one of [0-9]+ CUDA", id="no GPU"),
    ],
)
def test_arguments_of_weights_are_checked(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        Weights(MemoryStorage({}), loader=DefaultWeightsLoader(), **options)


def test_a_gift_of_a_tensor_is_a_copy() -> None:
    mine = weights({"t": torch.zeros(4)})

    mine.get_sharded("t", 0).fill_(7)

    assert mine.get_tensor("t").tolist() == [0, 0, 0, 0]


@pytest.mark.usefixtures("seen_texts")
@pytest.mark.parametrize(
    ("device", "found"), [("cuda", True), ("cuda:1", True), ("cuda:2", False), ("cpu", True)]
)
def test_a_device_is_one_that_torch_sees(device: str, found: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    if found:
        assert weights({}, device=device).device == torch.device(device)
        return
    with pytest.raises(ArgumentError) as caught:
        weights({}, device=device)
    expected = "cpu, or one of 2 CUDA devices that torch sees here"
    assert (caught.value.argument, caught.value.expected, caught.value.got) == ("device", expected, "cuda:2")


class OneByOne(MemoryStorage):
    """A storage without a call for several rows."""

    read_rows = property()  # type: ignore[assignment]


@pytest.mark.parametrize("kind", [MemoryStorage, OneByOne])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_rows_are_read_under_all_names_and_cast_as_single_tensors(
    kind: type[MemoryStorage], dtype: torch.dtype | None
) -> None:
    stored = {f"p.{at}.weight": torch.full((4, 6), float(at)) for at in range(3)}
    codes = {f"p.{at}.qweight": torch.full((2, 6), at, dtype=torch.int32) for at in range(3)}
    mine = Weights(
        kind({**stored, **codes}),
        loader=DefaultWeightsLoader(),
        dtype=dtype,
        prefix="p",
        aliases={"first.weight": ["p.0.weight"]},
    )
    index = slice(1, 3), slice(2, 6)
    floats = torch.zeros(3, 2, 4, dtype=dtype or torch.float32)
    words = torch.zeros(2, 2, 6, dtype=torch.int32)

    mine.read_rows(
        [
            (["first.weight", "1.weight", "p.2.weight"], index, floats),
            (["2.qweight", "p.1.qweight"], (), words),
            ([], (), torch.zeros(0, 2)),
        ]
    )

    assert_same_bits(floats, torch.arange(3.0)[:, None, None].expand(3, 2, 4).to(floats.dtype))
    assert_same_bits(words, torch.tensor([2, 1], dtype=torch.int32)[:, None, None].expand(2, 2, 6))


@pytest.mark.usefixtures("seen_texts")
def test_rows_of_a_dtype_that_no_cast_gives_are_refused() -> None:
    mine = weights({"a.weight": torch.ones(4)}, dtype=torch.bfloat16)

    with pytest.raises(ArgumentError) as caught:
        mine.read_rows([(["a.weight"], (), torch.zeros(1, 4, dtype=torch.float16))])

    assert (caught.value.argument, caught.value.expected, caught.value.got) == (
        "asked", "torch.bfloat16, as a.weight", "torch.float16",
    )  # fmt: skip
