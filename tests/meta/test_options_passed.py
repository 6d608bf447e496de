"""Options that a function has and a function that it calls has too: passed on, or listed in the golden file.

An option that is accepted and forgotten changes nothing, and no test of the called function sees it.
"""

import ast
from collections import defaultdict
from collections.abc import Iterator

from syrupy.assertion import SnapshotAssertion

from tests.paths import ROOT

Function = ast.FunctionDef | ast.AsyncFunctionDef
COMMON = {"self", "cls", "name", "x", "weight", "weights", "prefix", "layer", "config", "value", "tensor"}


def parsed() -> Iterator[tuple[str, ast.Module]]:
    """Yield the name and the tree of every module."""
    for path in sorted((ROOT / "qload").rglob("*.py")):
        yield ".".join(path.relative_to(ROOT).with_suffix("").parts), ast.parse(path.read_text())


def options(function: Function) -> list[str]:
    """Return the parameters with defaults, in order."""
    arguments = function.args
    positional = [each.arg for each in (*arguments.posonlyargs, *arguments.args)]
    keywords = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    given = positional[len(positional) - len(arguments.defaults) :] if arguments.defaults else []
    return [*given, *(each.arg for each, default in keywords if default is not None)]


def accepted(trees: list[tuple[str, ast.Module]]) -> dict[str, tuple[list[str], set[str]]]:
    """Return, by name, the positional parameters and the options of functions of which there is one."""
    found: dict[str, list[tuple[list[str], set[str]]]] = defaultdict(list)
    for _, tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, Function):
                positional = [each.arg for each in node.args.args if each.arg not in ("self", "cls")]
                found[node.name].append((positional, set(options(node))))
    return {name: each[0] for name, each in found.items() if len(each) == 1}


def forgotten(caller: Function, known: dict[str, tuple[list[str], set[str]]]) -> Iterator[tuple[str, str]]:
    """Yield each called function and its option that the caller has too and does not pass."""
    own = {each.arg for each in (*caller.args.args, *caller.args.kwonlyargs)} - COMMON
    for node in ast.walk(caller):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        spread = any(keyword.arg is None for keyword in node.keywords)
        if name not in known or spread or any(isinstance(each, ast.Starred) for each in node.args):
            continue
        positional, optional = known[name]
        passed = {*positional[: len(node.args)], *(keyword.arg for keyword in node.keywords)}
        yield from ((name, option) for option in sorted((own & optional) - passed))


def test_an_option_is_passed_on_or_listed(golden: SnapshotAssertion) -> None:
    trees = list(parsed())
    known = accepted(trees)
    lines = [
        f"{module}.{node.name} does not pass {option} on to {name}"
        for module, tree in trees
        for node in ast.walk(tree)
        if isinstance(node, Function)
        for name, option in forgotten(node, known)
    ]

    assert "\n".join(sorted(set(lines))) == golden


def test_the_walk_sees_an_option_that_is_forgotten() -> None:
    source = "def read(path, dtype=None): ...\ndef load(path, dtype=None):\n    return read(path)\n"
    tree = ast.parse(source)

    (found,) = forgotten(tree.body[1], accepted([("m", tree)]))  # type: ignore[arg-type]

    assert found == ("read", "dtype")
