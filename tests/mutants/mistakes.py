"""Mistakes of a person, as operators beside those of cosmic-ray: each changes one place of a module."""

import ast
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

OTHER_NAMES = {  # a function or attribute, and the one that a person writes in its place
    "any": "all",
    "all": "any",
    "min": "max",
    "max": "min",
    "amin": "amax",
    "amax": "amin",
    "startswith": "endswith",
    "endswith": "startswith",
    "removeprefix": "removesuffix",
    "removesuffix": "removeprefix",
    "append": "extend",
    "float16": "bfloat16",
    "bfloat16": "float16",
    "float32": "float16",
    "float64": "float32",
    "int32": "int64",
    "int64": "int32",
    "int8": "uint8",
    "uint8": "int8",
    "rows": "columns",
    "first": "last",
    "start": "stop",
    "stop": "start",
    "size_n": "size_k",
    "N": "K",
    "K": "N",
}
BUILTINS = ("any", "all", "min", "max")
OTHER_DEFAULTS = {"int": "1", "bool": "True", "str": '""', "torch.dtype": "torch.float16", "float": "1.0"}
UNSYMMETRIC = (ast.Sub, ast.FloorDiv, ast.Div, ast.Mod, ast.LShift, ast.RShift, ast.Pow, ast.MatMult)
WORDS = {  # of a message, and the one that a hasty person writes in its place
    "not": "",
    "no": "a",
    "rows": "columns",
    "columns": "rows",
    "least": "most",
    "most": "least",
    "more": "fewer",
    "inputs": "outputs",
    "outputs": "inputs",
    "bits": "bytes",
    "before": "after",
    "first": "last",
    "scales": "zeros",
    "dtype": "shape",
    "shape": "dtype",
}


@dataclass(frozen=True)
class Mistake:
    """The text between two offsets of a module, replaced."""

    operator: str
    line: int
    begin: int
    end: int
    replacement: str

    def apply(self, text: str) -> str:
        """The module with the mistake."""
        return text[: self.begin] + self.replacement + text[self.end :]


class Source:
    """A module as text and as a tree, with the offsets of its nodes."""

    def __init__(self, text: str) -> None:
        self.text, self.tree = text, ast.parse(text)
        self._encoded = [line.encode() for line in text.splitlines(keepends=True)]
        lengths = [len(line) for line in text.splitlines(keepends=True)]
        self._starts = [sum(lengths[:at]) for at in range(len(lengths) + 1)]
        self.docstrings = {id(node.body[0]) for node in ast.walk(self.tree) if _has_docstring(node)}
        self.annotations = {
            id(part)
            for node in ast.walk(self.tree)
            for name in ("annotation", "returns")
            if (annotation := getattr(node, name, None)) is not None
            for part in ast.walk(annotation)
        }

    def nodes(self) -> Iterator[ast.AST]:
        """Every node outside docstrings and annotations."""
        waiting: list[ast.AST] = [self.tree]
        while waiting:
            node = waiting.pop()
            if id(node) not in self.docstrings and id(node) not in self.annotations:
                yield node
                waiting += reversed(list(ast.iter_child_nodes(node)))

    def span(self, first: ast.AST, last: ast.AST | None = None) -> tuple[int, int]:
        """The offsets where a node begins and where it, or a later one, ends."""
        last = last or first
        return self._offset(first.lineno, first.col_offset), self._offset(
            last.end_lineno,
            last.end_col_offset,
        )

    def code(self, node: ast.AST) -> str:
        """The text of a node."""
        begin, end = self.span(node)
        return self.text[begin:end]

    def replaced(
        self, operator: str, node: ast.AST, replacement: str, last: ast.AST | None = None
    ) -> Mistake:
        """A mistake that writes another text for a node, or for all from it to another."""
        return Mistake(operator, node.lineno, *self.span(node, last), replacement)

    def _offset(self, line: int, column: int) -> int:
        return self._starts[line - 1] + len(self._encoded[line - 1][:column].decode())


def mistakes(text: str) -> list[Mistake]:
    """Every mistake of every operator in a module; some may break its syntax."""
    source = Source(text)
    return [made for operator in OPERATORS for node in source.nodes() for made in operator(source, node)]


