"""No block of bytes of a layer's codes, or of its matrix, is stored twice.

A download that resumed at the wrong place writes bytes again that were there. In codes 256 equal bytes do not
come twice by chance; in a vocabulary they do, where tokens were never trained.
"""

from collections.abc import Iterator

from qload.spec import Role
from qload.verify.kin import block, is_matrix
from qload.verify.report import Finding
from qload.verify.rules.padding import means_zero
from qload.verify.rules.rule import Rule
from qload.verify.subject import Subject
from qload.verify.values.pieces import BLOCK, span

SHARED = ("k_proj", "v_proj")  # heads of which are lawfully stored several times, all of them


def check(rule: Rule, subject: Subject) -> Iterator[Finding]:
    """Each tensor with such a block: both places, and how many blocks are like it."""
    assert subject.weights is not None
    storage = subject.weights.storage
    for name in subject.judged:
        repeats = subject.values.contents[name].repeats
        if repeats is None or block(name) is None or not _varies(subject, name):
            continue
        if any(part in name for part in SHARED) and 2 * repeats.count >= repeats.blocks:
            continue
        same = span(storage, name, repeats.first, BLOCK).equal(span(storage, name, repeats.again, BLOCK))
        if same and not means_zero(subject, name, repeats.again, BLOCK):
            yield rule.finding(
                name,
                storage.info(name).file,
                f"{name}: the {BLOCK} bytes from {repeats.again} on are those from {repeats.first} on; "
                f"{repeats.count} of {repeats.blocks} blocks are stored before",
                "fetch the file again",
            )


def _varies(subject: Subject, name: str) -> bool:
    """Whether a tensor holds codes, or a matrix of many values: one of two only, as a rotation, repeats."""
    assert subject.weights is not None
    if subject.holds_codes(name):
        return True
    numbers = subject.values.numbers.get(name)
    matrix = subject.role(name) is Role.FLOAT and len(subject.weights.info(name).shape) > 1
    if numbers is None or not matrix or not is_matrix(name):
        return False
    return numbers.quantiles[0] < numbers.quantiles[2]


RULE = Rule("repeated-block", "values", check, each=True)
