"""Tests of the CUDA module, where it is built."""

import pytest

from qload.kernels import cuda


@pytest.fixture(autouse=True, scope="module")
def _built() -> None:
    reason = cuda.why_not()
    if reason:
        pytest.skip(reason)
