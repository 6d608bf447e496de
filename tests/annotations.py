"""Parameters of functions and classes, with their annotations evaluated."""

import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any


def parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters by name; an annotation with a name under TYPE_CHECKING stays text."""
    return {
        name: parameter.replace(annotation=evaluated(function, parameter.annotation))
        for name, parameter in inspect.signature(function).parameters.items()
    }


def evaluated(function: Callable[..., Any], annotation: Any) -> Any:
    """Evaluate an annotation in the module of a function, or of a class and its bases."""
    owners = inspect.getmro(function) if inspect.isclass(function) else (inspect.unwrap(function),)
    for owner in owners if isinstance(annotation, str) else ():
        try:
            return eval(annotation, vars(sys.modules[owner.__module__]))
        except NameError:
            continue
    return annotation
