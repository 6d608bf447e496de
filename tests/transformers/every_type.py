"""All generated tables against transformers' own models: only `nox -s tables` collects this file."""

from pathlib import Path

import pytest

from tests.transformers.tables import GENERATED, assert_explained


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", GENERATED)
def test_a_generated_table_explains_what_transformers_writes(kind: str, seed: int, tmp_path: Path) -> None:
    assert_explained(kind, seed, tmp_path)
