"""What the parts of a layer are stored as, where programs differ: told by what there is, never guessed."""

from collections.abc import Sequence

from qload.weights import Weights

# What the names of a text model begin with, alone or within another.
TEXTS = ("model", "model.text_model", "model.language_model", "language_model.model")


def is_stored(weights: Weights, prefix: str) -> bool:
    """Whether any tensor is stored under `prefix`, or under it within the prefix of `weights`."""
    leads = ("", *([f"{weights.prefix}."] if weights.prefix else ()))
    return any(weights.names_under(f"{lead}{prefix}.") for lead in leads)


def first_stored(weights: Weights, parent: str, names: Sequence[str]) -> str:
    """The prefix of the first of `names` under `parent` that is stored; that of the first where none is."""
    found = (f"{parent}.{name}" for name in names if is_stored(weights, f"{parent}.{name}"))
    return next(found, f"{parent}.{names[0]}")


def stored_parts(weights: Weights, parent: str, parts: Sequence[str], fused: str) -> list[str] | str:
    """The prefixes of the `parts` of a layer, or the one that they are stored fused under."""
    if is_stored(weights, f"{parent}.{fused}") and not is_stored(weights, f"{parent}.{parts[0]}"):
        return f"{parent}.{fused}"
    return [f"{parent}.{part}" for part in parts]


def text_within(weights: Weights) -> tuple[str, str]:
    """What the names of a text model begin with, and the name of its head: of the first that is stored.

    A text model alone, or that of one that sees or hears too: by Idefics2's names, by those that transformers
    5 gives them, and by those of before.
    """
    found = (base for base in TEXTS if is_stored(weights, f"{base}.embed_tokens"))
    base = next(found, TEXTS[0])
    return base, base.removesuffix("model") + "lm_head" if base.startswith("language") else "lm_head"
