"""Functions and statements around the changed lines of a module."""

import ast
from collections.abc import Iterable


def runs_at_import(source: str, lines: Iterable[int]) -> bool:
    """Whether a line is outside of every function; its coverage is that of the first test alone."""
    functions = [span for node, span in _spans(source) if isinstance(node, ast.FunctionDef)]
    return not all(any(line in span for span in functions) for line in lines)


def statements_around(source: str, lines: Iterable[int]) -> set[int]:
    """Lines of the smallest statements around some lines."""
    spans = [span for _, span in _spans(source)]
    around = ([span for span in spans if line in span] for line in lines)
    return {line for found in around if found for line in min(found, key=len)}


def _spans(source: str) -> list[tuple[ast.stmt, range]]:
    """Each statement with its lines, from 1."""
    statements = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt))
    return [(node, range(node.lineno, (node.end_lineno or node.lineno) + 1)) for node in statements]
