"""Tests of the CUDA module, where it is built."""

import warnings

import pytest
import torch

from qload.kernels import cuda

if torch.cuda.is_available():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some of its modules warn of others as they are imported
        import torch._inductor.compile_fx  # as the first test that compiles would


@pytest.fixture(autouse=True, scope="module")
def _built() -> None:
    reason = cuda.why_not()
    if reason:
        pytest.skip(reason)
