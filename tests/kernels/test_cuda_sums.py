"""Sums of the vendor's products."""

import pytest
import torch

from qload.errors import ArgumentError
from qload.kernels.cuda.sums import NARROW, REDUCED, in_float32


@in_float32()
def refuse() -> None:
    raise ArgumentError("x", "a sum", "none")


FLAGS = torch.backends.cuda.matmul
NAMES = (*REDUCED, NARROW)


@pytest.mark.parametrize("was", [True, False])
def test_no_sum_is_narrow_and_settings_come_back(was: bool) -> None:
    before = {name: getattr(FLAGS, name) for name in NAMES}
    try:
        for name in NAMES:
            setattr(FLAGS, name, was)
        with in_float32():
            assert not any(getattr(FLAGS, name) for name in NAMES)
        with pytest.raises(ArgumentError):
            refuse()

        assert [getattr(FLAGS, name) for name in NAMES] == [was] * len(NAMES)
    finally:
        for name, value in before.items():
            setattr(FLAGS, name, value)


def test_whether_k_may_be_split_is_left_alone() -> None:
    name = REDUCED[0]
    if not hasattr(FLAGS, f"{name}_split_k"):
        pytest.skip("this torch has no such setting")
    try:
        setattr(FLAGS, name, (False, False))
        with in_float32():
            assert not getattr(FLAGS, f"{name}_split_k")
        assert (getattr(FLAGS, name), getattr(FLAGS, f"{name}_split_k")) == (False, False)
    finally:
        setattr(FLAGS, name, (True, True))
