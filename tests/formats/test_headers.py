"""What each format makes of a layer's headers: its own config, sizes and notes, or the refusal.

From one sound layer of each format on one thing is changed at a time: each side of each tensor, its dtype,
the tensors that are there, facts, and what the config claims.
"""

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from syrupy.assertion import SnapshotAssertion

from qload.errors import QloadError
from qload.spec import Config, FieldNames, LayerHeaders
from tests.formats.sound_headers import SOUND, Shapes, Sound


def outcome(sound: Sound, config: Config, shapes: Shapes, facts: Any, **dtypes: torch.dtype) -> str:
    """What a layer of these headers is, or the error."""
    usual = {spec.name: spec.dtypes[0] for spec in sound.kind.tensors(config)}
    seen = LayerHeaders(
        shapes,
        {name: dtypes.get(name, usual.get(name, torch.float32)) for name in shapes},
        {name: fact for name, fact in facts.items() if name in shapes},
        FieldNames("a"),
    )
    try:
        own = config.for_layer(seen)
        sizes = seen.sizes(sound.kind.tensors(own), own.known())
        changed = [f.name for f in fields(own) if getattr(own, f.name) != getattr(config, f.name)]
        said = ", ".join(f"{name}={getattr(own, name)}" for name in changed)
        return f"{said} {sizes} {own.notes(seen) or ''}"
    except QloadError as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())}"


def told(sound: Sound) -> Iterator[str]:
    config, shapes, facts = sound.config, sound.shapes, sound.facts
    yield outcome(sound, config, shapes, facts)
    for claim in sound.claims:
        yield f"{claim}: {outcome(sound, replace(config, **claim), shapes, facts)}"
    for other in sound.other_facts:
        shown = {name: fact.tolist()[:4] for name, fact in other.items()}
        yield f"{shown}: {outcome(sound, config, shapes, {**facts, **other})}"
    for others in sound.other_shapes:
        yield f"{others}: {outcome(sound, config, others, facts)}"
    for name, shape in shapes.items():
        facts_left = {key: fact for key, fact in facts.items() if key != name}
        dtype = outcome(sound, config, shapes, facts, **{name: torch.complex64})
        yield f"{name} of complex numbers: {dtype}"
        for sides in (
            (*shape, 1),
            *((*shape[:at], shape[at] + 1, *shape[at + 1 :]) for at in range(len(shape))),
        ):
            yield f"{name} {sides}: {outcome(sound, config, {**shapes, name: sides}, facts_left)}"


@pytest.mark.parametrize("name", SOUND)
def test_what_a_layer_of_these_headers_is(name: str, golden: SnapshotAssertion) -> None:
    assert "\n".join(told(SOUND[name])) == golden
