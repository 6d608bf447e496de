"""What inspecting or verifying a checkpoint found, as data."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from qload.errors import QloadError
from qload.listing import Answer, Coverage, LayerInfo

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
class Report(Answer):
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
    error_maps
        Of layers by name, where they are far from the reference, as text that `report_page` draws; those that
        were asked for.
    readable
        Whether the files and the config could be understood at all.
    """

    path: str
    findings: Sequence[Finding] = ()
    notes: Sequence[str] = ()
    layers: Sequence[LayerInfo] = ()
    claims: Mapping[str, Any] = field(default_factory=dict)
    coverage: Coverage | None = None
    logits: Mapping[str, Any] | None = None
    error_maps: Mapping[str, str] = field(default_factory=dict)
    readable: bool = True

    def _readable(self) -> bool:
        """Whether the files and the config could be understood."""
        return self.readable

    def _sound(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    def _data(self) -> dict[str, Any]:
        """The fields but for maps, with `coverage` in bytes; `logits` is there where a model was run."""
        return {
            "findings": [asdict(finding) for finding in self.findings],
            "notes": list(self.notes),
            "claims": dict(self.claims),
            "coverage": None if self.coverage is None else _coverage(self.coverage),
            "layers": [_layer(layer) for layer in self.layers],
            **({} if self.logits is None else {"logits": dict(self.logits)}),
        }


def _coverage(coverage: Coverage) -> dict[str, Any]:
    """What a report says of the bytes; `explained` is what is read and what is exempt."""
    return {**asdict(coverage), "explained": coverage.explained}


def _layer(layer: LayerInfo) -> dict[str, Any]:
    """What a report says of a layer: all but its tensors, of which a large model has many, and its config."""
    said = {name: getattr(layer, name) for name in SAID}
    return {**said, "activations": None if layer.activations is None else asdict(layer.activations)}


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
