"""What no declaration tells of a layer to be drawn: its facts, from a function for each format that has some.

A function gets the layer's config and the sizes drawn so far, and returns facts by field. It may set the
sizes of free axes that follow from what it returns.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from qload.spec import Weight

FACTS: dict[type[Weight], Callable[[Any, dict[str, int]], dict[str, Tensor]]] = {}
