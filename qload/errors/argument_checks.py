"""Arguments of other types than a signature says: refused by name, before anything is done.

    @checked
    def repack(weight: Weight, layout: str, *, out: Weight | None = None) -> Weight: ...

The annotations are the check: what they say is not said twice. A whole number is no `bool`, a text is no
sequence of texts, and a mapping or a sequence is looked through. A protocol that cannot be asked, a type
variable and a name that is imported for type checkers only admit everything.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import cache, wraps
from itertools import islice
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from qload.errors.exceptions import ArgumentError

P = ParamSpec("P")
R = TypeVar("R")
# Classes, of which a value is an instance, or a test for what no class says.
Test = Callable[[Any], bool]
AcceptedValues = tuple[type[Any], ...] | Test

Parameter = tuple[str, AcceptedValues, object]  # name, admitted values, annotation

ANY: tuple[type[Any], ...] = (object,)
ANY_PARAMETER: Parameter = ("", ANY, Any)
_TEXT_TYPES = (str, bytes, bytearray)


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """The same function, which raises ArgumentError for an argument of another type than it says."""

    @wraps(function)
    def checks(*arguments: P.args, **named: P.kwargs) -> R:
        check_call(function, arguments, named)
        return function(*arguments, **named)

    return checks


def check_call(
    function: Callable[..., object],
    arguments: Sequence[object],
    named: Mapping[str, object],
    lead: str = "",
) -> None:
    """The arguments that a function is called with; those that are missing or unknown are left to Python.

    `lead`: what the error says before an argument's name.
    """
    places, names, loose = _parameter_tests(function)
    for place, value in enumerate(arguments):
        name, admitted, hint = places[min(place, len(places) - 1)]
        if not (isinstance(value, admitted) if isinstance(admitted, tuple) else admitted(value)):
            raise argument_error(lead + name, hint, value)
    for name, value in named.items():
        _, admitted, hint = names.get(name, loose)
        if not (isinstance(value, admitted) if isinstance(admitted, tuple) else admitted(value)):
            raise argument_error(lead + name, hint, value)


def check_type(argument: str, value: object, hint: Any) -> None:
    """One argument of a type, where a function has checks of its own that say more."""
    if not _as_function(_accepted_values(hint))(value):
        raise argument_error(argument, hint, value)


def check_values(argument: str, tensor: Any) -> None:
    """Refuse a tensor on device "meta", which has a shape and no values: ArgumentError."""
    if tensor.is_meta:
        raise ArgumentError(argument, "a tensor with values", "one on meta, which has none")


def check_fields(record: object) -> None:
    """The fields of a dataclass that was made just now."""
    kind: Any = type(record)
    for name, (admitted, hint) in _field_tests(kind).items():
        value = getattr(record, name)
        if not (isinstance(value, admitted) if isinstance(admitted, tuple) else admitted(value)):
            raise argument_error(name, hint, value)


def argument_error(argument: str, hint: object, value: object) -> ArgumentError:
    """The error for a value that a type does not admit."""
    return ArgumentError(argument, format_type(hint), f"{_format_value(value):.80}")


def _format_value(value: object) -> str:
    """A value where it is short to say, its type where it is not: nothing is asked of a tensor."""
    if isinstance(value, (*_TEXT_TYPES, int, float, NoneType)):
        return repr(value)
    if isinstance(value, Mapping):
        entries = islice(value.items(), 4)
        return f"{{{', '.join(f'{_format_value(key)}: {_format_value(each)}' for key, each in entries)}}}"
    if isinstance(value, list | tuple):
        return f"{_type_name(type(value))} of {', '.join(map(_format_value, value[:4])) or 'nothing'}"
    return _type_name(type(value))


def format_type(hint: Any) -> str:
    """A type as an error says it: `int or None`."""
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(format_type(each) for each in get_args(hint))
    if get_origin(hint) is Literal:
        return " or ".join(map(repr, get_args(hint)))
    arguments = [format_type(each) for each in get_args(hint) if not isinstance(each, list)]
    name = _type_name(get_origin(hint) or hint)
    return f"{name}[{', '.join(arguments)}]" if arguments and get_origin(hint) is not Callable else name


def _type_name(hint: Any) -> str:
    if hint in (None, NoneType):
        return "None"
    if hint is Ellipsis:
        return "..."
    module = getattr(hint, "__module__", "")
    return f"{'torch.' if module.split('.')[0] == 'torch' else ''}{getattr(hint, '__name__', str(hint))}"


@cache
def _parameter_tests(
    function: Callable[..., object],
) -> tuple[list[Parameter], dict[str, Parameter], Parameter]:
    """What is admitted at each place, under each name, and under any other name.

    The last place is what `*names` says, or nothing: Python refuses what comes there.
    """
    hints, places, names, rest, loose = _resolve_hints(function), [], {}, ANY_PARAMETER, ANY_PARAMETER
    for name, parameter in inspect.signature(function).parameters.items():
        found = (name, _accepted_values(hints.get(name, Any)), hints.get(name, Any))
        if parameter.kind is parameter.VAR_KEYWORD:
            loose = found
        elif parameter.kind is parameter.VAR_POSITIONAL:
            rest = found
        else:
            names[name] = found
            if parameter.kind is not parameter.KEYWORD_ONLY:
                places.append(found)
    return [*places, rest], names, loose


@cache
def _field_tests(record: Any) -> Mapping[str, tuple[AcceptedValues, object]]:
    hints = _resolve_hints(record)
    return {
        f.name: (_accepted_values(hint), hint) for f in fields(record) for hint in [hints.get(f.name, Any)]
    }


def _resolve_hints(owner: Any) -> Mapping[str, Any]:
    try:
        return get_type_hints(owner)
    except NameError:  # one is imported for type checkers only: the others are as they stand
        held = getattr(owner, "__annotations__", {})
        return {name: hint for name, hint in held.items() if not isinstance(hint, str)}


@cache
def _accepted_values(hint: Any) -> AcceptedValues:
    """The classes or the test of an annotation."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint in (None, NoneType):
        return (NoneType,)
    if origin in (Union, UnionType):
        return _union_test([_accepted_values(each) for each in arguments])
    if origin is Literal:
        return lambda value: any(type(value) is type(each) and value == each for each in arguments)
    if origin is not None:
        return _generic_test(origin, arguments)
    if hint in (int, float):
        number: type[Any] = Integral if hint is int else Real
        return lambda value: type(value) is hint or (isinstance(value, number) and type(value) is not bool)
    if getattr(hint, "_is_protocol", False):  # that a base can be asked is not enough, from Python 3.12 on
        return _protocol_test(hint) if vars(hint).get("_is_runtime_protocol") else ANY
    return (hint,) if inspect.isclass(hint) and hint is not Any else ANY


