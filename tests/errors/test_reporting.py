"""The cause of a message, and the places of one cause in short."""

from itertools import product

import pytest

from qload.errors.reporting import (
    MAX_NAME_CHARACTERS,
    MAX_NAME_LINES,
    cause_of,
    group_by_cause,
    group_rows,
    group_texts,
    worst_code,
)

ONE_CAUSE = [
    pytest.param(
        [("model.layers.0.up.scales: NaN scale at (3, 4); 17 in all", "model.layers.0.up.scales"),
         ("lm_head.weight_scale: NaN scale at (0,); 1 in all", "lm_head.weight_scale")],
        id="places and counts",
    ),
    pytest.param(
        [("a.0.q.qweight: wrong shape\nexpected (32, 160) = (K*4/32, N)\ngot      (32, 2)\n"
          "in       model-00001-of-00002.safetensors", "a.0.q.qweight"),
         ("a.7.q.qweight: wrong shape\nexpected (8, 96) = (K*4/32, N)\ngot      (8, 16)\n"
          "in       model-00002-of-00002.safetensors", "a.7.q.qweight")],
        id="shapes and files",
    ),
    pytest.param(
        [("model.layers.3.up.weight: equal to model.layers.1.up.weight, byte for byte",
          "model.layers.3.up.weight"),
         ("model.layers.9.down.weight: equal to model.layers.2.down.weight, byte for byte",
          "model.layers.9.down.weight")],
        id="another tensor",
    ),
    pytest.param([("a.b: off by -3.5e-05 of 1e9", "a.b"), ("c: off by 12.5 of 7", "c")], id="values"),
]  # fmt: skip


@pytest.mark.parametrize("findings", ONE_CAUSE)
def test_findings_of_one_cause_have_one_text(findings: list[tuple[str, str]]) -> None:
    causes = {cause_of(message, tensor) for message, tensor in findings}

    assert len(causes) == 1
    assert not any(tensor in cause for _, tensor in findings for cause in causes)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("a.w: NaN scale at 3", "a.w: infinite scale at 3"),
        ("a.w: wrong dtype int8", "a.w: wrong dtype uint8"),
        ("a.w: config.json says no", "a.w: quantize_config.json says no"),
        ("a.w: missing", "a.w: equal to b.0.w"),
    ],
)
def test_findings_of_two_causes_have_two(one: str, other: str) -> None:
    assert cause_of(one, "a.w") != cause_of(other, "a.w")


def test_a_name_is_left_out_as_a_whole_and_never_a_part_of_another() -> None:
    assert cause_of("a.up: x of a.up.weight and a.upper", "a.up") == "x of *weight and a.upper"


def test_a_name_within_another_one_is_left_out_after_it() -> None:
    assert cause_of("up of model-up.st is not up", "up", "model-up.st") == "* of * is not *"
    assert cause_of("zz: a zz of b", "zz", "a zz") == "* of b"


def places(names: list[str], limit: int | None = MAX_NAME_LINES) -> list[str]:
    (group,) = group_by_cause(names, name=str, cause=lambda _: "one")
    return group.places(limit)


def test_a_group_has_all_items_of_a_cause_in_the_order_of_their_first() -> None:
    items = [("a.0.up", "NaN"), ("head", "empty"), ("a.1.up", "NaN"), ("a.0.up", "NaN")]

    groups = group_by_cause(items, name=lambda item: item[0], cause=lambda item: item[1])

    assert [group.first for group in groups] == [("a.0.up", "NaN"), ("head", "empty")]
    assert [len(group.items) for group in groups] == [3, 1]
    assert [group.count for group in groups] == [2, 1]  # one place has two items
    assert [group.places() for group in groups] == [["a.{0..1}.up"], ["head"]]


def test_the_places_spell_every_name_and_no_other() -> None:
    names = [f"m.{layer}.{part}" for layer, part in product((0, 1, 2, 5), ("q", "k"))] + ["m.7.q", "head"]

    assert places(names) == ["head", "m.{0..2,5}.k", "m.{0..2,5,7}.q"]


def test_places_without_an_item_are_not_spelled() -> None:
    """Experts 0 and 1 of one layer, and expert 1 of another: no product of two sets of indices."""
    assert places(["l.0.e.0", "l.0.e.1", "l.1.e.1"]) == ["l.0.e.{0..1}", "l.1.e.1"]


