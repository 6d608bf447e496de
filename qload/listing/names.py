"""Where a tensor's name parts into the prefix of its layer and what the layer's format calls it."""

from collections.abc import Collection

from qload.detect.signatures import FOREIGN_SUFFIXES
from qload.formats import FORMATS
from qload.spec import named

SUFFIXES = {
    suffix for weight in FORMATS for spec in weight.tensors(weight.example) for suffix in spec.suffixes
}
DOTTED = sorted((suffix for suffix in SUFFIXES | FOREIGN_SUFFIXES if "." in suffix), key=len, reverse=True)
ENDS = tuple(f".{suffix}" for suffix in DOTTED)
JOINED = [suffix for suffix in SUFFIXES if suffix.startswith("_")]  # which go on from the prefix


def split_name(name: str, names: Collection[str]) -> tuple[str, str]:
    """`a.b.weight.absmax` -> `a.b`, `weight.absmax`; what no format knows parts at its last dot.

    `names`: all of the checkpoint. What stands under another tensor, as `a.weight.x` beside `a.weight`,
    belongs to that tensor's layer. A name that is not what `named` makes of its parts has no parts: a layer
    is looked up under the names that `named` makes. It is its own prefix.
    """
    prefix, suffix = _split(name, names)
    return (prefix, suffix) if suffix and named(prefix, suffix) == name else (name, "")


def _split(name: str, names: Collection[str]) -> tuple[str, str]:
    beyond = ""  # a loop, as names may be nested deeper than calls may
    while True:
        if name.endswith(ENDS):
            suffix = next(suffix for suffix, end in zip(DOTTED, ENDS, strict=True) if name.endswith(end))
            return name[: -len(suffix) - 1], suffix + beyond
        parent, dot, last = name.rpartition(".")
        if last in SUFFIXES:
            return parent, last + beyond
        joined = next((suffix for suffix in JOINED if last.endswith(suffix)), None)
        if joined:
            return name[: -len(joined)], joined + beyond
        if not dot or parent not in names:
            return parent, last + beyond
        name, beyond = parent, f".{last}{beyond}"
