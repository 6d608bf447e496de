"""The drawings that a page has room for: the first words of each layout that its layers lie in."""

from collections.abc import Iterable, Mapping

from qload.pictures.drawing import drawing

WORDS = 16  # that are drawn of a tile
SPACE = ' xmlns="http://www.w3.org/2000/svg"'  # which a page of HTML does not need

# Formats whose codes lie as a layout that there is a drawing of says.
LAYOUT_OF: Mapping[str, str] = {
    "gptq": "gptq",
    "awq": "awq",
    "ct_pack": "compressed-tensors",
    "marlin": "marlin",
    "gptq_marlin": "marlin",
    "marlin_24": "marlin_24",
    "strips": "strips",
    "exllama": "exllama",
}


def drawings_of(formats: Iterable[tuple[str | None, int | None]]) -> dict[str, str]:
    """SVG for the layout of each (format, bits) that has one, by its title, each once."""
    found: dict[str, str] = {}
    for name, bits in sorted({(LAYOUT_OF.get(name or "", ""), bits or 0) for name, bits in formats}):
        if name and bits:
            found[f"{name}, {bits} bits"] = drawing(name, bits, most=WORDS).replace(SPACE, "", 1)
    return found
