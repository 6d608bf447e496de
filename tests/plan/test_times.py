"""Predicted times: what was timed, on the line between, and nothing beyond."""

import io
import re
from pathlib import Path

import pytest
import torch
from rich.console import Console

from qload import MemoryStorage, Weights, explain, loader_from_config
from qload.cli.layer_tables import explanation_tables
from qload.pictures import explanation_page
from qload.plan.kernels import BASIS, TIMED_MICROSECONDS, TIMED_TOKENS, interpolate, predict_seconds

pytestmark = pytest.mark.usefixtures("seen_texts")

DOCS = Path(__file__).parents[2] / "docs" / "lab" / "decode.md"
SQUARE = 8192 * 8192 // 2  # bytes of 4 bits


MIDDLE = 0x77777777  # eight zero points of 8, stored minus one


def lines(found):
    """The tables of an explanation in lines of up to 200 columns."""
    console = Console(width=200, file=io.StringIO(), color_system=None)
    console.print(*explanation_tables(found, every=True), sep="\n")
    return console.file.getvalue().splitlines()


def explained_mxfp4():
    """A layer of MXFP4 with the size, bits, layout and kernel of timed ones, and another group size."""
    stored = {
        "up.weight_packed": torch.zeros(4096, 2048, dtype=torch.uint8),
        "up.weight_scale": torch.full((4096, 128), 127, dtype=torch.uint8),
    }
    weights = Weights(MemoryStorage(stored), loader=loader_from_config({"quant_method": "mxfp4"}))
    return explain(weights, arch="sm90", dtype=torch.float16, tokens=[1])


def explained(arch: str, tokens: list[int], *, group: int = 128, zeros: int = MIDDLE):
    """A layer of GPTQ, 4096 x 4096."""
    size = 4096
    tensors = {
        "up.qweight": torch.zeros(size // 8, size, dtype=torch.int32),
        "up.qzeros": torch.full((size // group, size // 8), zeros, dtype=torch.int32),
        "up.scales": torch.ones(size // group, size).half(),
    }
    config = {"quant_method": "gptq", "bits": 4, "group_size": group}
    weights = Weights(MemoryStorage(tensors), loader=loader_from_config(config))
    return explain(weights, arch=arch, dtype=torch.float16, tokens=tokens)


@pytest.mark.parametrize("key", TIMED_MICROSECONDS, ids=str)
def test_times_are_those_of_the_page(key):
    """Of each layer the line of its table, whose title says the bits."""
    _, layout, bits = key
    part = DOCS.read_text().split(f"| {layout}, {bits} bits |")[1].split("\n\n")[0]
    head = [each.strip() for each in part.split("\n")[0].split("|")]
    columns = [head.index(f"M = {tokens}") for tokens in TIMED_TOKENS]
    for (K, N), times in TIMED_MICROSECONDS[key]:
        cells = part.split(f"| {K} x {N} |")[1].split("\n")[0].split("|")
        assert tuple(float(cells[at].split()[0]) for at in columns) == times


@pytest.mark.parametrize("key", TIMED_MICROSECONDS, ids=str)
def test_what_was_timed_is_told_as_it_was(key):
    kernel, layout, bits = key
    for (K, N), times in TIMED_MICROSECONDS[key]:
        told = [
            predict_seconds(kernel, layout, bits, (9, 0), K * N * bits // 8, each) for each in TIMED_TOKENS
        ]
        assert told == [time * 1e-6 for time in times]


def test_sizes_are_in_order():
    for rows in TIMED_MICROSECONDS.values():
        sizes = [K * N for (K, N), _ in rows]
        assert sizes == sorted(set(sizes))


def test_on_the_line_between_two():
    told = [interpolate(at, (1, 2, 6), (5.0, 7.0, 27.0)) for at in range(8)]

    assert told == [None, 5.0, 7.0, 12.0, 17.0, 22.0, 27.0, None]


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param(("many", "strips", 4, (9, 0), SQUARE, 1), id="another kernel"),
        pytest.param(("decode", "marlin", 4, (9, 0), SQUARE, 1), id="another layout"),
        pytest.param(("decode", "strips", 4, (8, 0), SQUARE, 1), id="another chip"),
        pytest.param(("decode", "strips", 4, (9, 0), SQUARE, 17), id="more tokens"),
        pytest.param(("decode", "strips", 4, (9, 0), 1 << 20, 1), id="a smaller layer"),
        pytest.param(("decode", "strips", 4, (9, 0), 1 << 30, 1), id="a larger layer"),
    ],
)
def test_what_was_not_timed_is_not_told(asked):
    assert predict_seconds(*asked) is None


def test_an_explanation_has_the_time_of_the_kernel_that_runs():
    found = explained("sm90", [1, 64])
    (layer,) = found.layers

    assert [choice.kernel for choice in layer.choices] == ["decode", "many"]
    assert [choice.seconds for choice in layer.choices] == [4.70 * 1e-6, None]
    printed = "\n".join(lines(found))
    assert f"1 token: decode, predicted 4.7 us ({BASIS})" in printed
    assert "64 tokens: many, not measured" in printed
    assert f'"decode, predicted 4.7 us ({BASIS})"' in explanation_page(found)
    assert '"many, not measured"' in explanation_page(found)
    assert [choice.basis for choice in layer.choices] == [BASIS, ""]


def test_times_of_one_format_predict_none_of_another():
    (choice,) = explained_mxfp4().layers[0].choices

    assert (choice.kernel, choice.seconds, choice.basis) == ("decode", None, "")


def test_a_row_has_a_prediction_with_its_basis_or_was_not_measured():
    """And no note says so of rows in general."""
    found = explained("sm90", [1, 8, 16, 17, 64, 1024])
    printed = lines(found)
    rows = [line for line in printed if re.match(r"    \d+ tokens?: ", line)]

    assert ["predicted" in row and f"us ({BASIS})" in row for row in rows] == [True] * 3 + [False] * 3
    assert ["not measured" in row for row in rows] == [False] * 3 + [True] * 3
    assert not [line for line in printed if line not in rows and re.search("measured|predict", line)]


@pytest.mark.parametrize(
    "other",
    [
        pytest.param({"arch": "sm80"}, id="another chip"),
        pytest.param({"group": 64}, id="smaller groups"),
        pytest.param({"zeros": 0x66666666}, id="zero points"),
    ],
)
def test_what_was_timed_otherwise_has_no_time(other):
    (layer,) = explained(**{"arch": "sm90", "tokens": [1], **other}).layers

    assert layer.choices[0].seconds is None
