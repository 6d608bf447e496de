"""Which kernel a call gets: the first of the table that takes it, by chip, size and number of tokens."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import pytest

from qload.errors import ArgumentError, NoKernelError
from qload.kernels.cuda import dispatch, exllama, marlin, strips, w8a8

ROWS = [
    ("marlin", 4, (8, 0), 1000, 16, ["small", "large"]),
    ("marlin", 4, (8, 0), 1000, 64, ["large", "small"]),
    ("marlin", 4, (9, 0), 1000, 16, ["tiny", "large"]),
    ("marlin", 4, (9, 0), 1000, 64, ["small"]),
    ("marlin", 4, (9, 0), 9000, 16, ["large"]),
]


@dataclass(frozen=True)
class LinearCall:
    tokens: int
    bytes: int = 500
    bits: int = 4
    kind: str = ""


@pytest.fixture(autouse=True)
def _table(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    rows: dict = {}
    for layout, bits, capability, size, tokens, kernels in ROWS:
        rows.setdefault((layout, "", bits, capability), []).append((size, tokens, tuple(kernels)))
    rows["marlin", "zero points", 4, (8, 0)] = [(1000, 16, ("large",))]
    monkeypatch.setattr(dispatch, "ROWS", rows)
    dispatch.ranked.cache_clear()
    yield
    dispatch.ranked.cache_clear()


@pytest.mark.parametrize(
    ("capability", "size", "tokens", "first"),
    [
        pytest.param((8, 0), 500, 16, "small", id="up to the tokens of a row"),
        pytest.param((8, 0), 500, 17, "large", id="from one more on the next row"),
        pytest.param((8, 0), 500, 65, "large", id="more tokens than any row: the last"),
        pytest.param((8, 6), 500, 1, "small", id="a chip without rows: the nearest older one's"),
        pytest.param((9, 0), 500, 1, "tiny", id="a chip's own rows"),
        pytest.param((12, 0), 1000, 1, "tiny", id="a newer chip: the newest known"),
        pytest.param((9, 0), 1001, 1, "large", id="a larger layer"),
        pytest.param((9, 0), 99999, 1, "large", id="larger than any row: the largest"),
    ],
)
def test_the_table_is_read(capability: tuple[int, int], size: int, tokens: int, first: str) -> None:
    assert dispatch.ranked("marlin", 4, capability, size, tokens)[0] == first


def test_layers_of_a_kind_have_rows_of_their_own_or_those_of_others() -> None:
    assert dispatch.ranked("marlin", 4, (8, 0), 500, 16, "zero points") == ("large",)
    assert dispatch.ranked("marlin", 4, (8, 0), 500, 16, "groups of 32") == ("small", "large")
    assert dispatch.ranked("marlin", 4, (9, 0), 500, 16, "zero points") == ("tiny", "large")


def test_a_width_of_which_a_kind_alone_was_timed_is_not_known() -> None:
    dispatch.ROWS["marlin", "zero points", 8, (9, 0)] = [(1000, 16, ("large",))]

    assert dispatch.known("marlin", 4, (9, 0))
    assert not dispatch.known("marlin", 8, (9, 0))
    assert dispatch.ranked("marlin", 8, (9, 0), 500, 16, "zero points") == ()


@pytest.mark.parametrize(
    ("group", "zeros", "kind"),
    [
        (32, False, "groups of 32"),
        (64, True, "groups of 64"),
        (127, False, "groups of 127"),
        (128, True, "zero points"),
        (128, False, ""),
        (4096, False, ""),
    ],
)
def test_small_groups_come_before_zero_points(group: int, zeros: bool, kind: str) -> None:
    assert dispatch.kind_of(group, zeros) == kind


def test_without_rows_kernels_come_as_they_are_listed() -> None:
    assert dispatch.ranked("marlin", 8, (9, 0), 1, 1) == ()
    assert dispatch.ranked("marlin", 4, (7, 5), 1, 1) == ()
    assert pick(LinearCall(1, bits=8)).name == "tiny"


def kernel(name: str, most: int) -> dispatch.CudaKernel:
    def why_not(call: LinearCall) -> str | None:
        return None if call.tokens <= most else f"takes {most} tokens, got {call.tokens}"

    return dispatch.CudaKernel(name, why_not, lambda call: call)


def pick(call: LinearCall, asked: str = "") -> dispatch.CudaKernel:
    kernels = [kernel("tiny", 4), kernel("small", 32), kernel("large", 100)]
    return dispatch.choose(kernels, call, layout="marlin", capability=(9, 0), asked=asked)


def test_a_kernel_that_refuses_leaves_the_call_to_the_next() -> None:
    assert pick(LinearCall(4)).name == "tiny"
    assert pick(LinearCall(5)).name == "large"


def test_a_kernel_can_be_asked_for_and_says_why_not() -> None:
    assert pick(LinearCall(1), "small").name == "small"
    with pytest.raises(NoKernelError, match="takes 4 tokens, got 5"):
        pick(LinearCall(5), "tiny")
    with pytest.raises(ArgumentError, match="tiny or small or large"):
        pick(LinearCall(1), "huge")


def test_where_all_refuse_every_reason_is_told() -> None:
    with pytest.raises(NoKernelError, match="takes 32 tokens, got 101") as caught:
        pick(LinearCall(101))

    assert set(caught.value.reasons) == {"tiny", "small", "large"}


def test_where_those_of_the_table_refuse_another_takes_the_call() -> None:
    assert pick(LinearCall(40)).name == "large"  # the row names "small" alone


@pytest.mark.parametrize("text", ["", "[{", '[{"layout": "marlin"}]', "[1]", "{}x"])
def test_a_damaged_table_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str) -> None:
    (tmp_path / dispatch.TABLE).write_text(text)
    monkeypatch.setattr(dispatch.resources, "files", lambda package: tmp_path)

    with pytest.raises(ArgumentError, match=dispatch.TABLE):
        dispatch._read()


def test_rows_of_newer_chips_are_not_known_to_older_ones() -> None:
    assert dispatch.known("marlin", 4, (8, 6))
    assert not dispatch.known("marlin", 4, (7, 5))
    assert not dispatch.known("marlin", 8, (9, 0))


def test_the_table_that_is_shipped_names_kernels_that_there_are() -> None:
    rows = json.loads(resources.files("qload.kernels.cuda").joinpath(dispatch.TABLE).read_text("utf-8"))
    layouts = {"exllama": exllama.KERNELS, "marlin": marlin.KERNELS, "strips": strips.KERNELS}
    known = {layout: {kernel.name for kernel in kernels} for layout, kernels in layouts.items()}
    known["strips"].add(w8a8.NAME)

    assert rows
    for row in rows:
        assert row["kernels"], row
        assert set(row["kernels"]) <= known[row["layout"]], row
