"""Regular expressions from a checkpoint, matched in time that their author does not choose.

A config is hostile input, and Python's own engine backtracks: `(a|a)*b` takes seconds for a name of 25
letters and years for one of 50. This matcher goes all ways at once: it keeps the set of places in the pattern
where a match may stand, so that a letter of a name costs at most the size of the pattern. Otherwise it is
`re.match`: from the start, and not necessarily to the end.

Read are literals, `.`, classes, escapes, groups, `|`, `*`, `+`, `?` and `{m,n}`, greedy or lazy, `^` at the
start and `$`. References back, lookaround, names and flags are refused, and so are patterns that would grow
without measure.
"""

import re
from collections.abc import Iterable
from functools import lru_cache

from qload.errors import PatternError

LIMIT = 1024  # letters of a pattern, and nodes of it once {m,n} is written out
GROUPS = 64  # of a pattern, and so the depth of the deepest

_ATOM = re.compile(r"\\[dDsSwW]|\\[^\w\s]|\[\^?\]?(?:\\.|[^\]\\])*\]|[^\\()\[\]{}*+?|^$]")
_REPEAT = re.compile(r"([*+?])|\{(\d{1,4})(,?)(\d{0,4})\}")

# (kind, what): ("atom", its text), ("end", ()), ("row" or "either", nodes), ("star", (node,)).
Node = tuple[str, "str | tuple[Node, ...]"]
EMPTY: Node = ("row", ())


class Regex:
    """A pattern, and whether a name begins with a match of it; PatternError for what is not read."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        if len(pattern) > LIMIT:
            raise PatternError(f"{pattern:.40}", f"goes on to more than {LIMIT} letters")
        if pattern.count("(") > GROUPS:
            raise PatternError(pattern, f"has more than {GROUPS} groups")
        node, at = self._either(1 if pattern.startswith("^") else 0)
        if at < len(pattern):
            raise self._unread(at)
        self._places: list[tuple[str, str, list[int]]] = [("found", "", [])]  # kind, text, where it goes on
        self._left = LIMIT
        self._start = self._build(node, 0)
        self._reached = lru_cache(1 << 14)(self._reach)

    def match(self, name: str) -> bool:
        """As `re.match(pattern, name) is not None`."""
        places = frozenset([self._start])
        for letter in name:
            places, found = self._reached(places, letter)
            if found:
                return True
        return self._reached(places, "")[1]

    def _reach(self, places: Iterable[int], letter: str) -> tuple[frozenset[int], bool]:
        """Where a letter leads from these places, and whether a match ends before it; "": the end."""
        todo, seen = list(places), set(places)
        after: set[int] = set()
        while todo:
            kind, text, onward = self._places[todo.pop()]
            if kind == "atom":
                after.update(onward if letter and _is(text, letter) else ())
            elif kind == "found":
                return frozenset(), True
            elif kind == "split" or not letter:
                todo += [place for place in onward if place not in seen]
                seen.update(onward)
        return frozenset(after), False

    def _build(self, node: Node, after: int) -> int:
        """The place where a node begins that goes on to `after`."""
        kind, what = node
        self._left -= 1
        if self._left < 0:
            raise PatternError(self.pattern, f"is more than {LIMIT} nodes long")
        if kind == "row":
            for each in reversed(_nodes(what)):
                after = self._build(each, after)
            return after
        self._places.append((kind if kind in ("atom", "end") else "split", str(what), [after]))
        place = len(self._places) - 1
        if kind == "either":
            self._places[place][2][:] = [self._build(each, after) for each in _nodes(what)]
        elif kind == "star":
            self._places[place][2].extend(self._build(each, place) for each in _nodes(what))
        return place

    def _either(self, at: int) -> tuple[Node, int]:
        row, at = self._row(at)
        choices = [row]
        while self.pattern.startswith("|", at):
            row, at = self._row(at + 1)
            choices.append(row)
        return (row if len(choices) == 1 else ("either", tuple(choices))), at

    def _row(self, at: int) -> tuple[Node, int]:
        nodes: list[Node] = []
        while at < len(self.pattern) and self.pattern[at] not in "|)":
            node, at = self._one(at)
            repeat = _REPEAT.match(self.pattern, at)
            if repeat:
                node, at = (
                    self._repeated(node, repeat),
                    repeat.end() + self.pattern.startswith("?", repeat.end()),
                )
            nodes.append(node)
        return ("row", tuple(nodes)), at

    def _one(self, at: int) -> tuple[Node, int]:
        if self.pattern.startswith("$", at):
            return ("end", ()), at + 1
        if self.pattern.startswith("(", at):
            node, end = self._either(at + (3 if self.pattern.startswith("(?:", at) else 1))
            if not self.pattern.startswith(")", end):
                raise self._unread(end)
            return node, end + 1
        atom = _ATOM.match(self.pattern, at)
        if not atom:
            raise self._unread(at)
        try:
            re.compile(atom[0])
        except re.error as error:
            raise PatternError(self.pattern, str(error)) from error
        return ("atom", atom[0]), atom.end()

    def _repeated(self, node: Node, repeat: re.Match[str]) -> Node:
        sign, least, comma, most = repeat.groups()
        if sign:
            least, most, comma = {"*": ("0", "", ","), "+": ("1", "", ","), "?": ("0", "1", ",")}[sign]
        low, high = int(least), int(most or least)
        if most and high < low:
            raise PatternError(self.pattern, f"{repeat[0]} asks for at least {low} and at most {high}")
        rest: list[Node] = [("either", (node, EMPTY))] * (high - low)
        if comma and not most:
            rest = [("star", (node,))]
        return ("row", (*[node] * low, *rest))

    def _unread(self, at: int) -> PatternError:
        return PatternError(self.pattern, f"cannot read {self.pattern[at : at + 8] or 'the end'!r}")


def _nodes(what: "str | tuple[Node, ...]") -> tuple[Node, ...]:
    return what if isinstance(what, tuple) else ()


@lru_cache(1 << 14)
def _is(atom: str, letter: str) -> bool:
    return re.fullmatch(atom, letter) is not None
