"""Codes and matrices have no long run of one byte.

A download that was cut and resumed leaves zeros where nothing was written: from one page, or chunk, of the
file to another, and so from within a row to within a row. Whole rows of zeros are sound, as many as there
may be, but for half of a matrix: vocabularies and layers are padded and pruned. So are zeros at the same
place in several rows.
"""

from collections.abc import Iterator
from math import prod

from qload.verify.kin import is_matrix
from qload.verify.report import Finding
from qload.verify.rules.padding import means_zero, mixes_widths, striped
from qload.verify.rules.rule import Rule
from qload.verify.subject import Subject
from qload.verify.values import Run

LEAST = 512  # bytes; sound codes have runs of 12 at most, and damaged ones of 4,096
BESIDE = 64  # bytes beyond whole rows
LARGEST = 2  # the part of a matrix in one place, a half, that padding to any power of two is less than


def check(rule: Rule, subject: Subject) -> Iterator[Finding]:
    """Each tensor with a run that no rows of zeros explain: where, and how long."""
    assert subject.weights is not None
    for name in subject.judged:
        contents = subject.values.contents[name]
        if contents.word is not None or not contents.runs:
            continue
        width = _width(subject, name)
        long = [run for run in contents.runs if run.length >= LEAST] if width else []
        stripes = striped(subject, name, long, width) if long else frozenset()
        for run in long:
            if run not in stripes and not _dead_rows(subject, name, run, width, contents.nbytes):
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


def _dead_rows(subject: Subject, name: str, run: Run, width: int, nbytes: int) -> bool:
    """Whole rows that mean zero, and are not half of all: a hole begins and ends where it likes."""
    layer, stop = subject.layer_of(name), run.first + run.length
    if layer is not None and mixes_widths(layer):
        return means_zero(subject, name, 0, nbytes)
    first, last = -(-run.first // width), stop // width
    # Beside a row of zeros the neighbours may begin, or end, with zeros too.
    whole = first * width - run.first < BESIDE and stop - last * width < BESIDE
    rows = last - first
    if not whole or rows < 1 or rows * width * LARGEST >= nbytes:
        return False
    if subject.holds_codes(name):
        return means_zero(subject, name, first * width, rows * width)
    return run.byte == 0


RULE = Rule("hole", "values", check, each=True)