@pytest.mark.parametrize("limit", [2, 3, MAX_NAME_LINES])
def test_the_last_line_counts_the_names_that_do_not_fit(limit: int) -> None:
    names = [f"l.{layer}.p{part}" for part in range(10) for layer in range(3)]

    lines = places(names, limit)

    assert len(lines) == limit
    assert lines[0] == "l.{0..2}.p0"
    assert lines[-1] == f"and {3 * (10 - limit + 1)} more"
    assert len(places(names, None)) == 10


def test_numbers_are_in_their_order_and_a_long_name_is_one_part() -> None:
    long = "x." * 200 + "1"

    assert [row.name for row in group_rows(["l.10.a", "l.9.a", "l.9.b"], name=str, key=str)] == [
        "l.9.a", "l.9.b", "l.10.a",
    ]  # fmt: skip
    assert places([long, long.replace("1", "2")]) == sorted([long, long.replace("1", "2")])


@pytest.mark.parametrize("count", [1, 2, MAX_NAME_LINES, MAX_NAME_LINES + 1])
def test_all_places_are_shown_up_to_the_limit(count: int) -> None:
    names = [f"part{part}" for part in range(count)]

    more = [f"and {count - MAX_NAME_LINES + 1} more"] if count > MAX_NAME_LINES else []
    assert places(names) == names[: MAX_NAME_LINES - bool(more)] + more


@pytest.mark.parametrize(
    ("names", "merged"),
    [
        (["a.0", "a.999999999"], ["a.{0,999999999}"]),
        (["a.0", "a.1000000000"], ["a.0", "a.1000000000"]),
        (["a.0", "a.01"], ["a.0", "a.01"]),
        (["0.a", "1.a"], ["{0..1}.a"]),
        (["a.1", "a.2", "a.1.1"], ["a.1.1", "a.{1..2}"]),
        (
            [f"{'x' * (MAX_NAME_CHARACTERS - 2)}.{n}" for n in (0, 1)],
            [f"{'x' * (MAX_NAME_CHARACTERS - 2)}.{{0..1}}"],
        ),
        (
            [f"{'x' * (MAX_NAME_CHARACTERS - 1)}.{n}" for n in (0, 1)],
            [f"{'x' * (MAX_NAME_CHARACTERS - 1)}.{n}" for n in (0, 1)],
        ),
    ],
)
def test_indices_are_whole_numbers_of_up_to_nine_digits(names: list[str], merged: list[str]) -> None:
    assert sorted(places(names)) == merged


def test_rows_are_counted_and_keep_their_first_item() -> None:
    rows = group_rows(["l.1.e.1", "l.0.e.0", "l.0.e.1", "l.1.e.0", "l.2.x"], name=str, key=lambda _: None)
    alone = group_rows(["l.1", "l.0"], name=str, key=None)
    keyed = group_rows(["l.0", "l.1", "l.2"], name=str, key={"l.1": 1}.get)

    assert [(row.name, row.count, row.first) for row in rows] == [
        ("l.{0..1}.e.{0..1}", 4, "l.0.e.0"), ("l.2.x", 1, "l.2.x"),
    ]  # fmt: skip
    assert [(row.name, row.count, row.first) for row in alone] == [("l.0", 1, "l.0"), ("l.1", 1, "l.1")]
    assert [(row.name, row.count, row.first) for row in keyed] == [("l.{0,2}", 2, "l.0"), ("l.1", 1, "l.1")]


def test_texts_alike_are_counted_under_their_first() -> None:
    texts = ["l.0.up: error 0.1", "no config", "l.1.up: error 0.2", "l.2.up: error 7"]

    assert group_texts(texts) == ["l.0.up: error 0.1\n(2 more like it)", "no config"]


@pytest.mark.parametrize(
    ("codes", "worst"),
    [((), 0), ((0, 0), 0), ((0, 4), 4), ((4, 1), 1), ((1, 3), 3), ((3, 2), 2), ((0, 7), 0), ((7, 9), 9)],
)
def test_the_worst_exit_code_of_several_paths(codes: tuple[int, ...], worst: int) -> None:
    assert worst_code(codes) == worst
