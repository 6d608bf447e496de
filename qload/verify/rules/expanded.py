"""Layers that were added to a model and do nothing yet: what attention and MLP give out is zero.

A model is made deeper by layers that begin as the identity: a copy of the layer before, whose `o_proj` and
`down_proj` are zeros. Source: Wu et al., LLaMA Pro: Progressive LLaMA with Block Expansion, 2024.
"""

import re
from collections.abc import Mapping

from qload.verify.kin import block
from qload.verify.rules.padding import means_zero
from qload.verify.subject import Subject

# What gives out, by the names of published checkpoints; and which of them are of attention.
OUT = re.compile(r"(o|out|down|c)_proj|w2|wo|fc2|dense|dense_4h_to_h")
ATTENTION = re.compile(r"attn|attention")


def expanded(subject: Subject) -> frozenset[str]:
    """The prefixes of the matrices of zeros that such layers have; none where a layer has others too."""
    zero: dict[str, dict[str, bool]] = {}
    for name, prefix in _outputs(subject).items():
        layer = block(name)
        if layer is not None:
            zero.setdefault(layer, {})[prefix] = is_zero(subject, name)
    found: set[str] = set()
    for prefixes in zero.values():
        kinds = {ATTENTION.search(prefix) is not None for prefix in prefixes}
        if len(kinds) == 2 and all(prefixes.values()):
            found.update(prefixes)
    return frozenset(found)


def is_zero(subject: Subject, name: str) -> bool:
    """Whether the weights of a tensor, a plain matrix or codes, are zeros; codes of several widths differ."""
    contents = subject.values.contents[name]
    if not subject.holds_codes(name):
        return contents.word == 0
    found = subject.values.statistics.get(subject.prefixes[name])
    alike = contents.word is not None or (found is not None and not found.deviation)
    return alike and means_zero(subject, name, 0, contents.nbytes)


def _outputs(subject: Subject) -> Mapping[str, str]:
    """name -> prefix of each matrix that gives out, or of its codes."""
    assert subject.weights is not None
    found = {}
    for name in subject.judged:
        prefix = subject.prefixes[name]
        if OUT.fullmatch(prefix.rpartition(".")[2]):
            plain = name == f"{prefix}.weight" and len(subject.weights.info(name).shape) > 1
            if plain or subject.holds_codes(name):
                found[name] = prefix
    return found
