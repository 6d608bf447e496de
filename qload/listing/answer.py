"""What a question about a checkpoint came to: a verdict, by which commands end, and plain data."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, Literal, TypeVar

from qload.errors import ArgumentError, QloadError

Verdict = Literal["ok", "findings", "unreadable"]
SCHEMA = 1


class Answer(ABC):
    """A base of dataclasses that have a `path`, the checkpoint, and say what was found of it."""

    path: str

    @property
    def verdict(self) -> Verdict:
        """`ok`: nothing is wrong; `findings`: something is; `unreadable`: nothing could be asked."""
        if not self._readable():
            return "unreadable"
        return "ok" if self._sound() else "findings"

    def to_json(self) -> dict[str, Any]:
        """All of it as plain data: `schema`, `path`, `verdict`, and what was found."""
        return {"schema": SCHEMA, "path": self.path, "verdict": self.verdict, **self._data()}

    def _readable(self) -> bool:
        """Whether the checkpoint could be read; by default as the field `unreadable` says."""
        return not getattr(self, "unreadable", "")

    @abstractmethod
    def _sound(self) -> bool:
        """Whether nothing is wrong with what could be read."""

    @abstractmethod
    def _data(self) -> dict[str, Any]:
        """The fields, as plain data."""


class AnswerByLayer(Answer):
    """One that says of each layer what became of it: `layers` have an `outcome`."""

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


def answered(ask: Callable[[], Found], unreadable: Callable[[str], Found]) -> Found:
    """What a question came to, also of a checkpoint that cannot be read; ArgumentError: a wrong question."""
    try:
        return ask()
    except ArgumentError:
        raise
    except QloadError as error:
        return unreadable(str(error))