def change_default(source: Source, node: ast.AST) -> Iterator[Mistake]:
    """Another default of a parameter or field: None for a value, or a value of the annotation for None."""
    if isinstance(node, (ast.FunctionDef, ast.Lambda)):
        arguments = node.args
        positional = [*arguments.posonlyargs, *arguments.args]
        last = positional[len(positional) - len(arguments.defaults) :]
        pairs = [*zip(last, arguments.defaults, strict=True)]
        pairs += [
            (name, default)
            for name, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
            if default is not None
        ]
    elif isinstance(node, ast.ClassDef):
        fields = (each for each in node.body if isinstance(each, ast.AnnAssign) and each.value is not None)
        pairs = [(each, each.value) for each in fields if each.value is not None]  # type: ignore[misc]
    else:
        return
    for parameter, default in pairs:
        annotation = parameter.annotation
        other = _other_default(source.code(annotation) if annotation else "", default)
        if other is not None:
            yield source.replaced("ChangeDefault", default, other)


def _other_default(annotation: str, default: ast.expr) -> str | None:
    if not isinstance(default, ast.Constant):
        return "None" if isinstance(default, ast.Attribute) else None
    if isinstance(default.value, bool):
        return str(not default.value)
    if default.value is None:
        kinds = [kind.strip() for kind in annotation.split("|")]
        return next((OTHER_DEFAULTS[kind] for kind in kinds if kind in OTHER_DEFAULTS), None)
    if isinstance(default.value, (int, float)):
        return repr(default.value + 1)
    literals = [part for part in annotation.replace("[", '"').split('"')[1::2] if part != default.value]
    return repr(literals[0]) if literals and "Literal" in annotation else "None"


def swap_operands(source: Source, node: ast.AST) -> Iterator[Mistake]:
    """`b - a` for `a - b`, and as much of every operator that is not symmetric."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, UNSYMMETRIC):
        if isinstance(node.left, (ast.Constant, ast.JoinedStr)) and isinstance(node.op, ast.Mod):
            return
        swapped = ast.unparse(ast.BinOp(node.right, node.op, node.left))
        yield source.replaced("SwapOperands", node, swapped)


def swap_arguments(source: Source, node: ast.AST) -> Iterator[Mistake]:
    """Two neighbours of the arguments of a call in each other's place; min and max take them in any order."""
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") not in ("min", "max"):
        yield from _swapped("SwapArguments", source, node.args)


def swap_fields(source: Source, node: ast.AST) -> Iterator[Mistake]:
    """Two neighbours of the fields of a text in each other's place."""
    if isinstance(node, ast.JoinedStr):
        fields = [part.value for part in node.values if isinstance(part, ast.FormattedValue)]
        yield from _swapped("SwapFields", source, fields)


def _swapped(operator: str, source: Source, parts: Sequence[ast.expr]) -> Iterator[Mistake]:
    for one, other in pairwise(parts):
        if isinstance(one, ast.Starred) or isinstance(other, ast.Starred):
            continue
        (begin, middle), (after, end) = source.span(one), source.span(other)
        swapped = source.text[after:end] + source.text[middle:after] + source.text[begin:middle]
        yield source.replaced(operator, one, swapped, other)


def drop_keyword(source: Source, node: ast.AST) -> Iterator[Mistake]:
    """A call without one of its keywords."""
    if isinstance(node, ast.Call):
        for keyword in (each for each in node.keywords if each.arg != "strict"):
            begin, end = source.span(keyword)
            rest = source.text[end:]
            comma = len(rest) - len(rest.lstrip(" \n,"))
            yield Mistake("DropKeyword", keyword.lineno, begin, end + comma, "")


