"""Ledger of a checkpoint's tensors: used, exempt from use, unread by any format, or unused."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from qload.errors import ArgumentError
from qload.storage import WeightStorage
from qload.weights.exemptions import exemption, unread_reason

ReasonOf = Callable[[str], str | None]  # name of a tensor -> reason of its exemption


@dataclass(frozen=True)
class LoadReport:
    """Use of every tensor of a checkpoint.

    Attributes
    ----------
    used
        Names of used tensors, sorted.
    unused
        Names of unused tensors without an explanation.
    twice
        Number of uses of tensors with more than one, by name.
    exempted
        Reason of each exemption, by name.
    unread
        Reason for which no format reads an unused tensor, by name.
    notes
        Harmless contradictions, in order.
    """

    used: Sequence[str]
    unused: Sequence[str]
    twice: Mapping[str, int]
    exempted: Mapping[str, str]
    notes: Sequence[str]
    unread: Mapping[str, str] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """True if every tensor was used exactly once or exempted by name."""
        return not self.unused and not self.twice and not self.unread

    def __str__(self) -> str:
        lines = [
            f"{len(self.used)} used, {len(self.unused)} unused, {len(self.twice)} more than once, "
            f"{len(self.exempted)} exempted" + (f", {len(self.unread)} not read" if self.unread else "")
        ]
        lines += [f"  unused    {name}" for name in self.unused]
        lines += [f"  {times} times   {name}" for name, times in self.twice.items()]
        lines += [f"  exempted  {name}: {reason}" for name, reason in self.exempted.items()]
        lines += [f"  not read  {name}: {reason}" for name, reason in self.unread.items()]
        lines += [f"  note      {text}" for text in self.notes]
        return "\n".join(lines)


@dataclass
class Ledger:
    """Entries of one `Weights`; a failed load leaves none."""

    taken: Counter[str] = field(default_factory=Counter)
    exemptions: list[tuple[str, str]] = field(default_factory=list)
    reasons: list[ReasonOf] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unread: dict[str, str] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)

    def take(self, names: Iterable[str]) -> None:
        """Enter tensors as used by one load."""
        self.taken.update(set(names))

    def exempt(self, patterns: Iterable[str], reason: str) -> None:
        """Exempt tensors by names (`*` and `?` as in a shell), for a reason."""
        if not reason:
            raise ArgumentError("reason", "why these tensors may stay unused", "nothing")
        self.exemptions += [(pattern, reason) for pattern in patterns]

    def leave(self, names: Iterable[str], reason: str) -> None:
        """Record tensors as unread, with the reason."""
        self.unread.update(dict.fromkeys(names, reason))

    def refuse(self, names: Iterable[str]) -> None:
        """Record tensors of damaged layers; they count as damaged, not as a stack."""
        self.refused.update(names)

    def fresh(self) -> "Ledger":
        """A new ledger with the same exemptions."""
        return Ledger(exemptions=list(self.exemptions), reasons=list(self.reasons))

    def report(self, storage: WeightStorage) -> LoadReport:
        """Report the use of every stored tensor."""
        keys = sorted(storage.keys())
        unused = [key for key in keys if not self.taken[key]]
        exempted = {key: reason for key in unused if (reason := self._reason(key, storage))}
        unexplained = [key for key in unused if key not in exempted]
        stacks = (key for key in unexplained if key not in self.refused)
        unread = {
            key: reason for key in stacks if (reason := self.unread.get(key) or unread_reason(key, storage))
        }
        return LoadReport(
            used=[key for key in keys if self.taken[key]],
            unused=[key for key in unexplained if key not in unread],
            twice={key: times for key, times in sorted(self.taken.items()) if times > 1},
            exempted=exempted,
            notes=tuple(self.notes),
            unread=unread,
        )

    def exempts(self, key: str, storage: WeightStorage) -> bool:
        """Return whether a tensor may stay unused."""
        return self._reason(key, storage) is not None

    def _reason(self, key: str, storage: WeightStorage) -> str | None:
        by_pattern = (reason for pattern, reason in self.exemptions if fnmatchcase(key, pattern))
        by_function = (reason for reason_of in self.reasons if (reason := reason_of(key)))
        return next(by_pattern, None) or next(by_function, None) or exemption(key, storage.info(key))
