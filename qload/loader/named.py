"""Modules that a config names one by one as quantized, whatever is stored of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field

Entry = tuple[str, str]  # the name of the module, and the key that lists it


@dataclass(frozen=True)
class NamedModules:
    """Names of modules, each with the key of the config that has it quantized.

    `leaving_out`: how a config of the same method says that a module is not quantized.
    """

    keys: Mapping[str, str] = field(default_factory=dict)
    leaving_out: str = "modules_to_not_convert"

    def entry(self, prefix: str) -> Entry | None:
        """The entry for a layer, or for the experts that it is one of; None where no entry names it.

        A name may leave out what stands before it: `lm_head` means `language_model.lm_head` too.
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
        """The note on a plain layer that an entry names; None where none does."""
        entry = self.entry(prefix)
        if entry is None:
            return None
        return (
            f"{entry[1]} has it quantized, and its weight is plain: programs that go by the config look for "
            f"quantized tensors and fail; correct that entry, or leave the layer out by {self.leaving_out}"
        )


NOTHING_NAMED = NamedModules()
