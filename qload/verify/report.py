"""Reports of `inspect` and `verify` as data: findings, notes, layers and coverage."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from os import PathLike
from typing import TYPE_CHECKING, Any

from qload.checkpoint.report_base import INTERNAL, UNSUPPORTED, ReportBase
from qload.errors import QloadError, check_fields
from qload.errors.reporting import CauseGroup, cause_of, group_by_cause
from qload.errors.rules import RuleText, Severity, rule_texts
from qload.storage.checkpoint_files import locate

if TYPE_CHECKING:
    from qload.checkpoint import Coverage, LayerInfo
    from qload.spec import LayerClaims

log: logging.Logger = logging.getLogger("qload")

LAYER_FIELDS = (
    "prefix", "format", "bits", "group_size", "sym", "act_order", "shape", "dtype", "bytes",
    "scale_dtype", "expected", "excluded",
)  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """One fault of a checkpoint: its rule, place, message and remedy.

    Attributes
    ----------
    rule
        Stable id of the rule; the documentation has a page for each.
    severity
        "error"; or "warning" if programs differ.
    tensor, file
        Place of the fault; None if it has no single place.
    message
        Description with values.
    remedy
        Instruction for the user; by default the one of the rule's page.
    cause
        Equal text for findings of one cause; by default the rule and the message without names and numbers of
        its place.
    """

    rule: str
    severity: Severity
    tensor: str | None
    file: str | None
    message: str
    remedy: str = ""
    cause: str = ""

    @property
    def detail(self) -> str:
        """The message without the tensor or file at its start, for tables with columns of these."""
        return self.message.removeprefix(f"{self.file}: ").removeprefix(f"{self.tensor}: ")

    def __post_init__(self) -> None:
        text = None if self.remedy else rule_texts().get(self.rule)
        if text is not None:
            object.__setattr__(self, "remedy", text.remedy)
        if not self.cause:
            layer = self.tensor.rpartition(".")[0] if self.tensor else None
            cause = cause_of(self.message, self.tensor, layer, self.file)
            object.__setattr__(self, "cause", f"{self.rule}: {cause}")

    @property
    def kind(self) -> tuple[str, str, str]:
        """Key of a row of findings: severity, cause, and remedy without names and numbers."""
        return self.severity, self.cause, cause_of(self.remedy, self.tensor, self.file)


def new_finding(
    rule: RuleText, tensor: str | None, file: str | None, message: str, remedy: str = ""
) -> Finding:
    """Make a finding of a rule, of the rule's severity."""
    return Finding(rule.id, rule.severity, tensor, file, message, remedy)


@dataclass(frozen=True)
class Contradiction:
    """Setting of a config that a layer contradicts; equal for layers with the same contradiction.

    Attributes
    ----------
    claims
        Claims of the layer, with the setting.
    stated
        The setting in the words of the config: "desc_act is false".
    shown
        Evidence of the tensors, as a predicate of several layers: "are in act order by g_idx".
    remedy
        Change of the setting, if all of its layers show the same.
    """

    claims: "LayerClaims"
    stated: str
    shown: str
    remedy: str


@dataclass(frozen=True)
class LayerContradiction(Finding):
    """Finding that a layer contradicts a setting; `merge_contradictions` merges those of all layers."""

    contradiction: Contradiction | None = field(kw_only=True)


def group_findings(findings: Iterable[Finding]) -> list[CauseGroup[Finding]]:
    """Group findings of one cause and one remedy; a place is a tensor, or a file if no tensor is named."""
    return group_by_cause(
        findings,
        name=lambda finding: finding.tensor or finding.file or "",
        cause=lambda finding: finding.kind,
    )


def shown_message(group: CauseGroup[Finding]) -> str:
    """Return the message of the first finding of a group, without its tensor's name.

    The name stays if other findings of the group have other numbers.
    """
    texts = {finding.detail for finding in group.items}
    return texts.pop() if len(texts) == 1 else f"for example {group.first.message}"


