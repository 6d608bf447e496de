"""Snapshots of tensors say where two differ."""

import pytest
import torch

from qload.testing.snapshots import TensorSnapshot, by_content, changes


def test_an_element_that_moved_is_named_by_its_row_and_column() -> None:
    before = torch.arange(48).reshape(6, 8)
    after = before.clone()
    after[4, 5] = -1

    assert [*changes(by_content(before), by_content(after))] == [
        "tensor 0, torch.int64 (6, 8): moved in rows 4, columns 5"
    ]


def test_of_large_tensors_bands_are_named() -> None:
    before = torch.zeros(256, 640)
    after = before.clone()
    after[9, 100], after[200, 639] = 1, 1

    (line,) = changes(by_content(before), by_content(after))

    assert line.endswith("moved in rows 8 to 203, columns 100 to 639")


@pytest.mark.parametrize(
    ("after", "says"),
    [
        (torch.zeros(2, 3), "tensor 0: was torch.float32 (2, 2), is torch.float32 (2, 3)"),
        (torch.zeros(2, 2).half(), "tensor 0: was torch.float32 (2, 2), is torch.float16 (2, 2)"),
    ],
)
def test_another_shape_or_dtype_is_said(after: torch.Tensor, says: str) -> None:
    assert [*changes(by_content(torch.zeros(2, 2)), by_content(after))] == [says]


def test_what_is_the_same_has_the_same_text_and_no_line() -> None:
    one, view = torch.arange(6.0).reshape(2, 3), torch.arange(6.0).reshape(3, 2).T.contiguous().T.T

    assert by_content(one) == by_content(one.clone())
    assert by_content(one.T) == by_content(one.T.contiguous())
    assert by_content(one) != by_content(view)
    assert [*changes(by_content(one), by_content(one))] == []


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_signs_of_zeros_and_bits_of_nan_count(value: float) -> None:
    assert by_content(torch.tensor(value)) != by_content(-torch.tensor(value))


def test_nested_tensors_are_stored_by_content_and_the_first_line_of_a_difference_says_which() -> None:
    extension = TensorSnapshot()
    before = extension.serialize({"words": [torch.tensor([[1, 2]])], "note": "as it is"})
    after = extension.serialize({"words": [torch.tensor([[1, 3]])], "note": "as it is"})

    assert "as it is" in before
    assert "begins 1 2\n" in before
    assert next(extension.diff_lines(after, before)).endswith("moved in rows 0, columns 1")
