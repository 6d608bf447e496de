"""JSON in a tensor of bytes: hostile input, validated by pydantic with qload's errors."""

from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from qload.errors import ConfigError, ShapeError
from qload.spec.weight import LayerHeaders

Model = TypeVar("Model", bound=BaseModel)

MAX_JSON_BYTES = 4096  # usual: 170


def read_blob(headers: LayerHeaders, field: str, model: type[Model]) -> Model:
    """Validate the JSON in a fact; ShapeError if too long, ConfigError with key and expected value."""
    blob = headers.facts[field]
    if blob.numel() > MAX_JSON_BYTES:
        name, file = headers.names.full(field), headers.names.file(field)
        raise ShapeError(name, f"at most {MAX_JSON_BYTES} bytes", tuple(blob.shape), file)
    try:
        return model.model_validate_json(bytes(blob.flatten().tolist()))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        expected = first["msg"].removeprefix("Input should be ")
        key = ".".join(map(str, first["loc"])) or "JSON"
        raise wrong(
            headers, field, key, expected, None if first["type"] == "missing" else first["input"]
        ) from error


def wrong(headers: LayerHeaders, field: str, key: str, expected: str, got: Any) -> ConfigError:
    """Build the error for a value in the JSON of a fact."""
    file = headers.names.file(field)
    shown = "nothing" if got is None else f"{got!r:.60}"
    return ConfigError(headers.names.full(field), key, expected, shown, f"in       {file}" if file else "")
