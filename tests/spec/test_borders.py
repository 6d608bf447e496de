"""Indices, groups, casts and shares at their borders: the last sound value, and the first that is not."""

from collections.abc import Iterator
from dataclasses import replace
from math import inf, nan
from typing import Any

import pytest
import torch
from torch import Tensor

from qload import dtypes
from qload.devices import CodeValues, meaning_of
from qload.errors import ArgumentError, CastError, IndexValueError, MismatchError, ShapeError
from qload.formats import CTPackConfig, Fp8Config, Fp8Weight, GPTQConfig, MarlinConfig
from qload.spec import (
    Axis,
    FieldNames,
    Layer,
    LayerHeaders,
    Role,
    ShareBounds,
    TensorSpec,
    Weight,
    expand_parts,
    solve,
)
from qload.spec.casts import check_cast, check_out
from qload.spec.weight import Grouped
from qload.testing.layer_factory import layer_of
from qload.testing.traits import CONTRACTS, contract

pytestmark = pytest.mark.usefixtures("seen_texts")

NAMES = FieldNames("a")


def headers(index: list[int]) -> LayerHeaders:
    fact = torch.tensor(index, dtype=torch.int32)
    return LayerHeaders({"index": (len(index),), "scales": (3,)}, {}, {"index": fact}, NAMES)


def spec(name: str, text: str, **more: Any) -> TensorSpec:
    return TensorSpec(name, (dtypes.int32,), text, Role.INDEX, **more)


@pytest.mark.parametrize(
    ("index", "error"),
    [
        ([0, 1, 2, 2], ""),
        ([2, 2, 2, 2], ""),
        ([0, 3, 1, 4], "3 at 1"),
        ([0, 1, 2, -1], "-1 at 3"),
    ],
)
def test_an_index_points_at_a_group_that_there_is(index: list[int], error: str) -> None:
    specs = [spec("index", "K", fact=True, index_of="G"), spec("scales", "G")]
    if not error:
        assert headers(index).sizes(specs) == {"K": 4, "G": 3}
        return
    with pytest.raises(IndexValueError) as caught:
        headers(index).sizes(specs)

    wrong = [at for at, value in enumerate(index) if not 0 <= value < 3]
    assert (
        caught.value.args == IndexValueError("a.index", index[wrong[0]], wrong[0], 3, len(wrong), None).args
    )
    assert f"{index[wrong[0]]}" in str(caught.value)


def test_a_tensor_of_one_element_has_no_other_shape() -> None:
    seen = LayerHeaders({"one": (1,), "two": (2,), "row": (1, 1)}, {}, {}, NAMES)
    seen.check_single([])
    seen.check_single(["one", "not stored"])

    with pytest.raises(ShapeError, match=r"(?s)a\.two.*\(\) or \(1,\).*\(2,\)"):
        seen.check_single(["one", "two", "row"])
    with pytest.raises(ShapeError, match=r"(?s)a\.row.*\(1, 1\)"):
        seen.check_single(["row", "two"])


def scalars() -> Iterator[Any]:
    """Yield each single value among the tensors of each format."""
    for name in CONTRACTS:
        weight = layer_of(contract(name).common(name), 128, 256).weight()
        for spec in weight.tensors(weight.config):
            if spec.is_per_part and spec.name in weight.fields():
                yield pytest.param(weight, spec.name, id=f"{name}-{spec.name}")


@pytest.mark.parametrize(("weight", "name"), list(scalars()))
def test_a_single_value_may_have_no_axis(weight: Weight, name: str) -> None:
    tensors = weight.fields()
    tensors[name] = tensors[name].reshape(())
    built = type(weight)(config=weight.config, **tensors)

    assert getattr(built, name).shape == (1,)
    assert torch.equal(built.dequantize(torch.float32), weight.dequantize(torch.float32))


@pytest.mark.parametrize(
    ("index", "first", "count"),
    [([1, 0, 2], None, 0), ([0], None, 0), ([0, 1, 3], 2, 1), ([0, -1, 1], 1, 1), ([2, 1, 1], 1, 2)],
)
def test_a_permutation_names_each_place_once(index: list[int], first: int | None, count: int) -> None:
    specs = [spec("index", "K", fact=True, permutation=True), spec("scales", "G")]
    if first is None:
        assert headers(index).sizes(specs)["K"] == len(index)
        return
    with pytest.raises(IndexValueError) as caught:
        headers(index).sizes(specs)

    said = IndexValueError("a.index", index[first], first, len(index), count, None, "each once")
    assert str(caught.value) == str(said)


def values(k_group: Any, n_group: Any, scales: tuple[int, ...] = (3, 4)) -> CodeValues:
    """Codes (3, 8) under scales of four groups of inputs."""
    k, n = (None if group is None else torch.tensor(group) for group in (k_group, n_group))
    return CodeValues(4, torch.zeros(3, 8, dtype=torch.uint8), torch.ones(scales), None, k, n_group=n)


