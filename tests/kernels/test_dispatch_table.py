"""The table of kernels made of measured times."""

import pytest

from qload.kernels.cuda import dispatch as choice
from tests.bench import dispatch


def row(M: int, K: int = 8, **times: float | None) -> dict:
    return {"layout": "marlin", "kind": "", "bits": 4, "K": K, "N": 8, "M": M, "kernels": times}


def test_kernels_are_ranked_and_neighbours_that_agree_are_one_row() -> None:
    rows = [row(1, a=2.0, b=1.0), row(4, a=3.0, b=1.5), row(16, a=1.0, b=1.5), row(64, b=1.0)]

    made = dispatch.merge([], rows, (9, 0))

    assert [(line["tokens"], line["kernels"]) for line in made] == [
        (4, ["b", "a"]),
        (16, ["a", "b"]),
        (64, ["b"]),
    ]
    assert all(line["bytes"] == 32 and line["capability"] == [9, 0] for line in made)


def test_a_kernel_whose_result_was_wrong_is_not_in_the_table() -> None:
    assert dispatch.merge([], [row(1, a=None, b=1.0)], (9, 0))[0]["kernels"] == ["b"]


def test_only_what_was_measured_is_replaced() -> None:
    other = {"layout": "marlin", "bits": 8, "capability": [9, 0], "bytes": 1, "tokens": 1, "kernels": ["a"]}
    older = other | {"bits": 4, "capability": [8, 0]}
    larger = other | {"bits": 4}
    more = larger | {"bytes": 32, "tokens": 64}
    stale = more | {"tokens": 8}
    of_kind = stale | {"kind": "zero points"}

    made = dispatch.merge([other, older, larger, more, of_kind, stale], [row(8, b=1.0)], (9, 0))

    assert made[:-1] == [other, older, larger, more, of_kind]
    assert made[-1] == stale | {"kernels": ["b"]}


def test_layers_of_one_size_are_ranked_together() -> None:
    rows = [row(1, a=1.0, b=2.0, c=None), row(1, a=9.0, b=2.0, c=1.0)]

    assert [line["kernels"] for line in dispatch.merge([], rows, (9, 0))] == [["b", "a"]]


def test_what_is_written_is_read(tmp_path, monkeypatch) -> None:
    file = tmp_path / "dispatch.json"
    file.write_text("[]")
    monkeypatch.setattr(dispatch, "FILE", file)
    monkeypatch.setattr(choice.resources, "files", lambda package: tmp_path)
    of_kind = row(1, b=2.0) | {"kind": "zero points"}
    dispatch.write([row(1, a=1.0, b=2.0), row(16, K=16, b=2.0), of_kind], (9, 0))
    try:
        assert choice.ranked("marlin", 4, (9, 0), 32, 1, "zero points") == ("b",)
        assert choice.ranked("marlin", 4, (9, 0), 32, 1) == ("a", "b")
        assert choice.ranked("marlin", 4, (9, 0), 33, 1) == ("b",)
    finally:
        monkeypatch.undo()  # else the tests after this one would have that table
        choice.forget()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("capability", "most"), [((8, 0), 512), ((8, 9), 512), ((10, 0), 128), ((10, 3), 128), ((12, 1), 512)]
)
def test_strips_without_wgmma_are_dequantized_from_some_number_of_tokens_on(
    bits: int, capability: tuple[int, int], most: int
) -> None:
    first = {M: choice.ranked("strips", bits, capability, 1 << 25, M)[0] for M in (1, 24, 49, most, most + 1)}

    assert list(first.values()) == ["decode", "decode", "mma", "mma", "large"]