def _union_test(several: Sequence[AcceptedValues]) -> AcceptedValues:
    """The classes of all members of a union, or a test where one of them is a test."""
    classes = tuple(kind for each in several if isinstance(each, tuple) for kind in each)
    tests = [each for each in several if not isinstance(each, tuple)]
    if not tests:
        return classes
    return lambda value: isinstance(value, classes) or any(test(value) for test in tests)


def _as_function(admitted: AcceptedValues) -> Test:
    """The same as a function."""
    if not isinstance(admitted, tuple):
        return admitted
    return lambda value: isinstance(value, admitted)


def _all_test(admitted: AcceptedValues) -> Callable[[Iterable[Any]], bool]:
    """A test for all values of a container."""
    if not isinstance(admitted, tuple):
        return lambda values: all(map(admitted, values))
    if admitted == ANY:
        return lambda values: True
    return lambda values: all(isinstance(value, admitted) for value in values)


def _protocol_test(hint: Any) -> Test:
    """A test for the methods of a protocol, once for each type: to look for every method takes long."""
    known: set[type[Any]] = set()

    def admits(value: Any) -> bool:
        if type(value) not in known and isinstance(value, hint):
            known.add(type(value))
        return type(value) in known

    return admits


def _generic_test(origin: Any, arguments: tuple[Any, ...]) -> AcceptedValues:
    """Containers with their contents, where looking does not use them up; classes; callables."""
    if origin is type:
        kind = arguments[0] if inspect.isclass(arguments[0]) else object
        return lambda value: isinstance(value, type) and issubclass(value, kind)
    if origin is tuple:
        return _tuple_test(arguments)
    if issubclass(origin, Mapping):
        keys, values = (_all_test(_accepted_values(each)) for each in arguments)
        return lambda value: isinstance(value, origin) and keys(value) and values(value.values())
    if issubclass(origin, Iterable) and arguments:
        each, whole = (
            _all_test(_accepted_values(arguments[0])),
            issubclass(origin, Sequence | set | frozenset),
        )
        return lambda value: (
            isinstance(value, origin) and not isinstance(value, _TEXT_TYPES) and (not whole or each(value))
        )
    return (origin,)


def _tuple_test(arguments: tuple[Any, ...]) -> Test:
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        each = _all_test(_accepted_values(arguments[0]))
        return lambda value: isinstance(value, tuple) and each(value)
    several = [_as_function(_accepted_values(argument)) for argument in arguments]
    return lambda value: (
        isinstance(value, tuple)
        and len(value) == len(several)
        and all(admits(one) for admits, one in zip(several, value, strict=True))
    )
