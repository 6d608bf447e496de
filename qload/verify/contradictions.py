"""Settings of a config that all of their layers contradict in the same way: one finding about the model."""

from collections.abc import Iterator, Sequence

from qload.layouts import Stored, ZeroPoints
from qload.loader import LayerDescription
from qload.spec import LayerClaims
from qload.verify.report import Contradiction, Finding, LayerContradiction
from qload.verify.subject import Subject

CONVENTION = "checkpoint_format"  # the key of GPTQ for the convention of zero points


def of_model(subject: Subject, findings: Sequence[Finding]) -> list[Finding]:
    """Merge findings in which all layers of a setting, at least two, contradict it in the same way.

    The merged finding names the config and the setting, and the first of the layers with its numbers. It
    stands where the first of them stood. In one file of several nothing is merged: other files have other
    layers.
    """
    members: dict[tuple[str, Contradiction], list[Finding]] = {}
    for finding in findings:
        if isinstance(finding, LayerContradiction) and finding.contradiction is not None:
            members.setdefault((finding.rule, finding.contradiction), []).append(finding)
    merged: dict[int, Finding] = {}
    dropped: set[int] = set()
    alone: set[int] = set()  # findings of layers without another to compare them with
    for (_, contradiction), alike in members.items():
        layers = set(_layers_of(subject, contradiction.claims))
        contradicting = {subject.prefixes[finding.tensor] for finding in alike if finding.tensor}
        if len(layers) > 1 and layers == contradicting and not subject.shard and subject.claims is not None:
            merged[id(alike[0])] = _merged(contradiction, alike[0], len(layers), subject.claims.file)
            dropped |= {id(finding) for finding in alike[1:]}
        elif len(layers) == 1 or subject.shard:
            alone |= {id(finding) for finding in alike}
    return [
        merged.get(id(finding)) or _plain(finding, id(finding) in alone)
        for finding in findings
        if id(finding) not in dropped
    ]


def claims_of(subject: Subject, prefix: str) -> LayerClaims | None:
    """Claims of the config about a layer; None without a config."""
    if subject.claims is None:
        return None
    layer = subject.all_layers.get(prefix)
    own = layer.format.claims if isinstance(layer, LayerDescription) else subject.loader.claims_of(prefix)
    return own or subject.claims.of_layers


def convention_contradiction(
    subject: Subject, claims: LayerClaims, zeros: ZeroPoints
) -> Contradiction | None:
    """Return the contradiction of a layer whose zero points, read as `zeros`, are of the other convention.

    None without a config that has a setting for the convention.
    """
    if subject.claims is None or not claims.convention:
        return None
    file, stored = subject.claims.file, isinstance(zeros, Stored)
    shown = f"store zero points {'minus one' if stored else 'as they are'}"
    if claims.convention != CONVENTION:  # a setting with other values
        stated = f"{claims.convention} is {subject.claims.format}"
        return Contradiction(claims, stated, shown, f"correct {claims.convention} in {claims.place(file)}")
    right, values = ("gptq" if stored else "gptq_v2"), subject.configs[0].values if subject.configs else {}
    keys = [key for key in (CONVENTION, "format") if key in values] or [CONVENTION]
    return Contradiction(
        claims,
        f"{keys[0]} is {subject.claims.format}" + ("" if keys[0] in values else " by default"),
        f"{shown}, which is {right}",
        f"set {' and '.join(keys)} to {right} in {file}",
    )


def _layers_of(subject: Subject, claims: LayerClaims) -> Iterator[str]:
    """Yield the prefixes of all quantized layers with these claims, also of layers that cannot be loaded."""
    for prefix, layer in subject.all_layers.items():
        plain = isinstance(layer, LayerDescription) and layer.format.weight_type.plain
        if not plain and claims_of(subject, prefix) == claims:
            yield prefix


def _merged(contradiction: Contradiction, first: Finding, count: int, file: str) -> Finding:
    whose = f"all {count} layers of this entry" if contradiction.claims.source else f"all {count} layers"
    return Finding(
        first.rule,
        first.severity,
        None,
        file,
        f"{file}: {contradiction.stated}, but {whose} {contradiction.shown}\nfor example {first.message}",
        contradiction.remedy,
    )


def _plain(finding: Finding, alone: bool) -> Finding:
    """Return a finding without its contradiction; if it is `alone`, its remedy names the setting too."""
    if not isinstance(finding, LayerContradiction):
        return finding
    setting = finding.contradiction.remedy if finding.contradiction is not None else ""
    named = not alone or setting in finding.remedy
    remedy = finding.remedy if named else f"{finding.remedy}; if all layers show the same, {setting}"
    return Finding(
        finding.rule,
        finding.severity,
        finding.tensor,
        finding.file,
        finding.message,
        remedy,
        finding.cause,
    )
