"""Extension of griffe for the site: a docstring entry for each of several parameters that share one."""

import re
from typing import Any

import griffe

ENTRY = re.compile(r"^(\w+(?:, \w+)+)\n((?:[ ]+\S.*\n?)+)", re.MULTILINE)


def split_parameters(text: str) -> str:
    """Copy the text below `a, b` to an entry `a` and an entry `b`."""
    return ENTRY.sub(
        lambda entry: "".join(f"{name}\n{entry[2].rstrip()}\n" for name in entry[1].split(", ")), text
    )


class SplitParameters(griffe.Extension):
    """Rewrite each docstring before griffe parses it."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of a module, class, function or attribute."""
        if obj.docstring is not None:
            obj.docstring.value = split_parameters(obj.docstring.value)
