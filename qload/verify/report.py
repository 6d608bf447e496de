"""What inspecting or verifying a checkpoint found, as data."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from qload.errors import QloadError

SCHEMA = 1
Severity = Literal["error", "warning"]


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong: the rule it breaks, where, and what to do where that is certain.

    Attributes
    ----------
    rule
        The rule's stable id; `docs/rules` has a page for each.
    severity
        "error", or "warning" for what some readers take another way.
    tensor, file
        Where it is, as far as it is at one place; else None.
    message
        What is wrong, with the values.
    remedy
        What to do, or "".
    """

    rule: str
    severity: Severity
    tensor: str | None
    file: str | None
    message: str
    remedy: str = ""


@dataclass(frozen=True)
class LayerInfo:
    """One layer as its tensors say it is. `group_size` -1: one group; None where a format has none.

    `expected`: the (N, K) that the model's config says, where its type is known.
    """

    prefix: str
    format: str
    bits: int | None
    group_size: int | None
    sym: bool | None
    act_order: bool | None
    shape: tuple[int, ...]
    dtype: str  # of the scales, or of a plain weight
    bytes: int
    expected: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Report:
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
    readable
        Whether the files and the config could be understood at all.
    """

    path: str
    findings: Sequence[Finding] = ()
    notes: Sequence[str] = ()
    layers: Sequence[LayerInfo] = ()
    claims: Mapping[str, Any] = field(default_factory=dict)
    readable: bool = True

    @property
    def verdict(self) -> Literal["ok", "findings", "unreadable"]:
        """`ok` where nothing was found, `unreadable` where the files or the config cannot be understood."""
        if not self.readable:
            return "unreadable"
        return "findings" if self.findings else "ok"

    def to_json(self) -> dict[str, Any]:
        """The report under its schema: `schema`, `verdict`, `findings`, and `notes`, `claims`, `layers`."""
        return {
            "schema": SCHEMA,
            "verdict": self.verdict,
            "findings": [asdict(finding) for finding in self.findings],
            "notes": list(self.notes),
            "claims": dict(self.claims),
            "layers": [asdict(layer) for layer in self.layers],
        }


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
