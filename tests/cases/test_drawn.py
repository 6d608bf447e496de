"""Nothing is found in 200 drawn models, nor in one of every type in every format."""

import os

import pytest
from hypothesis import given, settings

from qload.architecture.model_tables import TABLES
from tests.verify.test_drawn_models import DRAWN, FORMATS, check

pytestmark = pytest.mark.skipif(not os.environ.get("QLOAD_CASES"), reason="QLOAD_CASES names no folder")


@settings(max_examples=200, deadline=None)
@given(*DRAWN)
def test_drawn_models_are_clean(
    kind: str, form: str, layers: int, seed: int, cache: bool, consolidated: bool
) -> None:
    check(kind, form, layers, seed, cache, consolidated)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("kind", sorted(TABLES))
def test_a_model_of_each_type_is_clean_in_each_format(kind: str, form: str) -> None:
    check(kind, form, 2, 0, True, False)
