"""What a table of one type of model says, as data: sizes, flags, and the tensors by name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

Where = Literal["", "dense", "sparse"]
Sizes = Mapping[str, int | None]  # None: not known
Lists = Mapping[
    str, frozenset[int] | Literal[False] | None
]  # of layers; None: there is none, False: no such list
LISTS = ("mlp_only_layers", "moe_layers")


@dataclass(frozen=True, slots=True)
class Size:
    """A whole number of the config.

    `keys`: where it stands, the first that is there counts. `default`: where it does not, a number or an
    expression of sizes (`hidden/heads`); None: then it is not known. `null`: the same for a null, where that
    differs. Defaults are those of transformers' own configs, which published configs rely on.
    """

    keys: tuple[str, ...]
    default: int | str | None = None
    null: int | str | None = None


@dataclass(frozen=True, slots=True)
class Flag:
    """A yes or no of the config: a boolean under `key`, or `size` said, and more than 0."""

    key: str = ""
    default: bool = False
    size: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """One matrix, or one tensor, of a model or of each of its layers.

    `name`: `{layer}` and `{expert}` stand for their numbers, `{w1|gate_proj}` for spellings, of which the
    first is transformers' own. `shape`: of a matrix its (N, K), however a format stores it; of a `tensor`,
    which `name` names whole, its sizes as they are stored. `where`: in which layers. `when`: the flags that
    have to be set for it to be there (`!flag`: not set). `within`: what holds it too, where it is stored
    fused. `optional`: another row holds it, or nobody misses it.
    """

    name: str
    shape: str
    where: Where = ""
    when: str = ""
    within: tuple[str, ...] = ()
    optional: bool = False
    tensor: bool = False


@dataclass(frozen=True, slots=True)
class Stacked:
    """How the experts of a layer lie in one tensor, where programs store them so.

    `inputs_first`: (E, K, N) as `x @ w` takes it, and not (E, N, K). `interleaved`: of gate and up, which are
    one tensor, the even outputs are the gate's and the odd ones up's, and not the first and the second half.
    """

    inputs_first: bool = False
    interleaved: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """A type of model. `base`: what names of its decoder begin with, which some files leave out.

    `sparse`: whether a layer has experts, of lists, sizes and number; None: no layer has. `exempt`: names
    that may be stored and that nothing reads, with the reason. `head`, `embedding`: the matrices that
    `tie_word_embeddings` makes one, which is `tied` where the config does not say. `stacked`: how experts
    lie in one tensor.
    """

    sizes: Mapping[str, Size]
    rows: tuple[Row, ...]
    flags: Mapping[str, Flag] = field(default_factory=dict)
    base: str = "model"
    sparse: Callable[[Lists, Sizes, int], bool | None] | None = None
    exempt: Mapping[str, str] = field(default_factory=dict)
    head: str = "lm_head"
    embedding: str = "model.embed_tokens"
    tied: bool = False
    stacked: Stacked = Stacked()
