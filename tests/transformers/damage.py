"""Trials and damage of types of several kinds: only `nox -s transformers` collects this file."""

from dataclasses import asdict
from pathlib import Path

import pytest

from tests.model_damage.page import read_outcomes
from tests.model_damage.trial import model_types, try_type

# Inputs first, experts in one tensor, experts without a gate and layers without attention.
KINDS = ("gpt2", "granitemoe", "nemotron_h")
MIN_KINDS, MAX_SECONDS = 10, 1.0


@pytest.mark.parametrize("kind", KINDS)
def test_a_type_has_the_outcome_of_the_page(kind: str, tmp_path: Path) -> None:
    outcome = asdict(try_type(kind, tmp_path))
    stored = read_outcomes()["types"][kind]

    assert outcome["seconds"] < MAX_SECONDS
    assert {error for error in outcome["formats"].values() if error} == set()
    assert outcome["silent"] == []
    assert len(outcome["alone"]) >= MIN_KINDS
    for key in ("formats", "alone", "against"):
        assert outcome[key] == stored[key]


def test_the_page_has_every_type() -> None:
    assert read_outcomes()["types"].keys() == model_types().keys()
