"""JSON that is stored as a tensor of bytes: input from outside, validated by pydantic into qload's errors."""

from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from qload.errors import ConfigError, ShapeError
from qload.spec.weight import LayerHeaders

Model = TypeVar("Model", bound=BaseModel)

MAX_JSON_BYTES = 4096  # some 170 are usual


def read_blob(seen: LayerHeaders, field: str, model: type[Model]) -> Model:
    """A fact as the model has it, or ShapeError, or ConfigError with the key and what it has to be."""
    blob = seen.facts[field]
    if blob.numel() > MAX_JSON_BYTES:
        name, file = seen.names.full(field), seen.names.file(field)
        raise ShapeError(name, f"at most {MAX_JSON_BYTES} bytes", tuple(blob.shape), file)
    try:
        return model.model_validate_json(bytes(blob.flatten().tolist()))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        expected = first["msg"].removeprefix("Input should be ")
        key = ".".join(map(str, first["loc"])) or "JSON"
        raise wrong(
            seen, field, key, expected, None if first["type"] == "missing" else first["input"]
        ) from error


def wrong(seen: LayerHeaders, field: str, key: str, expected: str, got: Any) -> ConfigError:
    """The error for a value of a blob."""
    file = seen.names.file(field)
    shown = "nothing" if got is None else f"{got!r:.60}"
    return ConfigError(seen.names.full(field), key, expected, shown, f"in       {file}" if file else "")
