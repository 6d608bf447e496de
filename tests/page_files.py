"""Files of a documentation page: named blocks of Python, changed by blocks of differences."""

import re
from collections.abc import Iterator
from pathlib import Path

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NAMED = re.compile(r"# (\S+\.py)\n")


def blocks(page: Path) -> Iterator[tuple[str, str]]:
    """Return language and text of each fenced block."""
    for found in BLOCK.finditer(page.read_text()):
        yield found[1], found[2]


def change(files: dict[str, str], difference: str) -> str:
    """Apply a block of differences to the only file with its old lines; return the name of the file."""
    old, new = (
        "".join(f"{line[1:]}\n" for line in difference.splitlines() if line[0] == sign) for sign in "-+"
    )
    (name,) = (name for name, text in files.items() if text.count(old) == 1)
    files[name] = files[name].replace(old, new)
    return name


def files(page: Path) -> dict[str, str]:
    """Return the text of each file at the end of a page, by name."""
    found: dict[str, str] = {}
    for language, text in blocks(page):
        if language == "py" and (name := NAMED.match(text)):
            found[name[1]] = text
        elif language == "diff":
            change(found, text)
    return found
