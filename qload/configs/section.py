"""Validation of quantization configs by pydantic, with qload's errors."""

from math import prod
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

from qload.configs.claims import Claims, FoundConfig, value_text
from qload.errors import ConfigError, ShapeError
from qload.loader import ConfiguredFormat
from qload.loader.exclusion import Exclusions
from qload.spec import LayerHeaders

Model = TypeVar("Model", bound=BaseModel)


MAX_LAYER_SIZE = (1 << 31) - 1  # inputs or outputs
MAX_JSON_BYTES = 4096  # of a tensor; usual: 170
Block = Annotated[list[Annotated[int, Field(ge=1, le=MAX_LAYER_SIZE)]], Field(min_length=2, max_length=2)]


def one_of(*allowed: int | str) -> BeforeValidator:
    """Validator of few allowed values of one type; refuses 4.0 and True, which equal integers."""
    *others, last = map(repr, allowed)
    text = f"{', '.join(others)} or {last}" if others else last

    def check(value: Any) -> Any:
        if type(value) is not type(allowed[0]) or value not in allowed:
            raise PydanticCustomError("one_of", "Input should be {text}", {"text": text})
        return value

    return BeforeValidator(check)


def none_for_false(value: Any) -> Any:
    """Read False as None."""
    return None if value is False else value


Name = Annotated[str, Field(min_length=1)] | None


class Excerpt(BaseModel):
    """Some keys of a model's config; other keys are ignored."""

    model_config: ClassVar[ConfigDict] = ConfigDict(strict=True, frozen=True, extra="ignore")


NameList = list[Annotated[str, Field(min_length=1)]]


class Entry(BaseModel):
    """An object in a quantization config; further keys stay, unchecked."""

    model_config: ClassVar[ConfigDict] = ConfigDict(strict=True, frozen=True, extra="allow")


class Section(Entry):
    """Keys common to the sections of all methods."""

    modules_to_not_convert: NameList | None = None

    lists: ClassVar[tuple[str, ...]] = ("modules_to_not_convert",)  # keys with excluded modules

    def exclusions(self, exclusion_type: type[Exclusions] = Exclusions) -> Exclusions:
        """Modules excluded by the section, under any of its keys."""
        stated, names = [], []
        for key in self.lists:
            listed = getattr(self, key)
            if listed:
                stated.append(key)
                names += listed
        return exclusion_type(tuple(names), " or ".join(stated or self.lists))

    def claims(
        self, source: FoundConfig, method: str, fmt: str, *formats: ConfiguredFormat, **claims: Any
    ) -> Claims:
        """Claims of this section: its method, format and excluded modules, and further `claims`."""
        if "exclusions" not in claims:
            claims["exclusions"] = self.exclusions()
        return Claims(method, fmt, file=source.file, section=source.section, formats=formats, **claims)


def agree(source: FoundConfig, *keys: str) -> Any:
    """Value of a setting with several spellings of its key; ConfigError for different values."""
    stated = [(key, source.values[key]) for key in keys if source.values.get(key) is not None]
    for key, value in stated[1:]:
        first_key, first = stated[0]
        if type(value) is type(first) in (int, str) and value == first:
            continue
        if value_text(value) != value_text(first):  # texts differ for 1 and True, and no comparison recurses
            raise source.error(key, f"{value_text(first)} as in {first_key}", value_text(value))
    return stated[0][1] if stated else None


def check_group_size(source: FoundConfig, size: int, *keys: str) -> None:
    """Raise ConfigError for a group size of 0; `keys`: spellings of the key, by default `group_size`."""
    if size == 0:
        raise ConfigError(source.file, source.key(*(keys or ("group_size",))), "-1 or at least 1", "0")


def validate(model: type[Model], source: FoundConfig) -> Model:
    """Validate a section with a pydantic model; ConfigError with key, expected value, value."""
    try:
        return model.model_validate(dict(source.values))
    except ValidationError as error:
        key, expected, got, others = _invalid_value(error)
        also = ", ".join(dict.fromkeys(map(source.key, others)))
        raise source.error(key, expected, got, f"also     {also}" if also else "") from error


def validate_json_tensor(model: type[Model], headers: LayerHeaders, name: str) -> Model:
    """Validate JSON in the bytes of a fact; ShapeError if too long, ConfigError as `validate`."""
    text = headers.facts[name]
    if prod(text.shape) > MAX_JSON_BYTES:
        full, file = headers.names.full(name), headers.names.file(name)
        raise ShapeError(full, f"at most {MAX_JSON_BYTES} bytes", tuple(text.shape), file)
    try:
        return model.model_validate_json(bytes(text.flatten().tolist()))
    except ValidationError as error:
        key, expected, got, _ = _invalid_value(error)
        raise headers.value_error(name, key or "JSON", expected, got) from error


def _invalid_value(error: ValidationError) -> tuple[str, str, str, list[str]]:
    """Key of the first invalid value, the expected value, the value, and the keys of other invalid values."""
    first, *others = error.errors(include_url=False, include_context=False)
    missing = first["type"] == "missing"
    return (
        ".".join(map(str, first["loc"])),
        "a value" if missing else first["msg"].removeprefix("Input should be "),
        "nothing" if missing else value_text(first["input"]),
        [str(other["loc"][0]) for other in others],
    )
