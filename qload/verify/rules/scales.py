"""Scales are finite and not negative.

A NaN or infinite scale turns whole groups into NaN; a negative one mirrors them. Zero is lawful: it is
how a quantizer writes a group of zeros.
"""

from collections.abc import Iterator

import torch

from qload.formats import ROLES
from qload.spec import Role
from qload.verify.chunks import rows
from qload.verify.report import Finding
from qload.verify.rules.rule import Rule
from qload.verify.subject import Subject


def check(rule: Rule, subject: Subject) -> Iterator[Finding]:
    """NaN, infinite and negative scales, with the first place and the count of each kind."""
    assert subject.weights is not None
    storage = subject.weights.storage
    for name in subject.names:
        info, (prefix, _, suffix) = storage.info(name), name.rpartition(".")
        is_scale = ROLES.get(suffix) is Role.SCALE and subject.is_quantized(prefix)
        if not is_scale or not info.dtype.is_floating_point:
            continue
        counts = {"NaN": 0, "infinite": 0, "negative": 0}
        places: dict[str, tuple[tuple[int, ...], float]] = {}
        for start, run in rows(storage, name):
            wrong = {"NaN": run.isnan(), "infinite": run.isinf(), "negative": (run < 0) & ~run.isinf()}
            for kind, mask in wrong.items():
                found = int(mask.sum())
                counts[kind] += found
                if found and kind not in places:
                    first, *rest = torch.nonzero(mask)[0].tolist()
                    places[kind] = ((start + first, *rest), float(run[(first, *rest)]))
        for kind, (place, value) in places.items():
            yield rule.finding(
                name, info.file, f"{name}: {kind} scale {value:g} at {place}; {counts[kind]} in all"
            )


RULE = Rule("scale-value", "values", check)
