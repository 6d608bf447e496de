"""Both ways in which files are read here."""

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", params=["positioned reads", "seek and read"], autouse=True)
def reading(request: pytest.FixtureRequest) -> Iterator[None]:
    """All that is asked of storages here holds too on a system without positioned reads."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "seek and read":
            patch.delattr(os, "preadv", raising=False)
            patch.delattr(os, "pread", raising=False)
        yield
