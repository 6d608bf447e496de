"""A kind of damage done to a copy of a model, and what `verify` says of it."""

import copy
from collections.abc import Callable
from pathlib import Path

from qload.verify import verify
from tests.verify.damage.model import Model

Plant = Callable[[Model], object]


def planted(sound: Model, plant: Plant) -> Model:
    """A damaged copy; DoesNotApplyError where there is nothing to damage."""
    model = copy.deepcopy(sound)
    plant(model)
    return model


def found_alone(model: Model, folder: Path) -> set[str]:
    """The rules that speak of a model without another beside it."""
    return {finding.rule for finding in verify(model.write(folder)).findings}


def found_against(model: Model, sound: Path, folder: Path) -> set[str]:
    """The rules that speak of a model beside the folder of a sound copy."""
    return {finding.rule for finding in verify(model.write(folder), against=sound).findings}
