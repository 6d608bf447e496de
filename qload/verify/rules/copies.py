"""No layer's codes, or matrix, are another's.

A layer that was written over another, or an `up_proj` that is the `gate_proj`, has the right shape and
valid values. Models that are made of another's layers repeat whole layers, one after the other; that is
noted and no finding.
"""

import re
from collections.abc import Callable, Iterator, Mapping

import torch

from qload.verify.kin import UNLIKE, block, is_matrix
from qload.verify.report import Finding
from qload.verify.rules.rule import Rule
from qload.verify.subject import Subject
from qload.verify.values.pieces import pieces

LEAST = 256  # bytes that are not alike by accident
MERGED = 2  # layers, or experts, that are whole copies, from which on the model was made so
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


def _copies(subject: Subject) -> Mapping[str, str]:
    """name -> the first tensor with the same digest, dtype and shape."""
    assert subject.weights is not None
    found: dict[object, str] = {}
    copies = {}
    for name in subject.names:
        contents = subject.values.contents[name]
        if contents.nbytes < LEAST or contents.word is not None or not _is_own(subject, name):
            continue
        info = subject.weights.info(name)
        first = found.setdefault((contents.digest, info.dtype, info.shape), name)
        if first != name:
            copies[name] = first
    return copies


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
    """The layers and experts all of whose matrices are one other's, where there are several such.

    A model may also share a part of each of several layers.
    """
    layers = _whole(subject, copies, block)
    experts = _whole(subject, {name: of for name, of in copies.items() if block(name) == block(of)}, _expert)
    sharing = {block(name) for name, of in copies.items() if block(name) != block(of)}
    told = ((layers, MERGED), (experts, MERGED), (sharing, SHARING))
    return {unit for units, least in told if len(units) >= least for unit in units}


def _whole(subject: Subject, copies: Mapping[str, str], unit: Callable[[str], str | None]) -> set[str | None]:
    """The units all of whose matrices are those of one other."""
    own: dict[str | None, list[str]] = {}
    for name in subject.names:
        if unit(name) is not None and _is_own(subject, name):
            own.setdefault(unit(name), []).append(name)
    return {
        here
        for here, names in own.items()
        if len(names) > 1
        and all(name in copies for name in names)
        and len({unit(copies[name]) for name in names}) == 1
        and unit(copies[names[0]]) != here
    }


def _expert(name: str) -> str | None:
    """The expert that a tensor belongs to; None where it is of none."""
    found = EXPERT.match(name)
    return found[1] if found else None


RULE = Rule("copied-layer", "values", check)
