"""Check of docstrings, names and error texts for plain words: `python -m tests.words` fails above a limit.

A sentence with many relative pronouns, or a first line with a question word in front, is hard to parse for a
reader from outside. A name of adverbs and participles alone tells nothing about its object.
"""

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.paths import ROOT

PRONOUNS = re.compile(
    r"\b(what|which|who|whom|whose|that|those|where|whatever|whoever|whichever|wherever)\b", re.I
)
OPENERS = re.compile(
    r"(what|who|whom|whose|which|whether|where|how|of|those|that|among|one that|many)\b", re.I
)
# Words without meaning in a name of a module, class or function unless a noun accompanies them.
VAGUE = {
    "ahead",
    "alike",
    "answer",
    "answered",
    "apart",
    "arrived",
    "asked",
    "awaited",
    "away",
    "back",
    "before",
    "begun",
    "behind",
    "beside",
    "between",
    "elsewhere",
    "ending",
    "every",
    "few",
    "found",
    "given",
    "gone",
    "heard",
    "held",
    "here",
    "judged",
    "kept",
    "lacking",
    "late",
    "least",
    "like",
    "looked",
    "made",
    "many",
    "meant",
    "most",
    "need",
    "none",
    "noticed",
    "one",
    "others",
    "own",
    "place",
    "placed",
    "said",
    "seen",
    "shown",
    "spent",
    "spread",
    "taken",
    "there",
    "told",
    "turned",
    "under",
    "unread",
    "usual",
    "wanted",
    "watched",
    "way",
    "whole",
    "within",
}
MAX_PRONOUNS = 2.5  # per 100 words of the first paragraphs of docstrings, and of error texts
MAX_OPENERS = 4  # percent of docstrings
SHOWN = 5  # sentences of a package with an excess
MIN_WORDS = 100  # of a package, for a rate of pronouns
# Packages whose words are not yet plain.
EXEMPT = frozenset(("experts", "loader", "repacking", "weights"))


@dataclass
class Counts:
    """Words, pronouns and openers of a package, with the places of the worst sentences and names."""

    docstrings: int = 0
    words: int = 0
    pronouns: int = 0
    openers: int = 0
    error_words: int = 0
    error_pronouns: int = 0
    names: list[str] = field(default_factory=list)
    sentences: list[tuple[float, str]] = field(default_factory=list)

    def excesses(self) -> Iterator[str]:
        """Yield each exceeded limit in words."""
        rate = 100 * self.pronouns / max(self.words, 1)
        if self.words >= MIN_WORDS and rate > MAX_PRONOUNS:
            yield f"{rate:.1f} relative pronouns per 100 words of docstrings, at most {MAX_PRONOUNS}"
        share = 100 * self.openers / max(self.docstrings, 1)
        if share > MAX_OPENERS:
            yield f"{share:.0f} % of docstrings open with a question word or 'Of', at most {MAX_OPENERS} %"
        rate = 100 * self.error_pronouns / max(self.error_words, 1)
        if self.error_words >= MIN_WORDS and rate > MAX_PRONOUNS:
            yield f"{rate:.1f} relative pronouns per 100 words of error texts, at most {MAX_PRONOUNS}"


def count_file(path: Path, counts: Counts) -> None:
    """Add the sentences and names of a Python file to `counts`."""
    tree, place = ast.parse(path.read_text()), path.relative_to(ROOT)
    if path.stem != "__init__" and is_vague(path.stem):
        counts.names.append(str(place))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            count_docstring(node, place, counts)
        if isinstance(node, ast.Raise):
            texts = [
                part.value
                for part in ast.walk(node)
                if isinstance(part, ast.Constant) and isinstance(part.value, str) and " " in part.value
            ]
            counts.error_words += sum(len(text.split()) for text in texts)
            counts.error_pronouns += sum(len(PRONOUNS.findall(text)) for text in texts)
    for node in tree.body:
        if (
            isinstance(node, ast.ClassDef | ast.FunctionDef)
            and not node.name.startswith("_")
            and is_vague(node.name)
        ):
            counts.names.append(f"{place}:{node.lineno} {node.name}")


def count_docstring(
    node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, place: Path, counts: Counts
) -> None:
    """Add the first paragraph of a docstring to `counts`."""
    paragraph = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
    if not paragraph:
        return
    words, pronouns, opens = (
        len(paragraph.split()),
        len(PRONOUNS.findall(paragraph)),
        bool(OPENERS.match(paragraph)),
    )
    counts.docstrings += 1
    counts.words += words
    counts.pronouns += pronouns
    counts.openers += opens
    if pronouns or opens:
        line = getattr(node, "lineno", 1)
        counts.sentences.append((pronouns / words + opens, f"{place}:{line} {paragraph}"))


def is_vague(name: str) -> bool:
    """Return whether a name has vague words alone."""
    return {part.lower() for part in re.split(r"_|(?<=[a-z0-9])(?=[A-Z])", name)} <= VAGUE


def count_packages(root: Path) -> dict[str, Counts]:
    """Count each package of `root` but the exempt ones."""
    packages: dict[str, Counts] = {}
    for path in sorted(root.rglob("*.py")):
        package = path.relative_to(root).parts[0].removesuffix(".py")
        if package not in EXEMPT:
            count_file(path, packages.setdefault(package, Counts()))
    return packages


def main() -> int:
    """Print the exceeded limits of each package with its worst sentences; return 1 if there are any."""
    failed = False
    for package, counts in count_packages(ROOT / "qload").items():
        for excess in counts.excesses():
            failed = True
            sys.stderr.write(f"{package}: {excess}\n")
            for _, sentence in sorted(counts.sentences, reverse=True)[:SHOWN]:
                sys.stderr.write(f"    {sentence[:150]}\n")
        for name in counts.names:
            failed = True
            sys.stderr.write(f"{name}: a name without a noun\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
