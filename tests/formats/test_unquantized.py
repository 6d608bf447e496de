"""Plain weights: matrices, and the vectors of norms."""

import pytest
import torch

from qload.detect import DefaultWeightsLoader
from qload.errors import ArgumentError, CutError, DivideError, DtypeError, UnsupportedFormatError
from qload.formats import UnquantizedWeight
from qload.parallel import ALONE, Rank
from qload.storage import MemoryStorage
from qload.weights import Weights

pytestmark = pytest.mark.usefixtures("seen_texts")


def weights(tensor: torch.Tensor, rank: Rank = ALONE) -> Weights:
    return Weights(MemoryStorage({"a.weight": tensor}), loader=DefaultWeightsLoader(), process_group=rank)


def test_a_matrix_means_itself() -> None:
    weight = weights(torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.bfloat16)).get_weights("a")

    assert isinstance(weight, UnquantizedWeight)
    assert weight.shape == (2, 3)
    assert weight.dequantize().tolist() == [[1, 2, 3], [4, 5, 6]]
    assert weight.weight.dtype == torch.bfloat16


def test_a_vector_has_no_inputs() -> None:
    weight = weights(torch.tensor([1.0, 2.0])).get_weights("a")

    assert weight.shape == (2,)
    assert weight.dequantize().tolist() == [1, 2]


def test_a_vector_is_cut_along_its_outputs_only() -> None:
    vector = torch.arange(4.0)

    assert weights(vector, Rank(1, 2)).get_weights_col("a").dequantize().tolist() == [2, 3]
    with pytest.raises((CutError, DivideError), match="K = 1"):
        weights(vector, Rank(1, 2)).get_weights_row("a")


def test_a_vector_is_no_linear() -> None:
    with pytest.raises(ArgumentError, match=r"expected a matrix \(N, K\)"):
        UnquantizedWeight(weight=torch.ones(3)).get_linear()


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn, torch.bool])
def test_quantized_bytes_are_never_read_as_plain(dtype: torch.dtype) -> None:
    with pytest.raises(DtypeError, match=r"a\.weight: wrong dtype"):
        weights(torch.zeros(4, 4).to(dtype)).get_weights("a")


def test_a_stack_of_matrices_is_no_layer() -> None:
    with pytest.raises(UnsupportedFormatError, match=r"a\.weight has the shape \[2, 4, 4\]"):
        weights(torch.zeros(2, 4, 4)).get_weights("a")


def test_a_plain_weight_has_no_codes() -> None:
    with pytest.raises(UnsupportedFormatError, match="no codes"):
        UnquantizedWeight(weight=torch.ones(2, 2)).codes()