@dataclass(frozen=True)
class Report(ReportBase):
    """Findings, notes that need no action, layers, and claims of the config.

    Attributes
    ----------
    path
        The checkpoint.
    findings
        Faults of the checkpoint.
    notes
        Remarks that need no action.
    layers
        Each layer by its tensors.
    claims
        Settings of the config for all layers, by name.
    coverage
        Explained bytes and their explanation; None if the checkpoint cannot be read.
    logits
        Results of each layer and of the logits as plain data; None if no model was run.
    reference_coverage
        Coverage of the reference of `against`; None without a reference, or if it cannot be read.
    error_maps
        Layer name -> map of its errors as text, for `report_page`; empty unless `error_maps` was true.
    readable
        True if the files and the config could be parsed.
    """

    path: str
    findings: Sequence[Finding] = ()
    notes: Sequence[str] = ()
    layers: "Sequence[LayerInfo]" = ()
    claims: Mapping[str, Any] = field(default_factory=dict)
    coverage: "Coverage | None" = None
    logits: Mapping[str, Any] | None = None
    reference_coverage: "Coverage | None" = None
    error_maps: Mapping[str, str] = field(default_factory=dict)
    readable: bool = True

    def _readable(self) -> bool:
        """Return whether the files and the config could be parsed."""
        return self.readable

    def _sound(self) -> bool:
        """Return whether no finding is about the checkpoint itself."""
        return all(finding.rule in (INTERNAL, UNSUPPORTED) for finding in self.findings)

    def _internal(self) -> bool:
        """Return whether a bug ended a rule."""
        return any(finding.rule == INTERNAL for finding in self.findings)

    def _incomplete(self) -> bool:
        """Return whether the checkpoint or its reference has unread tensors."""
        coverages = (self.coverage, self.reference_coverage)
        return any(coverage is not None and coverage.unread > 0 for coverage in coverages)

    def _unsupported(self) -> bool:
        """Return whether the whole checkpoint is of an unsupported format."""
        return any(finding.rule == UNSUPPORTED for finding in self.findings)

    def _data(self) -> dict[str, Any]:
        """Return the fields except maps, with `coverage` in bytes; `logits` only if a model was run."""
        return {
            "findings": [asdict(finding) for finding in self.findings],
            "notes": list(self.notes),
            "claims": dict(self.claims),
            "coverage": None if self.coverage is None else _coverage(self.coverage),
            "layers": [_layer(layer) for layer in self.layers],
            **({} if self.logits is None else {"logits": dict(self.logits)}),
            **(
                {}
                if self.reference_coverage is None
                else {"reference_coverage": _coverage(self.reference_coverage)}
            ),
        }


def _coverage(coverage: "Coverage") -> dict[str, Any]:
    """Return a coverage as plain data; `explained` is the sum of read and exempt bytes."""
    return {**asdict(coverage), "explained": coverage.explained}


def _layer(layer: "LayerInfo") -> dict[str, Any]:
    """Return a layer as plain data, without its tensors and its config."""
    values = {name: getattr(layer, name) for name in LAYER_FIELDS}
    return {**values, "activations": None if layer.activations is None else asdict(layer.activations)}


def internal_finding(where: str, tensor: str | None, error: Exception) -> Finding:
    """Make the finding of a bug that ended a rule or another part of the work, `where`."""
    log.info("%s: internal error%s", where, f" at {tensor}" if tensor else "", exc_info=error)
    text = " ".join(str(error).split())
    message = f"{where}: internal error, {type(error).__name__}: {text:.400}"
    return Finding(
        INTERNAL,
        "error",
        tensor,
        None,
        f"{tensor}: {message}" if tensor else message,
        "report this message as a bug of qload; -v shows the traceback. All other rules ran",
    )


def finding_of(error: QloadError, *, severity: Severity = "error") -> Finding:
    """Make a finding of an exception of qload."""
    first, *rest = str(error).split("\n  ")
    remedies = [line.removeprefix("remedy").strip() for line in rest if line.startswith("remedy")]
    message = "\n".join([first, *(line for line in rest if not line.startswith("remedy"))])
    return Finding(
        rule=error.rule,
        severity=severity,
        tensor=getattr(error, "tensor", None),
        file=getattr(error, "file", None),
        message=message,
        remedy=" ".join(remedies),
    )


def refused_path(path: str | PathLike[str]) -> Report | None:
    """Return the report of a path without a checkpoint, from file names; None if there is a checkpoint.

    It imports no torch, so that commands refuse a wrong path at once.
    """
    try:
        locate(path)
    except QloadError as error:
        return Report(str(path), (finding_of(error),), readable=error.rule == UNSUPPORTED)
    return None


def reason_of(errors: Sequence[Finding]) -> dict[str, Any]:
    """Return the first of the errors of opening a checkpoint, with its remedy, under the field of a report.

    The field is `unsupported` if all errors are about the format, else `unreadable`.
    """
    first, unsupported = errors[0], all(finding.rule == UNSUPPORTED for finding in errors)
    text = f"{first.message}; remedy {first.remedy}" if first.remedy else first.message
    return {"unsupported" if unsupported else "unreadable": text}


@dataclass(frozen=True)
class Prompt:
    """Token ids and images for a pass through a model, and the device of the pass.

    Attributes
    ----------
    ids
        Token ids; None: 24 random ids of the vocabulary, the same in every run, after the tokens of images.
    device
        Device of the kernels and of the exact products.
    images
        Image files, for a model with vision; (): random pixels, the same in every run.
    """

    ids: Sequence[int] | None = None
    device: str = "cpu"
    images: Sequence[str | PathLike[str]] = ()

    def __post_init__(self) -> None:
        check_fields(self)
