"""What the readers of all methods share: claims, and configs validated by pydantic into qload's errors."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

from qload.detect.files import FoundConfig, shown
from qload.errors import ConfigError
from qload.loader import ConfiguredFormat, FormatLoader
from qload.loader.exclusion import Exclusions
from qload.spec import LayerClaims

NOTHING = Exclusions()
Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True)
class Claims:
    """Claims of a config about the layers it does not exclude; None for a missing claim.

    `formats`: formats of its layers, as the loader takes them. `loader`: the factory of another loader, if
    modules differ. `notes`: remarks on keys that change no weight. `unused`: names of tensors without meaning
    beside plain weights.
    """

    method: str
    format: str
    file: str
    section: str = ""
    bits: int | None = None
    group_size: int | None = None
    sym: bool | None = None
    desc_act: bool | None = None
    formats: tuple[ConfiguredFormat, ...] = ()
    exclusions: Exclusions = NOTHING
    loader: Callable[[], FormatLoader] | None = None
    notes: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()

    @property
    def of_layers(self) -> LayerClaims:
        """Claims of the base config, for layers without an entry of their own."""
        return LayerClaims(self.bits, self.group_size, self.sym, self.desc_act)

    def facts(self) -> Mapping[str, Any]:
        """The claims alone, for a report."""
        names = ("method", "format", "bits", "group_size", "sym", "desc_act", "file", "section")
        return {name: getattr(self, name) for name in names}


def one_of(*allowed: int) -> BeforeValidator:
    """A whole number that is one of these; 4.0 and True are none, although they are equal to one."""
    text = " or ".join(
        [", ".join(map(str, allowed[:-1])), str(allowed[-1])] if allowed[1:] else [str(allowed[0])]
    )

    def check(value: Any) -> Any:
        if type(value) is not int or value not in allowed:
            raise PydanticCustomError("one_of", "Input should be {text}", {"text": text})
        return value

    return BeforeValidator(check)


def none_for_false(value: Any) -> Any:
    """False means that there is none."""
    return None if value is False else value


Name = Annotated[str, Field(min_length=1)] | None


class Excerpt(BaseModel):
    """Some keys of a model's config; what stands beside them is not read."""

    model_config: ClassVar[ConfigDict] = ConfigDict(strict=True, frozen=True, extra="ignore")


class Section(BaseModel):
    """What every method's section may say."""

    model_config: ClassVar[ConfigDict] = ConfigDict(strict=True, frozen=True, extra="allow")

    modules_to_not_convert: list[Annotated[str, Field(min_length=1)]] | None = None

    lists: ClassVar[tuple[str, ...]] = ("modules_to_not_convert",)  # the keys of what is left out

    def exclusions(self, kind: type[Exclusions] = Exclusions) -> Exclusions:
        """The modules that the section leaves out, under whichever keys."""
        said = {key: names for key in self.lists if (names := getattr(self, key))}
        return kind(tuple(name for names in said.values() for name in names), " or ".join(said or self.lists))


def agree(found: FoundConfig, *keys: str) -> Any:
    """The value of a setting that has two spellings; ConfigError where they differ."""
    there = [(key, found.values[key]) for key in keys if found.values.get(key) is not None]
    for key, value in there[1:]:
        if shown(value) != shown(there[0][1]):  # so that 1 is not True, and no comparison goes deep
            raise ConfigError(
                found.file, found.key(key), f"{shown(there[0][1])} as in {there[0][0]}", shown(value)
            )
    return there[0][1] if there else None


def check_group_size(found: FoundConfig, size: int, *keys: str) -> None:
    """A group of no rows is none, or ConfigError; `keys`: spellings of the key, if not `group_size`."""
    if size == 0:
        raise ConfigError(found.file, found.key(*(keys or ("group_size",))), "-1 or at least 1", "0")


def validate(model: type[Model], found: FoundConfig) -> Model:
    """The section as the model has it, or ConfigError with the key, what it has to be, and what it is."""
    try:
        return model.model_validate(dict(found.values))
    except ValidationError as error:
        first, *others = error.errors(include_url=False, include_context=False)
        key = ".".join(str(part) for part in first["loc"])
        missing = first["type"] == "missing"
        raise ConfigError(
            found.file,
            found.key(key),
            "a value" if missing else first["msg"].removeprefix("Input should be "),
            "nothing" if missing else shown(first["input"]),
            "also     " + ", ".join(found.key(str(e["loc"][0])) for e in others) if others else "",
        ) from error
