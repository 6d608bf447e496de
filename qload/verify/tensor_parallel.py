"""Check of tensor parallelism: can every layer be split over N ranks, by headers and small tensors alone."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from qload.errors import ArgumentError, CutError, DivideError
from qload.loader import Heads, LayerDescription, Part, Split
from qload.loader.cuts import share
from qload.parallel import Rank
from qload.plan.rank_counts import CANDIDATES, LawfulRanks, lawful_ranks
from qload.plan.sharing import usual_split
from qload.verify.checkpoint import Checkpoint
from qload.verify.report import Finding, finding_of


def world_sizes(tp: int | Sequence[int] | None) -> Sequence[int]:
    """Return the numbers of ranks, each once; ArgumentError for a number below 1, or for none."""
    if tp is None:
        return ()
    sizes = list(dict.fromkeys(tp if isinstance(tp, Sequence) else (tp,)))
    if not sizes or min(sizes) < 1:
        raise ArgumentError("tp", "at least 1", str(tp))
    return sizes


def check_ranks(checkpoint: Checkpoint, worlds: Sequence[int]) -> Iterator[Finding | str]:
    """Yield a finding for each layer and number of ranks without its usual split, and a note on other layers.

    The remedy names the numbers of ranks that suit all layers. The note counts layers without a usual split
    that can be split neither by outputs nor by inputs. For a known type of model, attention heads stay whole.
    """
    cuts = [cut for layer in checkpoint.described() if (cut := _usual_cut(checkpoint, layer)) is not None]
    refused = {ranks: [(cut, error) for cut in cuts if (error := cut.refusal(ranks))] for ranks in worlds}
    lawful = _lawful_ranks(cuts) if any(refused.values()) else None
    for ranks in worlds:
        for _, error in refused[ranks]:
            finding = finding_of(error)
            hint = error.hint.partition("remedy   ")[2] if isinstance(error, DivideError) else ""
            texts = ["" if lawful is None else lawful.text(), hint]
            yield replace(
                finding,
                remedy="; or ".join(filter(None, texts)) or finding.remedy,
                cause=f"{finding.cause} ({ranks} ranks)",
            )
        unusual = [
            layer.prefix
            for layer in checkpoint.described()
            if layer.K > 1
            and _usual_cut(checkpoint, layer) is None
            and all(_Cut(layer, split).refusal(ranks) for split in ("N", "K"))
        ]
        if unusual:
            names = ", ".join(unusual[:4])
            count = f"for {ranks} ranks, {len(unusual)} other layers"
            yield f"{count} can be split neither by outputs nor by inputs: {names}"


@dataclass(frozen=True)
class _Cut:
    """Usual split of a layer over ranks: along `split`, or by whole `heads` of attention."""

    layer: LayerDescription
    split: Split
    heads: Heads | None = None

    def refusal(self, ranks: int) -> CutError | DivideError | None:
        """Return the error of a split over so many ranks; few heads of keys and values are repeated."""
        try:
            parts = [Part(self.layer.prefix)]
            if self.heads is not None:
                parts = self.heads.parts([(self.layer.prefix, self.layer.N)], ranks)
            for part in parts:
                share(self.layer, part, self.split, Rank(0, ranks), joined=part is not parts[-1])
        except (CutError, DivideError) as error:
            return error
        return None


def _usual_cut(checkpoint: Checkpoint, layer: LayerDescription) -> _Cut | None:
    """Return the usual split of a layer; None without a usual name."""
    heads = checkpoint.architecture.heads(layer.prefix) if checkpoint.architecture else None
    split = "N" if heads is not None else usual_split(layer.prefix)
    return None if split is None else _Cut(layer, split, heads)


def _lawful_ranks(cuts: Sequence[_Cut]) -> LawfulRanks | None:
    """Return the numbers of ranks that suit all layers; equal layers are checked once."""
    unique = {(id(cut.layer.cuts), cut.split, cut.heads): cut for cut in reversed(cuts)}
    return lawful_ranks(
        {
            cut.layer.prefix: [ranks for ranks in CANDIDATES if cut.refusal(ranks) is None]
            for cut in reversed(unique.values())
        }
    )
