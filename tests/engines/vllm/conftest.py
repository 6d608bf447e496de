"""The plug-in's modules over a stand-in for vLLM."""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest


@pytest.fixture(scope="module")
def plugin() -> Iterator[Any]:
    """`config`, `kernel` and `methods` of the plug-in, and `vllm`, the modules that they import."""
    if getattr(find_spec("vllm"), "origin", None):
        pytest.skip("vLLM is installed: the session `vllm` tests the plug-in")
    from tests.engines.vllm.stand_in import installed

    with installed() as modules:
        yield modules
