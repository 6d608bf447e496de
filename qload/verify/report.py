"""What inspecting or verifying a checkpoint found, as data."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from qload.errors import QloadError
from qload.errors.reporting import CauseGroup, cause_of, group_by_cause
from qload.listing.report_base import INTERNAL, UNSUPPORTED, ReportBase
from qload.storage.checkpoint_files import locate
from qload.verify.rule_pages import remedy_of

if TYPE_CHECKING:
    from qload.listing import Coverage, LayerInfo
    from qload.spec import LayerClaims

log: logging.Logger = logging.getLogger("qload")

SAID = (
    "prefix", "format", "bits", "group_size", "sym", "act_order", "shape", "dtype", "bytes",
    "scale_dtype", "expected", "excluded",
)  # fmt: skip
Severity = Literal["error", "warning"]


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong: the rule it breaks, where, and what to do where that is certain.

    Attributes
    ----------
    rule
        The rule's stable id; `docs/rules` has a page for each.
    severity
        "error"; or "warning" where programs differ.
    tensor, file
        Its place, if it has one place; else None.
    message
        Description with values.
    remedy
        What to do; by default what the rule's page says.
    cause
        Text that is equal for findings of one cause; by default the rule and the message without names and
        numbers of its place.
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
        """The message without the tensor or the file that it begins with, for where these stand beside it."""
        return self.message.removeprefix(f"{self.file}: ").removeprefix(f"{self.tensor}: ")

    def __post_init__(self) -> None:
        if not self.remedy:
            object.__setattr__(self, "remedy", remedy_of(self.rule))
        if not self.cause:
            layer = self.tensor.rpartition(".")[0] if self.tensor else None
            cause = cause_of(self.message, self.tensor, layer, self.file)
            object.__setattr__(self, "cause", f"{self.rule}: {cause}")

    @property
    def kind(self) -> tuple[str, str, str]:
        """Key of findings that are shown as one: severity, cause, and remedy without names and numbers."""
        return self.severity, self.cause, cause_of(self.remedy, self.tensor, self.file)


@dataclass(frozen=True)
class Contradiction:
    """Setting of a config that a layer contradicts; equal for layers that show the same.

    Attributes
    ----------
    claims
        Claims of the layer, with the setting.
    stated
        The setting as the config states it: "desc_act is false".
    shown
        What the tensors show, as a predicate of several layers: "are in act order by g_idx".
    remedy
        How to change the setting, if all of its layers show the same.
    """

    claims: "LayerClaims"
    stated: str
    shown: str
    remedy: str


@dataclass(frozen=True)
class LayerContradiction(Finding):
    """Finding that a layer contradicts a setting; `of_model` says it once if all layers do."""

    contradiction: Contradiction | None = None


def group_findings(findings: Iterable[Finding]) -> list[CauseGroup[Finding]]:
    """Group findings of one cause and one remedy; a place is a tensor, or a file if no tensor is named."""
    return group_by_cause(
        findings, name=lambda each: each.tensor or each.file or "", cause=lambda each: each.kind
    )


def shown_message(group: CauseGroup[Finding]) -> str:
    """Message of the first finding of a group, without a name that stands beside it.

    It keeps its tensor's name if other findings of the group have other numbers.
    """
    texts = {finding.detail for finding in group.items}
    return texts.pop() if len(texts) == 1 else f"for example {group.first.message}"


@dataclass(frozen=True)
class Report(ReportBase):
    """Findings, notes that need no action, the layers, and what the config claims.

    Attributes
    ----------
    path
        The checkpoint.
    findings
        What is wrong.
    notes
        What is worth knowing and not wrong.
    layers
        Each layer as its tensors say it is.
    claims
        What the config says of all layers, by name.
    coverage
        Which share of the bytes is explained, and by what; None of what cannot be read.
    logits
        Of a model that was run: what each layer and the logits showed, as plain data; None: none was.
    reference_coverage
        The same of the reference of `against`; None where there is none, or it cannot be read.
    error_maps
        Of layers by name, where they are far from the reference, as text that `report_page` draws; those that
        were asked for.
    readable
        Whether the files and the config could be understood at all.
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
        """Whether the files and the config could be understood."""
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
        """The fields but for maps, with `coverage` in bytes; `logits` is there where a model was run."""
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
    """What a report says of the bytes; `explained` is what is read and what is exempt."""
    return {**asdict(coverage), "explained": coverage.explained}


def _layer(layer: "LayerInfo") -> dict[str, Any]:
    """What a report says of a layer: all but its tensors, of which a large model has many, and its config."""
    said = {name: getattr(layer, name) for name in SAID}
    return {**said, "activations": None if layer.activations is None else asdict(layer.activations)}


def internal_finding(where: str, tensor: str | None, error: Exception) -> Finding:
    """Finding for a bug that ended a rule or another part of the work, `where`."""
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
    """An error that qload would raise, as a finding."""
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
    """Report of a path without a checkpoint, from the names of its files; None if there is a checkpoint.

    It does not import torch, so that commands refuse a wrong path at once.
    """
    try:
        locate(path)
    except QloadError as error:
        return Report(str(path), (finding_of(error),), readable=error.rule == UNSUPPORTED)
    return None


class Reason(TypedDict):
    """Why a checkpoint has no other report: one of two fields of reports, the other one is ""."""

    unreadable: str
    unsupported: str


def reason_of(errors: Sequence[Finding]) -> Reason:
    """The first of the `errors` that a checkpoint cannot be opened for, with its remedy."""
    if not errors:
        return Reason(unreadable="it cannot be read", unsupported="")
    first = errors[0]
    text = f"{first.message}; {first.remedy}" if first.remedy else first.message
    if all(finding.rule == UNSUPPORTED for finding in errors):
        return Reason(unreadable="", unsupported=text)
    return Reason(unreadable=text, unsupported="")
