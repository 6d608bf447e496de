"""A slice of the long run, `nox -s fuzz`."""

import os
import random
from pathlib import Path

import pytest

from tests.fuzz.folders import try_one


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no FIFOs")
@pytest.mark.parametrize("seed", range(8))
def test_broken_folders_raise_only_qloads_errors_and_verify_says_what_loading_says(
    seed: int, tmp_path: Path
) -> None:
    opened = [try_one(random.Random(seed * 50 + number), tmp_path / "folder") for number in range(50)]

    assert 0 < sum(opened) < len(opened)
