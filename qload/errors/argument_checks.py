"""Checks of arguments against the annotations of a function, with the argument's name in the error.

    @checked
    def repack(weight: Weight, layout: str, *, out: Weight | None = None) -> Weight: ...

A bool is not an integer, and a string is not a sequence of strings. The items of mappings and sequences are
checked too. Unchecked are protocols without `runtime_checkable`, type variables, and names imported under
TYPE_CHECKING.
"""

import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from functools import cache, wraps
from itertools import islice
from numbers import Integral, Real
from types import NoneType, SimpleNamespace, UnionType
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from qload.errors.exceptions import ArgumentError
from qload.lazy_torch import replace_names

P = ParamSpec("P")
R = TypeVar("R")
Test = Callable[[Any], bool]


class AcceptedValues(NamedTuple):
    """Values of an annotation: of exact `types`, instances of `classes`, and those that pass a `test`."""

    types: Collection[type[Any]] = ()
    classes: tuple[type[Any], ...] = ()
    test: Test = lambda value: False


Parameter = tuple[str, AcceptedValues, object]  # name, accepted values, annotation

ANY = AcceptedValues(classes=(object,))
ANY_PARAMETER: Parameter = ("", ANY, Any)
_TEXT_TYPES = (str, bytes, bytearray)


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function to raise ArgumentError for an argument of a wrong type."""

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
    """Check the arguments of a call; missing and unknown arguments are left to Python.

    `lead`: prefix of the argument's name in the error.
    """
    positional, keywords, other_keywords = _parameter_tests(function)
    for index, value in enumerate(arguments):
        name, (types, classes, test), hint = positional[min(index, len(positional) - 1)]
        if not (type(value) in types or isinstance(value, classes) or test(value)):
            raise argument_error(lead + name, hint, value)
    for name, value in named.items():
        _, (types, classes, test), hint = keywords.get(name, other_keywords)
        if not (type(value) in types or isinstance(value, classes) or test(value)):
            raise argument_error(lead + name, hint, value)


def check_type(argument: str, value: object, hint: Any) -> None:
    """Check one argument, in a function with more specific checks of its own."""
    types, classes, test = _accepted_values(hint)
    if not (type(value) in types or isinstance(value, classes) or test(value)):
        raise argument_error(argument, hint, value)


def check_values(argument: str, tensor: Any) -> None:
    """Raise ArgumentError for a tensor on device "meta", which has no values."""
    if tensor.is_meta:
        raise ArgumentError(argument, "a tensor with values", "a tensor on device meta")


def check_fields(record: object) -> None:
    """Check a dataclass's fields by their annotations, in `__post_init__`; ArgumentError for a wrong one."""
    kind: Any = type(record)
    for name, ((types, classes, test), hint) in _field_tests(kind).items():
        value = getattr(record, name)
        if not (type(value) in types or isinstance(value, classes) or test(value)):
            raise argument_error(name, hint, value)


def argument_error(argument: str, hint: object, value: object) -> ArgumentError:
    """Create the error for a value of a wrong type."""
    return ArgumentError(argument, format_type(hint), f"{_format_value(value):.80}")


def _format_value(value: object) -> str:
    """Format a short value, or the type of any other; tensors are not touched."""
    if isinstance(value, (*_TEXT_TYPES, int, float, NoneType)):
        return repr(value)
    if isinstance(value, Mapping):
        entries = islice(value.items(), 4)
        return f"{{{', '.join(f'{_format_value(key)}: {_format_value(each)}' for key, each in entries)}}}"
    if isinstance(value, list | tuple):
        return f"{_type_name(type(value))} of {', '.join(map(_format_value, value[:4])) or 'nothing'}"
    return _type_name(type(value))


def format_type(hint: Any) -> str:
    """Format an annotation for an error: `int or None`."""
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(map(format_type, get_args(hint)))
    if get_origin(hint) is Literal:
        return " or ".join(map(repr, get_args(hint)))
    arguments = [format_type(argument) for argument in get_args(hint) if not isinstance(argument, list)]
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
    """Return the positional parameters, the keywords, and the parameter of other keywords.

    The last positional parameter is that of `*names`, or any value: Python refuses the argument.
    """
    hints, positional, keywords = _resolve_hints(function), [], {}
    other_arguments = other_keywords = ANY_PARAMETER
    for name, parameter in inspect.signature(function).parameters.items():
        test = (name, _accepted_values(hints.get(name, Any)), hints.get(name, Any))
        if parameter.kind is parameter.VAR_KEYWORD:
            other_keywords = test
        elif parameter.kind is parameter.VAR_POSITIONAL:
            other_arguments = test
        else:
            keywords[name] = test
            if parameter.kind is not parameter.KEYWORD_ONLY:
                positional.append(test)
    return [*positional, other_arguments], keywords, other_keywords


