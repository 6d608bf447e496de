"""JSON that may be hostile: no key twice in one object, no text that cannot be written out again."""

import json
from collections.abc import Callable, Sequence
from typing import Any

from qload.errors import StorageError


def parse_json(text: bytes, file: str, constant: Callable[[str], Any] | None = None) -> Any:
    """Any JSON value; StorageError for a key that stands twice, ValueError or RecursionError for no JSON.

    `constant`: what NaN and the infinities become, which are none of JSON's.
    """
    value = json.loads(text, object_pairs_hook=lambda pairs: _unique(pairs, file), parse_constant=constant)
    if b"\\u" in text:  # half of a surrogate pair is no character, and no terminal and no file takes it
        json.dumps(value, ensure_ascii=False).encode()
    return value


def load_json(text: bytes, file: str, rule: str) -> dict[str, Any]:
    """UTF-8 -> a JSON object; StorageError with the rule."""
    try:
        value = parse_json(text.decode().encode(), file)
    except StorageError:
        raise
    except (ValueError, RecursionError) as error:
        raise StorageError(file, rule, f"not JSON: {error!s:.160}") from error
    if not isinstance(value, dict):
        raise StorageError(file, rule, f"a JSON object is needed, not {type(value).__name__}")
    return value


def shortened(name: str) -> str:
    """A name as an error shows it, however long it is."""
    return name if len(name) <= 200 else f"{name[:80]}... ({len(name)} letters)"


def _unique(pairs: Sequence[tuple[str, Any]], file: str) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        name = shortened(twice.encode(errors="replace").decode())
        raise StorageError(file, "duplicate-key", "stands twice in one JSON object", name)
    return entries
