"""Codes and matrices have no long run of one byte.

A download that was cut and resumed leaves zeros where nothing was written. Zero rows at the end of a matrix
are sound, as are single ones: vocabularies and layers are padded with them, and outputs can be dead.
"""

from collections.abc import Iterator
from math import prod

from qload.verify.kin import block, is_matrix
from qload.verify.report import Finding
from qload.verify.rules.padding import means_zero, pads_inputs
from qload.verify.rules.rule import Rule
from qload.verify.subject import Subject
from qload.verify.values import Run

LEAST = 512  # bytes; sound codes have runs of 12 at most, and damaged ones of 4,096
DEAD = 4  # rows in one place that may be zero by themselves
SHARE = 0.25  # of the rows, that padding does not exceed


def check(rule: Rule, subject: Subject) -> Iterator[Finding]:
    """Each tensor with a run that no row of zeros explains: where, and how long."""
    assert subject.weights is not None
    for name in subject.names:
        contents = subject.values.contents[name]
        if contents.word is not None or not contents.runs:
            continue
        width = _width(subject, name)
        if width and pads_inputs(subject, name, contents.runs):
            continue
        for run in contents.runs if width else ():
            if run.length >= LEAST and not _padding(subject, name, run, width, contents.nbytes):
                yield rule.finding(
                    name,
                    subject.weights.info(name).file,
                    f"{name}: {run.length} bytes of 0x{run.byte:02x} from byte {run.first} on, of "
                    f"{contents.nbytes}: nothing was written there",
                    "fetch or write the file again",
                )
                break


def _width(subject: Subject, name: str) -> int:
    """The bytes of a row of a matrix; 0 where a tensor may have such runs lawfully."""
    assert subject.weights is not None
    info, spec = subject.weights.info(name), subject.specs.get(name)
    layer = subject.layer_of(name)
    if spec is not None and layer is not None and not layer.format.weight_type.plain:
        if not subject.holds_codes(name):
            return 0
        if info.shape[-1] == 1:  # bytes that lie flat over the matrix
            return max(1, info.nbytes // max(1, layer.N))
    elif name not in subject.values.numbers or len(info.shape) < 2 or not is_matrix(name):
        return 0
    rows = prod(info.shape[:-1]) if len(info.shape) < 4 else prod(info.shape[:2])
    return info.nbytes // max(1, rows)


def _padding(subject: Subject, name: str, run: Run, width: int, nbytes: int) -> bool:
    """Whole rows that mean zero: a few, or those at the end, or anywhere in a vocabulary."""
    stop = run.first + run.length
    first, last = -(-run.first // width), stop // width
    rows = last - first
    # Beside a row of zeros the neighbours may begin, or end, with zeros too.
    whole = first * width - run.first < LEAST // 8 and stop - last * width < LEAST // 8
    if not whole or rows * width > SHARE * nbytes:
        return False
    if rows > DEAD and last * width != nbytes and block(name) is not None:
        return False
    if subject.holds_codes(name):
        return means_zero(subject, name, first * width, rows * width)
    return run.byte == 0


RULE = Rule("hole", "values", check, each=True)