IN_ORDER = [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize(
    ("codes", "read"),
    [
        (values(IN_ORDER, None), True),
        (values([3] * 8, None), True),
        (values([*IN_ORDER[:-1], 4], None), False),
        (values([-1, *IN_ORDER[1:]], None), False),
        (values(IN_ORDER[:-1], None), False),
        (values(IN_ORDER, [0, 1, 2]), True),
        (values(IN_ORDER, [2, 2, 2]), True),
        (values(IN_ORDER, [0, 1, 3]), False),
        (values(IN_ORDER, [-1, 1, 2]), False),
        (values(IN_ORDER, [0, 1]), False),
        (values(IN_ORDER, None, (1, 4)), True),
        (values(IN_ORDER, None, (2, 4)), False),
        (values(IN_ORDER, None, (3, 4, 1)), False),
        (values(None, None, (3, 1)), True),
        (values(None, None, (3, 2)), False),
        (replace(values(IN_ORDER, None), zeros=torch.ones(3, 4)), True),
        (replace(values(IN_ORDER, None), zeros=torch.ones(3, 3)), False),
        (replace(values(IN_ORDER, None), lookup=torch.ones(16)), True),
        (replace(values(IN_ORDER, None), lookup=torch.ones(15)), False),
        (replace(values(IN_ORDER, None), lookup=torch.ones(16).double()), False),
    ],
)
def test_native_code_is_given_no_index_that_leads_outside_of_what_it_reads(
    codes: CodeValues, read: bool
) -> None:
    assert (meaning_of(codes) is not None) == read


@pytest.mark.parametrize(
    "config", [GPTQConfig(4, 128), CTPackConfig(4, 128), MarlinConfig(128)], ids=lambda config: config.name
)
def test_groups_of_a_size_that_is_none_are_refused(config: Grouped) -> None:
    for size in (-1, 1, 2):
        assert replace(config, group_size=size).group_size == size  # type: ignore[type-var]
    for size in (-2, 0):
        with pytest.raises(
            ArgumentError, match=f"group_size\n  expected -1 or at least 1\n  got      {size}"
        ):
            replace(config, group_size=size)  # type: ignore[type-var]


@pytest.mark.parametrize(
    ("size", "K", "rows", "groups", "order"),
    [
        (-1, 5, 5, 1, [0, 0, 0, 0, 0]),
        (-1, 0, 1, 1, []),
        (2, 5, 2, 3, [0, 0, 1, 1, 2]),
        (1, 3, 1, 3, [0, 1, 2]),
        (5, 5, 5, 1, [0, 0, 0, 0, 0]),
        (4, 5, 4, 2, [0, 0, 0, 0, 1]),
        (1 << 70, 3, 1 << 70, 1, [0, 0, 0]),
    ],
)
def test_rows_in_groups(size: int, K: int, rows: int, groups: int, order: list[int]) -> None:
    config = GPTQConfig(4, size)

    assert (config.rows_of_a_group(K), config.groups(K), config.in_order(K).tolist()) == (rows, groups, order)
    assert config.one_group(K).group_size == (-1 if size in (-1, K) else size)
    assert config.one_group(K + 1).group_size == size


@pytest.mark.parametrize(
    ("before", "dtype", "tiny", "lost"),
    [
        ([65504.0, -65504.0], torch.float16, False, None),
        ([1.0, 65520.0, -70000.0], torch.float16, False, (65520.0, 2)),
        ([inf, nan], torch.float16, True, None),
        ([1e-9], torch.float16, False, None),
        ([1e-9], torch.float16, True, (1e-9, 1)),
        ([2.0**-14, 1 + 2.0**-11], torch.float16, True, None),
        ([2.0**-14 * (1 + 2.0**-11)], torch.float16, True, None),
        ([2.0**-15 * (1 + 2.0**-10)], torch.float16, True, (2.0**-15 * (1 + 2.0**-10), 1)),
        ([0.0, -0.0], torch.float16, True, None),
    ],
)
def test_a_cast_loses_what_has_no_room(
    before: list[float], dtype: torch.dtype, tiny: bool, lost: tuple[float, int] | None
) -> None:
    wide = torch.tensor(before)
    if lost is None:
        check_cast("a", wide, wide.to(dtype), tiny=tiny, remedy="none")
        return
    with pytest.raises(CastError) as caught:
        check_cast("a", wide, wide.to(dtype), tiny=tiny, remedy="none")

    value = float(torch.tensor(lost[0]))
    assert str(caught.value) == str(CastError("a", "float32", "float16", value, lost[1], "none"))


@pytest.mark.parametrize("axis", [Axis("(NK)"), Axis("(NK)/2^"), Axis("(NK)/4^")], ids=lambda axis: axis.text)
@pytest.mark.parametrize("share", [(0, 3, 0, 8), (1, 3, 0, 8), (0, 3, 4, 8), (1, 2, 4, 8), (0, 2, 0, 4)])
def test_the_entries_of_a_share_lie_where_its_elements_do(
    axis: Axis, share: tuple[int, int, int, int]
) -> None:
    bounds = ShareBounds(*share, 3, 8)
    run = 8 // (axis.size(8) or 0)
    places = torch.arange(24).reshape(3, 8)[share[0] : share[1], share[2] : share[3]].flatten()

    assert bounds.all_inputs == (share[2:] == (0, 8))
    assert bounds.positions(axis).tolist() == (places[::run] // run).tolist()
    assert bounds.extent(axis) == len(places) // run


def test_what_no_shape_tells_is_taken_from_what_is_known_and_shapes_come_first() -> None:
    specs = [spec("words", "K/8^ N"), spec("scales", "K/4^|G N")]
    shapes = {"words": (2, 6), "scales": (3, 6)}

    assert solve(specs, shapes, NAMES, {"K": 12, "N": 5}) == {"N": 6, "G": 3, "K": 12}
    with pytest.raises(ShapeError) as caught:
        solve(specs, shapes, NAMES, {"K": 17})
    assert str(caught.value) == "a.words: wrong shape\n  expected (3, 6) = (K/8^, N)\n  got      (2, 6)"
    with pytest.raises(ShapeError, match=r"expected \(\?, 6\) = \(K/8\^, N\)"):
        solve(specs, shapes, NAMES)


def fp8(scale: Tensor, layer: Layer | None = None) -> Fp8Weight:
    weight = torch.ones(4, 2).to(torch.float8_e4m3fn)
    if layer is None:
        return Fp8Weight(config=Fp8Config("parts"), weight=weight, weight_scale=scale)
    config = Fp8Config("parts", axes="P")
    return Fp8Weight(config=config, weight=weight, weight_scale=scale, layer=layer)


def test_a_fused_layer_has_one_scale_a_part() -> None:
    layer = Layer((3, 1), 2, (4, 2), "a")

    assert fp8(torch.tensor([2.0, 3.0]), layer).dequantize()[:, 0].tolist() == [2, 2, 2, 3]
    assert (layer.N, fp8(torch.tensor([2.0]), Layer((4,), 2, (4, 2))).shape) == (4, (4, 2))
    for scale in (torch.ones(1), torch.ones(3)):
        with pytest.raises(MismatchError) as caught:
            fp8(scale, layer)
        said = ("a.weight_scale", "scales of fused parts", "2, one a part", str(len(scale)))
        assert str(caught.value) == str(MismatchError(*said))


def test_a_weight_made_by_hand_is_one_part_of_all_it_holds() -> None:
    made = fp8(torch.ones(1))

    assert made.layer == Layer((4,), 2, (4, 2))
    with pytest.raises(MismatchError, match="expected 1, one a part"):
        fp8(torch.ones(2))


def test_what_is_written_to_has_the_shape_and_memory_of_its_own() -> None:
    weight = torch.ones(4, 2)

    check_out(torch.empty(4, 2), (4, 2), weight.device, weight)
    with pytest.raises(ShapeError, match=r"expected \(4, 2\), as the weight\n  got      \(2, 4\)"):
        check_out(torch.empty(2, 4), (4, 2), weight.device)
    with pytest.raises(ArgumentError, match="memory of its own"):
        check_out(weight, (4, 2), weight.device, weight)
    with pytest.raises(ArgumentError, match="floats on cpu"):
        check_out(torch.empty(4, 2, dtype=torch.int32), (4, 2), weight.device)


@pytest.mark.parametrize("limit", [0, 0.0, -1.0, inf, nan, -inf])
def test_a_limit_of_activations_is_a_number_above_0(limit: float) -> None:
    with pytest.raises(ArgumentError, match="fp8: activation_scale_ub"):
        Fp8Config(activation_scale_ub=limit)
    assert Fp8Config(activation_scale_ub=1e-30).activation_scale_ub == 1e-30
    assert Fp8Config(activation_scale_ub=1).activation_scale_ub == 1


def test_a_weight_without_a_layer_of_its_own_says_so_in_short() -> None:
    text = repr(fp8(torch.ones(1)))

    assert text.startswith("Fp8Weight(layer, (4, 2), Fp8Config(")
    assert text.endswith("weight=(4, 2), weight_scale=(1,))")


@pytest.mark.parametrize(
    ("stored", "expected"),
    [([3.0], [3.0, 3.0, 3.0]), ([[3.0]], [3.0, 3.0, 3.0]), ([2.0, 5.0], [2.0, 5.0, 5.0])],
)
def test_scales_of_a_layer_or_its_parts_are_expanded_to_outputs(stored: Any, expected: list[float]) -> None:
    assert expand_parts(torch.tensor(stored), (1, 2)).tolist() == expected
