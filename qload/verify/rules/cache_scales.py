"""Scales of the key/value cache are floats, of the whole cache or of its heads, finite and positive.

No layer of the checkpoint depends on them, so that nothing else compares them with anything; an engine that
reads one quantizes every key or value by it. A zero point or bias of the cache only has to be finite.
"""

from collections.abc import Iterator
from math import prod

import torch

from qload.formats.unquantized import FLOATS
from qload.storage import TensorInfo
from qload.verify.report import Finding
from qload.verify.rules.rule import Rule
from qload.verify.subject import Subject
from qload.weights.exemptions import cache_scale, cache_zero

MOST = 1 << 16  # no attention has more heads times inputs of a head


def check(rule: Rule, subject: Subject) -> Iterator[Finding]:
    """Each of another shape or dtype, or with a value that nothing can be divided by."""
    assert subject.weights is not None
    storage, heads = subject.weights.storage, _heads(subject)
    for name in subject.account.report.exempted:
        is_scale = cache_scale(name)
        if not is_scale and not cache_zero(name):
            continue
        info = storage.info(name)
        wrong = _shape(info, heads) if is_scale else _zero(info)
        if wrong is None:
            values = storage.read(name).double().flatten()
            bad = ~torch.isfinite(values) | (values <= 0) if is_scale else ~torch.isfinite(values)
            if bool(bad.any()):
                at = int(bad.nonzero()[0, 0])
                expected = "a finite number above 0" if is_scale else "a finite number"
                wrong = f"{float(values[at]):g} at {at}, it has to be {expected}; {int(bad.sum())} in all"
        if wrong is not None:
            yield rule.finding(name, info.file, f"{name}: {wrong}")


def _shape(info: TensorInfo, heads: frozenset[int]) -> str | None:
    """What is wrong with the header of a scale."""
    if info.dtype not in FLOATS:
        return f"a scale of dtype {str(info.dtype).removeprefix('torch.')}"
    entries, along = prod(info.shape), [size for size in info.shape if size != 1]
    if entries != 1 and (len(along) != 1 or entries > MOST or (heads and entries not in heads)):
        counts = f", of {' or '.join(map(str, sorted(heads)))} heads" if heads else ""
        return f"shape {info.shape}, it has to be one scale, or one a head{counts}"
    return None


def _zero(info: TensorInfo) -> str | None:
    """What is wrong with the header of a zero point or bias, which may be one for each input of a head."""
    if sum(size != 1 for size in info.shape) > 2 or prod(info.shape) > MOST:
        return f"shape {info.shape}, it has to be one value, one a head, or one for each input of a head"
    return None


def _heads(subject: Subject) -> frozenset[int]:
    """The heads of keys, and of queries, as the model's config counts them."""
    keys = ("num_key_value_heads", "num_attention_heads")
    return frozenset(count for key in keys for count in subject.counted(key) if count > 0)


RULE = Rule("cache-scale", "values", check)
