"""Base classes of reports on a checkpoint, with verdict and exit code, and names of formats in reports."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from qload.errors import ArgumentError, QloadError, UnreadTensorsError, UnsupportedFormatError
from qload.errors.reporting import EXIT_CODES, SCHEMA, Verdict

# Rules with their own verdict.
INTERNAL, UNSUPPORTED = "internal", UnsupportedFormatError.rule


class ReportBase(ABC):
    """Base of reports on the checkpoint at `path`: a verdict with an exit code, and plain data."""

    path: str

    @property
    def verdict(self) -> Verdict:
        """Verdict of the report: the first in the following list that applies.

        `unreadable`: files or config cannot be parsed; `findings`: something is wrong; `internal`: a bug of
        qload ended a part of the work; `incomplete`: no format reads some tensors; `unsupported`: qload does
        not read the format of the checkpoint; `ok`: nothing is wrong.
        """
        holds: Mapping[Verdict, Callable[[], bool]] = {
            "unreadable": lambda: not self._readable(),
            "findings": lambda: not self._sound(),
            "internal": self._internal,
            "incomplete": self._incomplete,
            "unsupported": self._unsupported,
        }
        return next(verdict for verdict in EXIT_CODES if verdict == "ok" or holds[verdict]())

    @property
    def exit_code(self) -> int:
        """Exit code of a command with this verdict."""
        return EXIT_CODES[self.verdict]

    def to_json(self) -> dict[str, Any]:
        """Report as plain data: `schema`, `path`, `verdict`, and the fields."""
        return {"schema": SCHEMA, "path": self.path, "verdict": self.verdict, **self._data()}

    def _readable(self) -> bool:
        """Return whether the checkpoint can be read; by default, whether the field `unreadable` is empty."""
        return not getattr(self, "unreadable", "")

    def _internal(self) -> bool:
        """Return whether a bug of qload ended a part of the work."""
        return False

    def _incomplete(self) -> bool:
        """Return whether no format reads some tensors; by default, whether the field `unread` has entries."""
        return bool(getattr(self, "unread", ()))

    def _unsupported(self) -> bool:
        """Return whether the whole checkpoint is unsupported; by default, whether `unsupported` is set."""
        return bool(getattr(self, "unsupported", ""))

    @abstractmethod
    def _sound(self) -> bool:
        """Return whether all readable parts are correct."""

    @abstractmethod
    def _data(self) -> dict[str, Any]:
        """Fields as plain data."""


class LayerReportBase(ReportBase):
    """Base of reports with an outcome for each layer."""

    @property
    @abstractmethod
    def layers(self) -> Sequence[Any]:
        """Layers with `name`, `outcome` and `detail`."""

    @property
    def counts(self) -> dict[str, int]:
        """Number of layers and tensors by outcome."""
        return dict(Counter(layer.outcome for layer in self.layers))

    def _data(self) -> dict[str, Any]:
        """Fields, and number of layers by outcome."""
        return {"counts": self.counts, **asdict(self)}  # type: ignore[call-overload]


Report = TypeVar("Report", bound=ReportBase)


def make_report(make: Callable[[], Report], empty_report: Callable[..., Report]) -> Report:
    """Return the report of `make`, or the report of an unreadable or unsupported checkpoint with the reason.

    `empty_report` builds that report from the field `unreadable` or `unsupported`. ArgumentError and
    UnreadTensorsError are raised.
    """
    try:
        return make()
    except (ArgumentError, UnreadTensorsError):
        raise
    except QloadError as error:
        return empty_report(**{"unsupported" if error.rule == UNSUPPORTED else "unreadable": str(error)})


# Label of the checkpoint format "marlin"; in `repack` and targets "marlin" is the order of Marlin's kernels.
MARLIN_CHECKPOINT = "marlin_checkpoint"


def format_label(name: str) -> str:
    """Label of a checkpoint format in tables and pages, distinct from kernel orders."""
    return MARLIN_CHECKPOINT if name == "marlin" else name