@cache
def _field_tests(record: Any) -> Mapping[str, tuple[AcceptedValues, object]]:
    hints = _resolve_hints(record)
    return {
        f.name: (_accepted_values(hint), hint) for f in fields(record) for hint in [hints.get(f.name, Any)]
    }


def _resolve_hints(owner: Any) -> Mapping[str, Any]:
    """Return the annotations of a function or class by name, without those of names under TYPE_CHECKING."""
    replace_names()
    try:
        return get_type_hints(owner)
    except NameError:
        hints: dict[str, Any] = {}
        for each in reversed(owner.__mro__) if inspect.isclass(owner) else (owner,):
            names = vars(sys.modules[each.__module__])
            for name, hint in getattr(each, "__annotations__", {}).items():
                with suppress(NameError):
                    hints |= get_type_hints(SimpleNamespace(__annotations__={name: hint}), names)
        return hints


@cache
def _accepted_values(hint: Any) -> AcceptedValues:
    """Return the types, classes or the test of an annotation."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint in (None, NoneType):
        return AcceptedValues(classes=(NoneType,))
    if origin in (Union, UnionType):
        return _union(list(map(_accepted_values, arguments)))
    if origin is Literal:
        return AcceptedValues(
            test=lambda value: any(type(value) is type(one) and value == one for one in arguments)
        )
    if origin is not None:
        return _generic(origin, arguments)
    if hint in (int, float):
        number: type[Any] = Integral if hint is int else Real
        return AcceptedValues(
            (hint,), test=lambda value: isinstance(value, number) and type(value) is not bool
        )
    if getattr(hint, "_is_protocol", False):  # from Python 3.12 on, runtime_checkable is not inherited
        return _protocol(hint) if vars(hint).get("_is_runtime_protocol") else ANY
    return AcceptedValues(classes=(hint,)) if inspect.isclass(hint) and hint is not Any else ANY


def _union(members: Sequence[AcceptedValues]) -> AcceptedValues:
    """Combine the members of a union."""
    classes = tuple(kind for member in members for kind in member.classes)
    types = frozenset(kind for member in members for kind in member.types)
    return AcceptedValues(types, classes, lambda value: any(member.test(value) for member in members))


def _all_test(accepted: AcceptedValues) -> Callable[[Iterable[Any]], bool]:
    """Return a test for all values of a container."""
    types, classes, test = accepted
    if accepted == ANY:
        return lambda values: True
    return lambda values: all(
        type(value) in types or isinstance(value, classes) or test(value) for value in values
    )


def _protocol(hint: Any) -> AcceptedValues:
    """Return a test for a protocol with a cache of types: `isinstance` looks up every method."""
    types: set[type[Any]] = set()

    def test(value: Any) -> bool:
        if type(value) not in types and isinstance(value, hint):
            types.add(type(value))
        return type(value) in types

    return AcceptedValues(types, test=test)


def _generic(origin: Any, arguments: tuple[Any, ...]) -> AcceptedValues:
    """Return the test of a container and its items, of a class, or of a callable."""
    if origin is type:
        kind = arguments[0] if inspect.isclass(arguments[0]) else object
        return AcceptedValues(test=lambda value: isinstance(value, type) and issubclass(value, kind))
    if origin is tuple:
        return AcceptedValues(test=_tuple_test(arguments))
    if issubclass(origin, Mapping):
        keys, values = (_all_test(_accepted_values(argument)) for argument in arguments)
        return AcceptedValues(
            test=lambda value: isinstance(value, origin) and keys(value) and values(value.values())
        )
    if issubclass(origin, Iterable) and arguments:
        items = _all_test(_accepted_values(arguments[0]))
        is_repeatable = issubclass(origin, Sequence | set | frozenset)  # an iterator is not consumed
        return AcceptedValues(
            test=lambda value: (
                isinstance(value, origin)
                and not isinstance(value, _TEXT_TYPES)
                and (not is_repeatable or items(value))
            )
        )
    return AcceptedValues(classes=(origin,))


def _tuple_test(arguments: tuple[Any, ...]) -> Test:
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        items = _all_test(_accepted_values(arguments[0]))
        return lambda value: isinstance(value, tuple) and items(value)
    tests = [_all_test(_accepted_values(argument)) for argument in arguments]
    return lambda value: (
        isinstance(value, tuple)
        and len(value) == len(tests)
        and all(test([item]) for test, item in zip(tests, value, strict=True))
    )
