"""`num_hidden_layers` of the model's config counts layers that are all there, and all that are there.

Of a type of model whose names are known they are counted by these names. Of another the longest list of
layers is taken, and what lies beyond the count may be lawful.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from qload.architecture import Inventory
from qload.architecture.architecture import SHOWN, absent
from qload.architecture.table import DIGITS
from qload.verify.report import Finding
from qload.verify.rules.rule import Rule
from qload.verify.rules.siblings import blocks_of
from qload.verify.subject import Subject


def check(rule: Rule, subject: Subject) -> Iterator[Finding]:
    """Report layers that the config counts but no tensor belongs to, and layers beyond its count.

    Drafts are skipped: they continue the numbers of their target, or have none.
    """
    if subject.draft:
        return
    inventory = subject.inventory
    if inventory is not None and inventory.architecture.layers is not None:
        yield from _by_architecture(rule, inventory, inventory.architecture.layers)
        return
    claimed = subject.num_hidden_layers
    if claimed and not any(part.isdecimal() for name in subject.names for part in name.split(".")):
        message = f"num_hidden_layers is {claimed}, and no tensor's name has a number of a layer"
        yield rule.finding(None, "config.json", f"config.json: {message}")
    blocks = {block: layers for block, layers in blocks_of(subject.names).items() if "expert" not in block}
    if claimed is None or not blocks:
        return
    block, layers = max(blocks.items(), key=lambda item: len(item[1]))
    first, count = absent(claimed, [int(index) for index in layers if len(index) <= DIGITS])
    yield from _lost(rule, lambda layer: f"{block}.{layer}", claimed, first, count)


def _by_architecture(rule: Rule, inventory: Inventory, claimed: int) -> Iterator[Finding]:
    """By the names that layers of this type have."""
    yield from _lost(rule, inventory.name_of_layer, claimed, *inventory.lost_layers())
    layers = inventory.layers | inventory.plain_predictors
    beyond = sorted(layer for layer in layers - inventory.undeclared_predictors if layer >= claimed)
    if beyond:
        name, shown = inventory.name_of_layer(beyond[0]), listed(beyond[:SHOWN], len(beyond))
        message = f"{name}: num_hidden_layers is {claimed}, and layers are stored beyond: {shown}"
        remedy = "set num_hidden_layers to the number of layers, if none was meant to be left out"
        yield replace(rule.finding(name, "config.json", message, remedy), severity="warning")


def _lost(
    rule: Rule, name: Callable[[int], str], claimed: int, first: Sequence[int], count: int
) -> Iterator[Finding]:
    if count:
        message = f"num_hidden_layers is {claimed}, and {count} of these layers have no tensor: "
        yield rule.finding(name(first[0]), "config.json", message + listed(first, count))


def listed(numbers: Sequence[int], count: int) -> str:
    """Numbers of layers or experts, and whether there are more."""
    return ", ".join(map(str, numbers)) + (", ..." if count > len(numbers) else "")


RULE = Rule("layer-count", "headers", check)
