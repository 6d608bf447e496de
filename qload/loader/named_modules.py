"""Modules listed by name as quantized in a config."""

from collections.abc import Mapping
from dataclasses import dataclass, field

Entry = tuple[str, str]  # the name of the module, and the key that lists it


@dataclass(frozen=True)
class NamedModules:
    """Names of quantized modules -> the key of the config with this name.

    `leaving_out`: how to exclude a module in a config of this method.
    """

    keys: Mapping[str, str] = field(default_factory=dict)
    leaving_out: str = "modules_to_not_convert"

    def entry(self, prefix: str) -> Entry | None:
        """Find the entry for a layer or for its module of experts; None without one.

        A name in the config may lack leading segments: `lm_head` stands for `language_model.lm_head` too.
        """
        if not self.keys:
            return None
        parts = prefix.split(".")
        numbers = (at for at, part in enumerate(parts) if part.isdecimal())
        holders = (at for at in numbers if parts[at - 1].endswith("experts"))
        for stop in (len(parts), *holders):
            for start in range(stop):
                name = ".".join(parts[start:stop])
                if name in self.keys:
                    return name, self.keys[name]
        return None

    def note(self, prefix: str) -> str | None:
        """Note on a plain layer with an entry; None without an entry."""
        entry = self.entry(prefix)
        if entry is None:
            return None
        return (
            f"{entry[1]} lists it as quantized, and its weight is plain: programs that follow the config "
            "expect quantized tensors and fail; correct that entry, or exclude the layer by "
            f"{self.leaving_out}"
        )


NOTHING_NAMED = NamedModules()
