"""Fixture for both ways of file access."""

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", params=["positioned reads", "seek and read"], autouse=True)
def reading(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run a test with and without positioned reads of the system."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "seek and read":
            patch.delattr(os, "preadv", raising=False)
            patch.delattr(os, "pread", raising=False)
        yield
