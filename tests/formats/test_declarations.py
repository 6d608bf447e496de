"""Every format's declaration of its tensors, held whole: names, dtypes, axes, and what values there are."""

from collections.abc import Iterator
from dataclasses import MISSING, fields, replace
from typing import Any

import pytest
import torch
from syrupy.assertion import SnapshotAssertion

from qload import formats
from qload.errors import ArgumentError
from qload.spec import Config, TensorSpec, Weight

WEIGHTS: list[type[Weight]] = sorted(
    (kind for kind in vars(formats).values() if isinstance(kind, type) and hasattr(kind, "example")),
    key=lambda kind: kind.__name__,
)
# Field of a config -> what it is changed to, where a format has a field of this name.
CHANGES: dict[str, tuple[Any, ...]] = {
    "bits": (2, 3, 4, 5, 8),
    "group_size": (-1, 32),
    "symmetric": (True, False),
    "act_order": (False,),
    "dense": (False, True),
    "groups_lie": ("positional", "anywhere"),
    "positional": (True,),
    "indexed": (True, False),
    "zero_point": (False,),
    "block": (None, (1, -1), (1, 8)),
    "static": (True,),
    "divide": (True,),
    "input_scale": (True, False),
    "per": ("tensor", "parts", "channel"),
    "K": (1, 128),
    "nested_blocksize": (256,),
    "scaled_inputs": (True, False),
    "fp8_inputs": (True,),
    "low_rank": (False,),
    "codebook": (True, False),
    "compressed": (True,),
    "axes": ("N", "N 1", "1 N"),
}


def configs(kind: type[Weight]) -> Iterator[Config | str]:
    """The examples of a format, and those that differ from the first in one field; or the refusal of one."""
    yield from (kind.example, *kind.further)
    for field in fields(kind.example):
        for value in CHANGES.get(field.name, ()):
            if getattr(kind.example, field.name) == value:
                continue
            try:
                yield replace(kind.example, **{field.name: value})
            except ArgumentError as error:
                yield " ".join(str(error).split())


def said(spec: TensorSpec) -> str:
    """A declaration, without what is as usual."""
    own = {field.name: getattr(spec, field.name) for field in fields(spec)}
    usual = {field.name: field.default for field in fields(spec) if field.default is not MISSING}
    own["holds"] = tuple(f"{value:.5g}" for value in spec.holds)  # which is the same on every machine
    return "  ".join(f"{name}={value!r}" for name, value in own.items() if usual.get(name, MISSING) != value)


@pytest.mark.parametrize("kind", WEIGHTS, ids=lambda kind: kind.__name__)
def test_what_a_format_declares(kind: type[Weight], golden: SnapshotAssertion) -> None:
    lines = []
    known: set[str] = set()
    for config in configs(kind):
        if isinstance(config, str):
            lines.append(config)
            continue
        lines.append(f"{config} {dict(config.known())}")
        own = [f"  {said(spec)}" for spec in kind.tensors(config)]
        lines += [line for line in own if line not in known] + [f"  {len(own)} tensors"]
        known.update(own)

    assert "\n".join(lines) == golden


# Fields that tell how a layer is stored or what its config claims: weights of equal configs stack and fuse.
MEANINGLESS: dict[type[Weight], dict[str, Any]] = {
    formats.GPTQWeight: {
        "desc_act": True, "indexed": False, "claimed_bits": 8, "evidence": "none", "asymmetric": True,
    },
    formats.AWQWeight: {"claimed_bits": 8},
    formats.Fp8Weight: {"axes": "1 N", "dtype": torch.float8_e4m3fn, "scale_bytes": True},
    formats.BNB4Weight: {"double_quant": True, "nested_blocksize": 256, "offset": 0.5, "N": 64},
    formats.CTPackWeight: {"shape": (8, 64)},
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [(kind, name, value) for kind, changed in MEANINGLESS.items() for name, value in changed.items()],
)
def test_configs_of_one_meaning_are_equal(kind: type[Weight], name: str, value: Any) -> None:
    changed = replace(kind.example, **{name: value})

    assert getattr(changed, name) != getattr(kind.example, name)
    assert changed == kind.example
