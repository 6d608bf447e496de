"""The `Rule` class, and one finding in place of many where every layer of a setting contradicts it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Literal

from qload.errors.rules import RuleText, Severity
from qload.layouts import Stored, ZeroPoints
from qload.loader import LayerDescription
from qload.spec import LayerClaims
from qload.verify.checkpoint import VerifiedCheckpoint
from qload.verify.report import Contradiction, Finding, LayerContradiction, new_finding

Tier = Literal["headers", "values", "meaning"]
CONVENTION_KEY = "checkpoint_format"  # GPTQ's setting for the convention of zero points


@dataclass(frozen=True)
class Rule:
    """A rule of a checkpoint: its text, and the check that yields its findings.

    Attributes
    ----------
    text
        Id, severity, and the text of the rule's page.
    check
        Function of the rule and a checkpoint.
    each
        True if layers and tensors are checked one by one; the check may then get a part of the checkpoint.
    """

    text: RuleText
    check: Callable[["Rule", VerifiedCheckpoint], Iterator[Finding]]
    each: bool = False

    @property
    def id(self) -> str:
        """Stable id."""
        return self.text.id

    @property
    def tier(self) -> str:
        """Tier of `verify`: "headers", "values" or "meaning"."""
        return self.text.stage

    @property
    def severity(self) -> Severity:
        """Usual severity of a finding."""
        return self.text.severity

    def finding(self, tensor: str | None, file: str | None, message: str, remedy: str = "") -> Finding:
        """Make a finding of this rule."""
        return new_finding(self.text, tensor, file, message, remedy)

    def tensor_finding(
        self, checkpoint: VerifiedCheckpoint, name: str, fault: str, remedy: str = ""
    ) -> Finding:
        """Make a finding of this rule about a stored tensor; its message is the name and the `fault`."""
        file = checkpoint.weights.info(name).file
        return new_finding(self.text, name, file, f"{name}: {fault}", remedy)

    def field_finding(self, layer: LayerDescription, field: str, fault: str, remedy: str = "") -> Finding:
        """Make a finding of this rule about a tensor of a layer; its message is the name and the `fault`."""
        name = layer.names.full(field)
        return new_finding(self.text, name, layer.names.file(field), f"{name}: {fault}", remedy)

    def contradiction(
        self, tensor: str, file: str | None, message: str, remedy: str, contradiction: Contradiction
    ) -> Finding:
        """Make a finding of this rule about a layer that contradicts a setting."""
        return LayerContradiction(
            self.id, self.severity, tensor, file, message, remedy, contradiction=contradiction
        )


def merge_contradictions(checkpoint: VerifiedCheckpoint, findings: Sequence[Finding]) -> list[Finding]:
    """Merge findings if all layers of a setting, at least two, contradict it in the same way.

    The merged finding names the config, the setting, and the first layer with its numbers. It takes the
    position of the first finding. In one file of several nothing is merged: other files have other layers.
    """
    members: dict[tuple[str, Contradiction], list[Finding]] = {}
    for finding in findings:
        if isinstance(finding, LayerContradiction) and finding.contradiction is not None:
            members.setdefault((finding.rule, finding.contradiction), []).append(finding)
    merged: dict[int, Finding] = {}
    dropped: set[int] = set()
    single: set[int] = set()  # findings of layers without another layer to compare with
    for (_, contradiction), equal in members.items():
        layers = set(_layers_of(checkpoint, contradiction.claims))
        contradicting = {checkpoint.prefixes[finding.tensor] for finding in equal if finding.tensor}
        is_complete = not checkpoint.is_shard and checkpoint.claims is not None
        if len(layers) > 1 and layers == contradicting and is_complete and checkpoint.claims is not None:
            merged[id(equal[0])] = _merged(contradiction, equal[0], len(layers), checkpoint.claims.file)
            dropped |= {id(finding) for finding in equal[1:]}
        elif len(layers) == 1 or checkpoint.is_shard:
            single |= {id(finding) for finding in equal}
    return [
        merged.get(id(finding)) or _plain(finding, id(finding) in single)
        for finding in findings
        if id(finding) not in dropped
    ]


def claims_of(checkpoint: VerifiedCheckpoint, prefix: str) -> LayerClaims | None:
    """Return the config's claims about a layer; None without a config."""
    if checkpoint.claims is None:
        return None
    layer = checkpoint.all_layers.get(prefix)
    claims = (
        layer.format.claims if isinstance(layer, LayerDescription) else checkpoint.loader.claims_of(prefix)
    )
    return claims or checkpoint.claims.of_layers


def convention_contradiction(
    checkpoint: VerifiedCheckpoint, claims: LayerClaims, zeros: ZeroPoints
) -> Contradiction | None:
    """Return the contradiction of a layer whose zero points, read as `zeros`, have the other convention.

    None without a config that has a setting for the convention.
    """
    if checkpoint.claims is None or not claims.convention:
        return None
    file, stored = checkpoint.claims.file, isinstance(zeros, Stored)
    shown = f"store zero points {'minus one' if stored else 'as they are'}"
    if claims.convention != CONVENTION_KEY:  # a setting with other values
        stated = f"{claims.convention} is {checkpoint.claims.format}"
        return Contradiction(claims, stated, shown, f"correct {claims.convention} in {claims.place(file)}")
    right = "gptq" if stored else "gptq_v2"
    values = checkpoint.configs[0].values if checkpoint.configs else {}
    keys = [key for key in (CONVENTION_KEY, "format") if key in values] or [CONVENTION_KEY]
    return Contradiction(
        claims,
        f"{keys[0]} is {checkpoint.claims.format}" + ("" if keys[0] in values else " by default"),
        f"{shown}, which is {right}",
        f"set {' and '.join(keys)} to {right} in {file}",
    )


def _layers_of(checkpoint: VerifiedCheckpoint, claims: LayerClaims) -> Iterator[str]:
    """Yield the prefixes of all quantized layers with these claims, loadable or not."""
    for prefix, layer in checkpoint.all_layers.items():
        plain = isinstance(layer, LayerDescription) and layer.format.weight_type.plain
        if not plain and claims_of(checkpoint, prefix) == claims:
            yield prefix


def _merged(contradiction: Contradiction, first: Finding, count: int, file: str) -> Finding:
    layers = f"all {count} layers of this entry" if contradiction.claims.source else f"all {count} layers"
    fault = f"{file}: {contradiction.stated}, but {layers} {contradiction.shown}"
    message = f"{fault}\nfor example {first.message}"
    return Finding(first.rule, first.severity, None, file, message, contradiction.remedy)


def _plain(finding: Finding, single: bool) -> Finding:
    """Return a finding without its contradiction; if it is `single`, its remedy names the setting too."""
    if not isinstance(finding, LayerContradiction):
        return finding
    setting = finding.contradiction.remedy if finding.contradiction is not None else ""
    named = not single or setting in finding.remedy
    remedy = finding.remedy if named else f"{finding.remedy}; if all layers show the same, {setting}"
    facts = {field.name: getattr(finding, field.name) for field in fields(Finding)}
    return Finding(**{**facts, "remedy": remedy})
