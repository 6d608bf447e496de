"""Every model of a foreign folder in every format: it means the same there, or all of it is refused."""

from pathlib import Path

import pytest

from qload import convert
from qload.conversion.targets import FLOATS, TARGETS
from qload.errors import ArgumentError
from tests.cases.test_cases import FOLDER
from tests.cases.test_models import every_model, published, refused

pytestmark = pytest.mark.skipif(not FOLDER, reason="QLOAD_CASES names no folder of cases")


@every_model
def test_what_is_written_means_the_same(folder: Path, tmp_path: Path) -> None:
    copy, target = published(folder, tmp_path / "model"), tmp_path / "out"

    for to in TARGETS:
        try:
            found = convert(copy, target / to, to=to, rounding=to in FLOATS)
        except ArgumentError:
            assert folder.name.startswith("plain")
            continue
        assert (found.verdict == "unsupported") == (refused(folder) is not None)
        assert {layer.outcome for layer in found.layers} <= (
            {"bits", "rounded"} if found.verdict == "ok" else {"refused"}
        )
        assert (target / to).exists() == (found.verdict == "ok")
