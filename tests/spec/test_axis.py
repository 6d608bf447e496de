"""The grammar of axes, and the sizes that a layer's shapes agree on."""

import pickle
from fractions import Fraction

import pytest

from qload import dtypes
from qload.errors import PatternError, ShapeError
from qload.spec import Axis, FieldNames, Role, TensorSpec, solve

pytestmark = pytest.mark.usefixtures("seen_texts")


@pytest.mark.parametrize(
    ("text", "logical", "stored", "granule"),
    [
        ("N", 7, 7, 1),
        ("K/8", 64, 8, 8),
        ("K*4/32", 64, 8, 8),
        ("K*3/32", 64, 6, 32),
        ("N*2@64", 128, 256, 32),
        ("K/128^", 288, 3, 128),
        ("N@64", 128, 128, 64),
        ("N@64^", 100, 128, 64),
        ("N@32^/8", 40, 8, 32),
        ("K/16*3", 32, 6, 16),
        ("K/8/4", 64, 2, 32),
        ("16", 16, 16, 1),
        ("K!", 5, 5, 1),
    ],
)
def test_the_stored_size_and_the_granule_follow_from_the_text(
    text: str, logical: int, stored: int, granule: int
) -> None:
    axis = Axis(text)

    assert (axis.size(logical), axis.granule) == (stored, granule)


@pytest.mark.parametrize(("text", "logical"), [("K/8", 12), ("K*3/32", 16), ("N@64", 100), ("K/8/4", 8)])
def test_a_division_that_is_not_exact_has_no_size(text: str, logical: int) -> None:
    assert Axis(text).size(logical) is None


@pytest.mark.parametrize(
    ("text", "place", "logical", "stored"),
    [
        ("K*3/32", 32, 96, 3),
        ("K/128^", 256, 288, 2),
        ("K/128^", 288, 288, 3),
        ("N@64^", 64, 100, 64),
        ("N", 3, 7, 3),
    ],
)
def test_a_lawful_cut_falls_on_a_stored_place(text: str, place: int, logical: int, stored: int) -> None:
    assert Axis(text).at(place, logical) == stored


def test_a_cut_is_a_multiple_of_the_granule_exactly_where_its_stored_place_is_whole() -> None:
    axes = [Axis(text) for text in ("K/8", "K*3/32", "K*4/32", "K*6/4")]

    for axis in axes:
        exact = [place for place in range(1, 200) if (place * axis.factor).denominator == 1]
        assert exact == [place for place in range(1, 200) if place % axis.granule == 0]
    assert axes[1].factor == Fraction(3, 32)


def test_the_parts_of_an_axis_are_told_apart() -> None:
    axis = Axis("K/128^|G")

    assert (axis.dim, axis.free, axis.rounds, axis.never) == ("K", "G", True, False)
    assert Axis("K!").never


@pytest.mark.parametrize("text", ["", "k", "K/", "K/8^^", "K+1", "K/8|", "K/0", "K*2^", "/8", "NK", "K|g"])
def test_text_that_is_no_axis_is_refused(text: str) -> None:
    with pytest.raises(PatternError):
        Axis(text)


def spec(name: str, text: str) -> TensorSpec:
    return TensorSpec(name, (dtypes.int32,), text, Role.WORD)


SPECS = [spec("words", "K/8 N"), spec("scales", "G N"), spec("index", "K")]


def test_the_sizes_of_a_layer_are_those_its_shapes_agree_on() -> None:
    shapes = {"words": (4, 6), "scales": (2, 6), "index": (32,)}

    assert solve(SPECS, shapes, FieldNames("a")) == {"K": 32, "N": 6, "G": 2}


def test_an_axis_that_says_its_dimension_as_it_is_is_believed_first() -> None:
    with pytest.raises(ShapeError) as caught:
        solve(SPECS, {"words": (8, 6), "scales": (2, 6), "index": (32,)}, FieldNames("a"))

    assert str(caught.value) == "a.words: wrong shape\n  expected (4, 6) = (K/8, N)\n  got      (8, 6)"


def test_a_dimension_that_cannot_be_divided_says_by_what_it_has_to_be() -> None:
    with pytest.raises(ShapeError, match="K = 33 has to be a multiple of 8"):
        solve(SPECS, {"words": (4, 6), "scales": (2, 6), "index": (33,)}, FieldNames("a"))


def test_a_tensor_of_other_dimensions_is_refused() -> None:
    with pytest.raises(ShapeError, match=r"a\.scales: wrong shape\n  expected 2 axes: \(G, N\)"):
        solve(SPECS, {"words": (4, 6), "scales": (6,), "index": (32,)}, FieldNames("a"))


def test_a_declaration_in_use_can_be_sent_to_another_process() -> None:
    spec = TensorSpec("qweight", (dtypes.int32,), "K/8 N", Role.WORD)
    granules = [axis.granule for axis in spec.axes]

    other = pickle.loads(pickle.dumps(spec))

    assert (other, [axis.granule for axis in other.axes]) == (spec, granules)