def drop_element(source: Source, node: ast.AST) -> Iterator[Mistake]:
    """A tuple, list, set or dict without one of its elements."""
    if isinstance(node, ast.Dict):
        pairs = [(key, value) for key, value in zip(node.keys, node.values, strict=True) if key is not None]
    elif isinstance(node, (ast.Tuple, ast.List, ast.Set)) and isinstance(
        getattr(node, "ctx", ast.Load()), ast.Load
    ):
        pairs = [(each, each) for each in node.elts]
    else:
        return
    for first, last in pairs if len(pairs) > 2 else ():
        begin, end = source.span(first, last)
        rest = source.text[end:]
        comma = len(rest) - len(rest.lstrip(" \n,"))
        yield Mistake("DropElement", first.lineno, begin, end + comma, "")


def drop_statement(source: Source, node: ast.AST) -> Iterator[Mistake]:
    """`pass` for a call, an assignment to an attribute or an item, a refusal, or a branch without an else."""
    called = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    places = (ast.Attribute, ast.Subscript)
    stored = isinstance(node, ast.Assign) and all(isinstance(each, places) for each in node.targets)
    guard = isinstance(node, ast.If) and not node.orelse
    if called or stored or guard or isinstance(node, (ast.Raise, ast.AugAssign)):
        yield source.replaced("DropStatement", node, "pass")


def drop_condition(source: Source, node: ast.AST) -> Iterator[Mistake]:
    """A condition without one of the operands of `and` or `or`."""
    if isinstance(node, ast.BoolOp):
        first, *_, last = node.values
        second, before = node.values[1], node.values[-2]
        for kept, end in ((second, last), (first, before)):
            yield source.replaced("DropCondition", first, source.text[slice(*source.span(kept, end))], last)


def write_other_name(source: Source, node: ast.AST) -> Iterator[Mistake]:
    """A function, an attribute or a dtype for its counterpart."""
    if isinstance(node, ast.Name) and node.id in BUILTINS and isinstance(node.ctx, ast.Load):
        yield source.replaced("WriteOtherName", node, OTHER_NAMES[node.id])
    if isinstance(node, ast.Attribute) and node.attr in OTHER_NAMES and isinstance(node.ctx, ast.Load):
        _, end = source.span(node)
        other = OTHER_NAMES[node.attr]
        yield Mistake("WriteOtherName", node.lineno, end - len(node.attr), end, other)


def write_other_word(source: Source, node: ast.AST) -> Iterator[Mistake]:
    """A word of a message for its counterpart."""
    if isinstance(node, (ast.JoinedStr, ast.Constant)) and isinstance(getattr(node, "value", ""), str):
        begin, end = source.span(node)
        code = source.text[begin:end]
        at = 0
        for word in code.split(" "):
            bare = word.strip("\"'f,.:;()")
            if bare in WORDS and " " in code:
                start = begin + at + word.index(bare)
                yield Mistake("WriteOtherWord", node.lineno, start, start + len(bare), WORDS[bare])
            at += len(word) + 1


def write_other_text(source: Source, node: ast.AST) -> Iterator[Mistake]:
    """A key, an id or a name with another letter."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value:
        _, end = source.span(node)
        code = source.code(node)
        if len(code) == len(node.value) + 2 and " " not in code:
            yield Mistake("WriteOtherText", node.lineno, end - 1, end - 1, "_")


def write_other_field(source: Source, node: ast.AST) -> Iterator[Mistake]:
    """A field of a text that shows another parameter of the function."""
    if not isinstance(node, ast.FunctionDef):
        return
    names = [each.arg for each in (*node.args.args, *node.args.kwonlyargs) if each.arg not in ("self", "cls")]
    for text in ast.walk(node):
        if isinstance(text, ast.JoinedStr):
            for part in text.values:
                shown = part.value if isinstance(part, ast.FormattedValue) else None
                if isinstance(shown, ast.Name) and (others := [each for each in names if each != shown.id]):
                    yield source.replaced("WriteOtherField", shown, others[0])


OPERATORS: tuple[Callable[[Source, ast.AST], Iterator[Mistake]], ...] = (
    change_default,
    swap_operands,
    swap_arguments,
    swap_fields,
    drop_keyword,
    drop_element,
    drop_statement,
    drop_condition,
    write_other_name,
    write_other_word,
    write_other_text,
    write_other_field,
)


def _has_docstring(node: ast.AST) -> bool:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    return isinstance(node, kinds) and bool(node.body) and ast.get_docstring(node) is not None
