"""The coverage ledger: which tensors of a checkpoint were used, how often, and which need not be."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from qload.errors import ArgumentError
from qload.storage import WeightStorage
from qload.weights.exemptions import exemption, unread_reason

ReasonOf = Callable[[str], str | None]  # a tensor's name -> why it may stay unused


@dataclass(frozen=True)
class LoadReport:
    """What became of every tensor of a checkpoint.

    Attributes
    ----------
    used
        The names that loads have used, sorted.
    unused
        The names that no load has used and that were not exempted, nor are known not to be read.
    twice
        How often, by name, of those that were used more than once.
    exempted
        The reason, by name, of those that may stay unused.
    unread
        The reason, by name, of those that no format reads yet, and that no load has used.
    notes
        What disagreed without harm, in the order in which it was noted.
    """

    used: Sequence[str]
    unused: Sequence[str]
    twice: Mapping[str, int]
    exempted: Mapping[str, str]
    notes: Sequence[str]
    unread: Mapping[str, str] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether every tensor was used exactly once or exempted by name."""
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
    """Entries of one `Weights`; a load that fails leaves none."""

    taken: Counter[str] = field(default_factory=Counter)
    exemptions: list[tuple[str, str]] = field(default_factory=list)
    reasons: list[ReasonOf] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unread: dict[str, str] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)

    def take(self, names: Iterable[str]) -> None:
        """One load used each of these tensors."""
        self.taken.update(set(names))

    def exempt(self, patterns: Iterable[str], reason: str) -> None:
        """Tensors of these names (`*` and `?` as in a shell) may stay unused, for this reason."""
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
        """One with the same exemptions, in which nothing was used yet."""
        return Ledger(exemptions=list(self.exemptions), reasons=list(self.reasons))

    def report(self, storage: WeightStorage) -> LoadReport:
        """Every stored tensor, accounted for."""
        keys = sorted(storage.keys())
        unused = [key for key in keys if not self.taken[key]]
        exempted = {key: reason for key in unused if (reason := self._reason(key, storage))}
        left = [key for key in unused if key not in exempted]
        stacks = (key for key in left if key not in self.refused)
        unread = {
            key: reason for key in stacks if (reason := self.unread.get(key) or unread_reason(key, storage))
        }
        return LoadReport(
            used=[key for key in keys if self.taken[key]],
            unused=[key for key in left if key not in unread],
            twice={key: times for key, times in sorted(self.taken.items()) if times > 1},
            exempted=exempted,
            notes=tuple(self.notes),
            unread=unread,
        )

    def exempts(self, key: str, storage: WeightStorage) -> bool:
        """Return whether a tensor may stay unused."""
        return self._reason(key, storage) is not None

    def _reason(self, key: str, storage: WeightStorage) -> str | None:
        said = (reason for pattern, reason in self.exemptions if fnmatchcase(key, pattern))
        told = (reason for reason_of in self.reasons if (reason := reason_of(key)))
        return next(said, None) or next(told, None) or exemption(key, storage.info(key))
