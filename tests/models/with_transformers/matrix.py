"""The table of docs/models.md: `python -m tests.models.with_transformers.matrix` prints it."""

from tests.models.with_transformers.formats import STACKED
from tests.models.with_transformers.stored import FORMATS
from tests.models.with_transformers.theirs import KINDS

TITLES = {
    "gptq": "GPTQ, act order",
    "awq": "AWQ",
    "fp8 block": "FP8, blocks",
    "nf4": "bitsandbytes nf4",
    "w4a16": "compressed-tensors W4A16",
    "w8a8": "compressed-tensors W8A8",
}


def cell(kind: str, name: str) -> str:
    """Which of a model's matrices are tested in a format."""
    return "all" if kind not in STACKED or FORMATS[name].experts else "not experts"


def table() -> str:
    """A row for types of model with the same cells, a column for each format."""
    columns = ["model_type", "plain", *(TITLES[name] for name in FORMATS)]
    kinds: dict[tuple[str, ...], list[str]] = {}
    for kind in KINDS:
        kinds.setdefault(tuple(cell(kind, name) for name in FORMATS), []).append(f"`{kind}`")
    rows = [[", ".join(names), "all", *cells] for cells, names in kinds.items()]
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"|{'|'.join(line)}|" for line in lines)


if __name__ == "__main__":
    print(table())
