"""`sym: true` means that every zero point is 2**(bits - 1).

Kernels for symmetric weights never look at `qzeros`. Zero points that are off by one tell that the file
was written in the other convention (gptq stores them minus one, gptq_v2 as they are), and engines that
do look would be off by one scale everywhere.
"""

from collections.abc import Iterator

import torch

from qload.formats import GPTQConfig
from qload.listing.zero_points import convention, symmetric
from qload.verify.contradictions import convention_contradiction
from qload.verify.report import Contradiction, Finding
from qload.verify.rules.rule import Rule
from qload.verify.subject import Subject


def check(rule: Rule, subject: Subject) -> Iterator[Finding]:
    """Each symmetric layer with another zero point: the first, and how many."""
    claims = subject.claims
    if claims is None or subject.weights is None:
        return
    for layer in subject.described():
        known, own = convention(layer), layer.format.claims
        if known is None or own is None or not own.sym or not isinstance(layer.format.config, GPTQConfig):
            continue
        (zeros, packing), middle, count, first = known, 2 ** (layer.format.config.bits - 1), 0, None
        for start, run, same in symmetric(subject.weights.storage, layer):
            if same:
                continue
            values = zeros.read(run, packing)
            wrong = torch.nonzero(values != middle)
            if wrong.numel() and first is None:
                g, n = wrong[0].tolist()
                first = (start + g, n, int(values[g, n]))
            count += wrong.shape[0]
        if first is not None:
            name = f"{layer.prefix}.qzeros"
            g, n, value = first
            total = layer.format.config.groups(layer.K) * layer.N
            message = (
                f"{name}: zero point {value} at group {g}, column {n}, a symmetric layer of "
                f"{layer.format.config.bits} bits has {middle}; {count} of {total} differ "
                f"(read as {zeros.name}, as {claims.file} says checkpoint_format {claims.format}"
                + (f"; there {own.says('sym')})" if own.source else ")")
            )
            other = convention_contradiction(subject, own, zeros) if layer.contradiction else None
            remedy = f"set sym to false in {own.place(claims.file)}"
            if other is None:
                shown = f"have zero points other than {middle}"
                other = Contradiction(own, own.says("sym"), shown, remedy)
                remedy += ", if the layer was quantized with zero points; else fetch the checkpoint again"
            else:
                remedy = "write the zero points of the layer again, in the convention of the other layers"
            yield rule.contradiction(name, layer.names.file("qzeros"), message, remedy, other)


RULE = Rule("symmetry", "meaning", check, each=True)
