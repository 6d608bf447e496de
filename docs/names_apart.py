"""Of the site: parameters that share an entry of a docstring are shown one by one, each with its type."""

import re
from typing import Any

import griffe

ENTRY = re.compile(r"^(\w+(?:, \w+)+)\n((?:[ ]+\S.*\n?)+)", re.MULTILINE)


def apart(text: str) -> str:
    """`a, b` above a text -> the text below `a` and below `b`."""
    return ENTRY.sub(
        lambda found: "".join(f"{name}\n{found[2].rstrip()}\n" for name in found[1].split(", ")), text
    )


class NamesApart(griffe.Extension):
    """Rewrites each docstring before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for every module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = apart(obj.docstring.value)
