"""A case: one layer and one share of it, under a name that stays."""

from dataclasses import dataclass, fields

from qload.testing.traits import Traits


@dataclass(frozen=True)
class ConformanceCase(Traits):
    """What a kernel, loader or packer is asked to do. Its `id` never changes its meaning.

    Attributes
    ----------
    K, N
        Inputs and outputs of the whole layer.
    M
        How many tokens there are; while tests are collected, the most.
    world, split
        How many ranks share the layer, and along what: "col" for N, "row" for K; 1 and "" for a whole one.
    rank
        Which of them asks.
    """

    K: int = 256
    N: int = 128
    M: int = 1
    rank: int = 0
    world: int = 1
    split: str = ""

    @property
    def id(self) -> str:
        """Such as `gptq.v1.w4.g128.actorder.k4096n512.tp2row`."""
        share = f".tp{self.world}{self.split}" if self.world > 1 else ""
        return f"{self.words()}.k{self.K}n{self.N}{share}"

    @property
    def traits(self) -> Traits:
        """What kind of layer it is, apart from sizes and shares."""
        return Traits(**{each.name: getattr(self, each.name) for each in fields(Traits)})

    def __str__(self) -> str:
        return self.id
