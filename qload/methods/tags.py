"""A parameter's tags, kept by its layer too: torch drops those of a parameter that it replaces.

It does so in a deep copy, in `to_empty` from the meta device and in `load_state_dict(assign=True)`. Layers
of `Tagged` put them back at once; in any other module a method does before it reads the parameters, whose
orientation nothing else tells.
"""

from collections.abc import Callable, Mapping
from typing import Any, Self

from torch import Tensor, nn

TAGS = "weight_tags"  # of a module: tags by parameter


def keep_tags(layer: nn.Module, name: str, tags: Mapping[str, Any]) -> None:
    """Note a parameter's tags with its layer, instead of those it had."""
    setattr(layer, TAGS, {**_kept(layer), name: dict(tags)})


def put_tags_back(layer: nn.Module) -> None:
    """Tag every parameter as it was, where its tags are gone."""
    for name, tags in _kept(layer).items():
        param = getattr(layer, name, None)
        for tag, value in tags.items():
            if param is not None and not hasattr(param, tag):
                setattr(param, tag, value)


class Tagged(nn.Module):
    """A module whose parameters keep their tags through copies, moves and assignments."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        put_tags_back(self)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        put_tags_back(self)
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        put_tags_back(self)


def _kept(layer: nn.Module) -> dict[str, dict[str, Any]]:
    return getattr(layer, TAGS, {})
