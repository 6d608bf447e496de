"""No layer's codes, or matrix, are another's.

A matrix that was written over another, or an `up_proj` that is the `gate_proj`, has the right shape and
valid values. Models that are made of another's layers repeat whole layers, with their norms and all; that is
noted and no finding.
"""

import re
from collections.abc import Callable, Iterator, Mapping

import torch

from qload.verify.kin import UNLIKE, block, is_matrix
from qload.verify.report import Finding
from qload.verify.rules.expanded import expanded
from qload.verify.rules.rule import Rule
from qload.verify.subject import Subject
from qload.verify.values.pieces import pieces

LEAST = 256  # bytes that are not alike by accident
MERGED = 2  # layers, or experts, whose matrices are copies, from which on the model was made so
SHARING = 4  # layers that have some of their matrices of other layers, from which on they share them
EXPERT = re.compile(r"(.*\.experts\.\d+)\.")


def check(rule: Rule, subject: Subject) -> Iterator[Finding]:
    """Each tensor that is an earlier one's copy."""
    assert subject.weights is not None
    copies = {name: of for name, of in _copies(subject).items() if _same(subject, name, of)}
    merged = _merged(subject, copies)
    for name, of in copies.items():
        if merged.isdisjoint((block(name), _expert(name))):
            yield rule.finding(
                name,
                subject.weights.info(name).file,
                f"{name}: equal to {of}, byte for byte",
                "write the checkpoint again: one of the two is another layer's",
            )


def repeated_layers(subject: Subject) -> Mapping[str, str]:
    """layer -> the earlier layer that all its tensors are equal to, but for outputs that are all zero."""
    return _twins(subject, _whole(subject, _copies(subject), block))


def _copies(subject: Subject) -> Mapping[str, str]:
    """name -> the first tensor with the same digest, dtype and shape."""
    assert subject.weights is not None
    found: dict[object, str] = {}
    copies = {}
    for name in subject.judged:
        contents = subject.values.contents[name]
        if contents.nbytes < LEAST or contents.word is not None or not _is_own(subject, name):
            continue
        first = found.setdefault(_told(subject, name), name)
        if first != name:
            copies[name] = first
    return copies


def _told(subject: Subject, name: str) -> object:
    """What equal tensors have in common."""
    assert subject.weights is not None
    info = subject.weights.info(name)
    return subject.values.contents[name].digest, info.dtype, info.shape


def _is_own(subject: Subject, name: str) -> bool:
    """Whether a tensor is a layer's codes or matrix, which nothing else lawfully equals."""
    assert subject.weights is not None
    if block(name) is None or UNLIKE.search(name):
        return False
    if subject.holds_codes(name):
        return True
    numbers, shape = subject.values.numbers.get(name), subject.weights.info(name).shape
    if numbers is None or not is_matrix(name) or len(shape) < 2:
        return False
    return numbers.quantiles[0] < numbers.quantiles[2]


def _same(subject: Subject, name: str, other: str) -> bool:
    """Equal digests are of sums: the bytes decide."""
    assert subject.weights is not None
    storage = subject.weights.storage
    both = zip(pieces(storage, name), pieces(storage, other), strict=True)
    return all(one.view(torch.uint8).equal(two.view(torch.uint8)) for one, two in both)


def _merged(subject: Subject, copies: Mapping[str, str]) -> set[str | None]:
    """The layers and experts that the model was made with.

    Of several all matrices are one other's; of a layer alone, everything is. A model may also share a part of
    each of several layers.
    """
    if not copies:
        return set()
    layers = _whole(subject, copies, block)
    within = {name: of for name, of in copies.items() if block(name) == block(of)}
    sharing = {block(name) for name, of in copies.items() if block(name) != block(of)}
    told = ((layers, MERGED), (_whole(subject, within, _expert), MERGED), (sharing, SHARING))
    merged = {unit for units, least in told if len(units) >= least for unit in units}
    return merged | _twins(subject, layers).keys()


def _whole(
    subject: Subject, copies: Mapping[str, str], unit: Callable[[str], str | None]
) -> Mapping[str, str]:
    """The units all of whose matrices are those of one other -> that one; outputs that are zero aside."""
    if not copies:
        return {}
    zeros, own = expanded(subject), dict[str, list[str]]()
    for name in subject.judged:
        here = unit(name)
        if here is not None and subject.prefixes[name] not in zeros and _is_own(subject, name):
            own.setdefault(here, []).append(name)
    found = {}
    for here, names in own.items():
        there = {unit(copies[name]) if name in copies else here for name in names}
        other = there.pop()
        if len(names) > 1 and not there and other not in (None, here):
            found[here] = other
    return found


def _twins(subject: Subject, layers: Mapping[str, str]) -> Mapping[str, str]:
    """The layers that have nothing of their own, norms and scales included, but outputs that are zero."""
    zeros = expanded(subject) if layers else frozenset()
    under: dict[str, list[str]] = {}
    for name in subject.judged if layers else ():
        here = block(name)
        if here is not None and subject.prefixes[name] not in zeros:
            under.setdefault(here, []).append(name)

    def is_twin(here: str, there: str) -> bool:
        others = {name: there + name.removeprefix(here) for name in under[here]}
        known = set(under.get(there, ()))
        return all(
            other in known and _told(subject, name) == _told(subject, other) for name, other in others.items()
        )

    return {here: there for here, there in layers.items() if is_twin(here, there)}


def _expert(name: str) -> str | None:
    """The expert that a tensor belongs to; None where it is of none."""
    found = EXPERT.match(name)
    return found[1] if found else None


RULE = Rule("copied-layer", "values", check)
