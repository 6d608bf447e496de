"""Sizes in terms of other sizes, as text: `heads*head+2*kv*head` is a sum of products; `/` divides down."""

import re
from collections.abc import Mapping
from functools import cache

TOKEN = re.compile(r"[+*/]|\d+|[a-z_]+")


@cache
def terms(text: str) -> tuple[tuple[tuple[str, str], ...], ...]:
    """Each product of a sum, as (sign, factor) from left to right; ValueError where a text is none."""
    tokens = TOKEN.findall(text)
    if "".join(tokens) != text or len(tokens) % 2 == 0:
        raise ValueError(f"no sum of products: {text}")
    found: list[list[tuple[str, str]]] = []
    for sign, factor in zip(["+", *tokens[1::2]], tokens[::2], strict=True):
        if sign == "+":
            found.append([("*", factor)])
        else:
            found[-1].append((sign, factor))
    return tuple(map(tuple, found))


def value(text: str, sizes: Mapping[str, int | None]) -> int | None:
    """What an expression comes to; None where it needs a size that is not known, or divides by zero."""
    total = 0
    for product in terms(text):
        result = 1
        for sign, factor in product:
            size = int(factor) if factor.isdecimal() else sizes[factor]
            if size is None or (sign == "/" and not size):
                return None
            result = result * size if sign == "*" else result // size
        total += result
    return total


def names(text: str) -> frozenset[str]:
    """The sizes that an expression needs."""
    return frozenset(factor for product in terms(text) for _, factor in product if not factor.isdecimal())
