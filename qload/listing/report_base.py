"""Base classes of reports on a checkpoint, with verdict and exit code, and names of formats in reports."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from qload.errors import ArgumentError, QloadError, UnreadTensorsError, UnsupportedFormatError
from qload.errors.reporting import EXIT_CODES, SCHEMA, Verdict

# Rules with verdicts of their own.
INTERNAL, UNSUPPORTED = "internal", UnsupportedFormatError.rule


class Answer(ABC):
    """Base of reports about the checkpoint at `path`: a verdict with an exit code, and plain data."""

    path: str

    @property
    def verdict(self) -> Verdict:
        """Verdict of the report, the first of these that applies.

        `unreadable`: files or config cannot be parsed; `findings`: something is wrong; `internal`: a bug of
        qload ended a part of the work; `incomplete`: no format reads some tensors; `unsupported`: the whole
        checkpoint is of a known format that qload does not read; `ok`: nothing is wrong.
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
        """All of it as plain data: `schema`, `path`, `verdict`, and what was found."""
        return {"schema": SCHEMA, "path": self.path, "verdict": self.verdict, **self._data()}

    def _readable(self) -> bool:
        """Whether the checkpoint could be read; by default as the field `unreadable` says."""
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
        """Whether nothing is wrong with what could be read."""

    @abstractmethod
    def _data(self) -> dict[str, Any]:
        """The fields, as plain data."""


class AnswerByLayer(Answer):
    """A report with an outcome for each layer: `layers` have an `outcome`."""

    @property
    @abstractmethod
    def layers(self) -> Sequence[Any]:
        """Each with a `name`, an `outcome` and a `detail`."""

    @property
    def counts(self) -> dict[str, int]:
        """How many layers and tensors have each outcome."""
        return dict(Counter(layer.outcome for layer in self.layers))

    def _data(self) -> dict[str, Any]:
        """The fields, and how many layers have each outcome."""
        return {"counts": self.counts, **asdict(self)}  # type: ignore[call-overload]


Found = TypeVar("Found", bound=Answer)


def make_report(
    make: Callable[[], Found],
    unreadable: Callable[[str], Found],
    unsupported: Callable[[str], Found],
) -> Found:
    """Return the report of `make`, or the report of a checkpoint that cannot be read, with the reason.

    ArgumentError and UnreadTensorsError are raised.
    """
    try:
        return make()
    except (ArgumentError, UnreadTensorsError):
        raise
    except QloadError as error:
        return (unsupported if error.rule == UNSUPPORTED else unreadable)(str(error))


# The checkpoint format "marlin" of configs; `repack` and targets call the order of Marlin's kernels "marlin".
MARLIN_CHECKPOINT = "marlin_checkpoint"


def format_label(name: str) -> str:
    """The name of a checkpoint format in tables and pages, where kernel orders stand beside it."""
    return MARLIN_CHECKPOINT if name == "marlin" else name
