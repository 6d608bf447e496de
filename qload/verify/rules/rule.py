"""What a rule is: a stable id, a tier, and a check that yields findings."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from qload.verify.report import Contradiction, Finding, LayerContradiction, Severity
from qload.verify.subject import Subject

Tier = Literal["headers", "values", "meaning"]


@dataclass(frozen=True)
class Rule:
    """A rule about a checkpoint; its page is `docs/rules/<id>.md`.

    `each`: it judges every layer, or every tensor, by itself, and may be given a run of them.
    """

    id: str
    tier: Tier
    check: Callable[["Rule", Subject], Iterator[Finding]]
    severity: Severity = "error"
    each: bool = False

    def finding(
        self, tensor: str | None, file: str | None, message: str, remedy: str = "", cause: str = ""
    ) -> Finding:
        """A finding of this rule."""
        return Finding(self.id, self.severity, tensor, file, message, remedy, cause)

    def contradiction(
        self, tensor: str, file: str | None, message: str, remedy: str, contradiction: Contradiction
    ) -> Finding:
        """A finding of this rule about a layer that contradicts a setting."""
        return LayerContradiction(
            self.id, self.severity, tensor, file, message, remedy, contradiction=contradiction
        )
