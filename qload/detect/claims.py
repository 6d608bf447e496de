"""What a quantization config claims, validated: a malformed one raises, it never becomes a default."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

from qload.detect.files import Found, shown
from qload.errors import ConfigError, UnsupportedFormatError

Model = TypeVar("Model", bound=BaseModel)

GPTQ_FORMATS = ("gptq", "gptq_v2")
AWQ_FORMATS = ("gemm",)
MARLIN_FORMATS = ("marlin", "marlin_24")
KNOWN = (
    "gptq (checkpoint_format gptq, gptq_v2, marlin, marlin_24)",
    "awq (version gemm)",
    "marlin (checkpoint_format marlin, marlin_24)",
)


@dataclass(frozen=True)
class Claims:
    """What a config says about the layers it does not exclude; None where it says nothing."""

    method: str
    format: str
    bits: int
    group_size: int
    sym: bool | None
    desc_act: bool | None
    file: str
    section: str = ""


def _one_of(*allowed: int) -> BeforeValidator:
    """A whole number that is one of these; 4.0 and True are none, although they are equal to one."""
    text = " or ".join(
        [", ".join(map(str, allowed[:-1])), str(allowed[-1])] if allowed[1:] else [str(allowed[0])]
    )

    def check(value: Any) -> Any:
        if type(value) is not int or value not in allowed:
            raise PydanticCustomError("one_of", "Input should be {text}", {"text": text})
        return value

    return BeforeValidator(check)


def _none_for_false(value: Any) -> Any:
    return None if value is False else value


Name = Annotated[str, Field(min_length=1)] | None


class _Section(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="allow")

    modules_to_not_convert: list[str] | None = None


class _GPTQ(_Section):
    bits: Annotated[int, _one_of(2, 3, 4, 8)]
    group_size: int = Field(ge=-1)
    desc_act: bool | None = None
    sym: bool | None = None
    checkpoint_format: Name = None
    format: Name = None
    pack_dtype: Literal["int32"] | None = None
    is_marlin_format: bool | None = None
    lm_head: bool | None = None
    dynamic: Annotated[dict[str, dict[str, Any]] | None, BeforeValidator(_none_for_false)] = None


class _Marlin(_Section):
    bits: Annotated[int, _one_of(4, 8)] = 4
    group_size: int = Field(ge=-1)
    desc_act: Literal[False] | None = None
    sym: Literal[True] | None = None
    checkpoint_format: Name = None
    format: Name = None
    pack_dtype: Literal["int32"] | None = None
    is_marlin_format: bool | None = None
    is_marlin_24_format: bool | None = None


class _AWQ(_Section):
    bits: Annotated[int, _one_of(4, 8)] = Field(validation_alias=AliasChoices("bits", "w_bit"))
    group_size: int = Field(ge=-1, validation_alias=AliasChoices("group_size", "q_group_size"))
    zero_point: bool | None = None
    version: Name = None
    checkpoint_format: Name = None
    format: Name = None
    pack_dtype: Literal["int32"] | None = None
    backend: str | None = None


def read_claims(found: Found) -> Claims:
    """A config's claims; ConfigError names file, key, what was expected and what is there.

    A method, or a variant of one, that this qload does not read is an UnsupportedFormatError.
    """
    method = _method(found)
    if method in ("marlin", "gptq_marlin_24"):
        return _marlin(found, "marlin_24" if method == "gptq_marlin_24" else "marlin")
    if method == "gptq":
        return _gptq(found)
    if method == "awq":
        return _awq(found)
    raise UnsupportedFormatError(method, f"the quant_method of {found.file} has no reader", KNOWN)


def _gptq(found: Found) -> Claims:
    read = _validate(_GPTQ, found)
    stated = _agree(found, "checkpoint_format", "format") or "gptq"
    if stated in MARLIN_FORMATS or read.is_marlin_format:
        return _marlin(found, "marlin")
    if stated not in GPTQ_FORMATS:
        raise UnsupportedFormatError(stated, f"the checkpoint_format of {found.file} has no reader", KNOWN)
    _group_size(found, read.group_size)
    for rule, override in (read.dynamic or {}).items():
        changed = {name: override[name] for name in ("bits", "group_size") if name in override}
        if changed and not rule.startswith("-:"):
            raise UnsupportedFormatError(
                "gptq with dynamic rules",
                f"rule {rule!r:.80} of {found.file} sets {shown(changed)}: modules differ",
                KNOWN,
            )
    return Claims(
        "gptq", stated, read.bits, read.group_size, read.sym, read.desc_act, found.file, found.section
    )


def _marlin(found: Found, default: str) -> Claims:
    """Codes that are packed for the kernel already: symmetric, groups in order."""
    read = _validate(_Marlin, found)
    stated = _agree(found, "checkpoint_format", "format")
    if read.is_marlin_24_format or default == "marlin_24":
        stated = stated if stated not in (None, "marlin", "gptq") else "marlin_24"
    stated = stated or default
    if stated not in MARLIN_FORMATS:
        raise UnsupportedFormatError(stated, f"the checkpoint_format of {found.file} has no reader", KNOWN)
    _group_size(found, read.group_size)
    return Claims("marlin", stated, read.bits, read.group_size, True, False, found.file, found.section)


def _awq(found: Found) -> Claims:
    read = _validate(_AWQ, found)
    _agree(found, "bits", "w_bit")
    _agree(found, "group_size", "q_group_size")
    variants = [name.lower() for name in (read.version, read.checkpoint_format, read.format) if name]
    for variant in variants or ["gemm"]:
        if variant not in AWQ_FORMATS:
            raise UnsupportedFormatError(
                f"awq_{variant}", f"the version of {found.file} has no reader", KNOWN
            )
    if read.backend == "llm-awq":
        raise UnsupportedFormatError("llm-awq", f"the backend of {found.file} packs in another order", KNOWN)
    _group_size(found, read.group_size)
    sym = None if read.zero_point is None else not read.zero_point
    return Claims("awq", "gemm", read.bits, read.group_size, sym, None, found.file, found.section)


def _method(found: Found) -> str:
    method = _agree(found, "quant_method", "method")
    if method is None and not found.section:
        method = _method_of_own_file(found.values)
    if not isinstance(method, str) or not method:
        raise ConfigError(
            found.file, found.key("quant_method"), "the name of a quantization method", shown(method)
        )
    return method


def _method_of_own_file(values: Mapping[str, Any]) -> str | None:
    """The tools' own files need not name the method: AWQ's say `version`, GPTQ's say `desc_act`."""
    if any(key in values for key in ("version", "zero_point", "w_bit")):
        return "awq"
    return "gptq" if any(key in values for key in ("desc_act", "sym", "damp_percent")) else None


def _agree(found: Found, *keys: str) -> Any:
    """The value of a setting that has two spellings; ConfigError where they differ."""
    there = [(key, found.values[key]) for key in keys if found.values.get(key) is not None]
    for key, value in there[1:]:
        if shown(value) != shown(there[0][1]):  # so that 1 is not True, and no comparison goes deep
            raise ConfigError(
                found.file, found.key(key), f"{shown(there[0][1])} as in {there[0][0]}", shown(value)
            )
    return there[0][1] if there else None


def _group_size(found: Found, size: int) -> None:
    if size == 0:
        raise ConfigError(found.file, found.key("group_size"), "-1 or at least 1", "0")


def _validate(model: type[Model], found: Found) -> Model:
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
