"""The module over experts that declare how inputs are quantized: by their own scales, whole and shared.

Inputs are halves of whole numbers and scales powers of two, so that sums of gate and up are exact however
they are cut, and what goes into down has the same bits on every rank.
"""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from qload import ExpertFacts, ExpertsWeight, LocalExperts, UnquantizedWeight
from qload.errors import ArgumentError, MismatchError
from qload.experts import GatedActivation
from qload.experts.weight import stacked
from qload.kernels.activations import quantize
from qload.kernels.experts import experts
from qload.loader import FormatLoader
from qload.parallel import FakeWorld, maximum_over
from qload.spec import ActivationScheme, Layer
from qload.storage import MemoryStorage
from qload.testing import assert_same_bits
from qload.weights import Weights
from tests.kernels.activation_cases import Case, distance, named

pytestmark = pytest.mark.usefixtures("seen_texts")

E, H, INNER = 3, 64, 32
PREFIX = "model.layers.0.mlp.experts"
PARTS = ("gate_proj", "up_proj", "down_proj")
FACTS = ExpertFacts(GatedActivation("silu"))
TOKEN, STATIC = "w8a8_int8_token_dynamic_sym", ["fp8_tensor_static", "w8a8_int8_tensor_static_asym"]
every_scheme = pytest.mark.parametrize("name", [TOKEN, *STATIC])


def tensors(name: str) -> dict[str, Tensor]:
    """Experts as a scheme's owner stores them, each matrix with a scale of its own for its inputs."""
    found, chance, fp8 = {}, torch.Generator().manual_seed(0), name.startswith("fp8")
    for e in range(E):
        for at, part in enumerate(PARTS):
            N, K = (H, INNER) if part == "down_proj" else (INNER, H)
            codes = torch.randint(-4, 5, (N, K), generator=chance)
            own = {
                "weight": codes.to(torch.float8_e4m3fn if fp8 else torch.int8),
                "weight_scale": torch.full((1,) if fp8 else (N, 1), 2.0**-7),
            }
            if name in STATIC:
                own["input_scale"] = torch.tensor([2.0 ** ((e + at) % 3 - 2)])
            if name.endswith("_asym"):
                own["input_zero_point"] = torch.tensor([5 * e + at], dtype=torch.int8)
            found |= {f"{PREFIX}.{e}.{part}.{field}": tensor for field, tensor in own.items()}
    return found


def weights_of(name: str, group: Any = None) -> Weights:
    loader = Case({}, named(name).config, {}).loader
    return Weights(MemoryStorage(tensors(name)), loader=loader, process_group=group)


def load(name: str, group: Any = None, **how: Any) -> ExpertsWeight:
    return weights_of(name, group).get_experts(PREFIX, facts=FACTS, **how)


def inputs() -> Tensor:
    """(5, H): halves of whole numbers; the largest of each token is 127.5, whose scale in int8 is 1."""
    x = torch.randint(-200, 201, (5, H), generator=torch.Generator().manual_seed(1)) / 2
    x[:, 7] = 127.5
    return x


def through(module: Any, x: Tensor, expert: int) -> Tensor:
    """Every token through one expert, whose routing weight is 1."""
    return module(x, torch.full((len(x), 1), expert), torch.ones(len(x), 1))  # type: ignore[no-any-return]


def into_down(name: str, x: Tensor, expert: int) -> tuple[Tensor, Tensor]:
    """What one expert's down takes, quantized by its own scale, and what it means, from its layers alone."""
    weights, (gate, up, down) = weights_of(name), (f"{PREFIX}.{expert}.{part}" for part in PARTS)
    between = torch.nn.functional.silu(weights.get_weights(gate).get_linear()(x))
    between = between * weights.get_weights(up).get_linear()(x)
    last = weights.get_weights(down)
    scheme = last.activations
    assert scheme is not None
    stored = (last.fields().get(field or "") for field in (scheme.scale, scheme.zero_point))
    return quantize(between, scheme, *stored).dequantize(), last.dequantize()


@every_scheme
def test_inputs_are_quantized_as_the_layers_of_each_expert_alone_declare(name: str) -> None:
    module, x = load(name).get_linear(), inputs()

    for expert in range(E):
        taken, down = into_down(name, x, expert)
        y = through(module, x, expert)
        assert bool((distance(y, taken, down, torch.zeros(())) <= 1).all())


@every_scheme
def test_unquantized_takes_inputs_as_they_come(name: str) -> None:
    weight, x = load(name), inputs()

    y = through(weight.get_linear(activations="unquantized"), x, 1)

    bare = replace(weight, **{each: without(getattr(weight, each)) for each in ("gate_up", "down")})
    assert_same_bits(y, through(bare.get_linear(), x, 1))
    assert not torch.equal(y, through(weight.get_linear(), x, 1))


def without(stack: Any) -> Any:
    return replace(stack, layer=replace(stack.layer, activations=None))


@every_scheme
def test_a_token_has_the_same_bits_in_every_batch(name: str) -> None:
    module, x = load(name).get_linear(), inputs()
    ids, weights = torch.tensor([[0, 2], [1, 0], [2, 1], [0, 1], [1, 2]]), torch.rand(5, 2)

    whole = module(x, ids, weights)

    alone = [module(x[t : t + 1], ids[t : t + 1], weights[t : t + 1]) for t in range(5)]
    assert_same_bits(torch.cat(alone), whole)


@every_scheme
@pytest.mark.parametrize("world", [2, 4])
def test_shares_of_each_expert_quantize_as_the_whole(name: str, world: int) -> None:
    x = inputs()

    def work(group: Any) -> Tensor:
        module = load(name, group, split="tensor").get_linear(maximum=maximum_over(group))
        return torch.stack([through(module, x, expert) for expert in range(E)])

    summed = torch.stack(FakeWorld(world).run(work)).sum(0)

    for expert in range(E):
        taken, down = into_down(name, x, expert)
        assert bool((distance(summed[expert], taken, down, torch.zeros(())) <= 1).all())


@every_scheme
def test_experts_of_a_rank_quantize_as_in_the_whole(name: str) -> None:
    whole, x = load(name).get_linear(), inputs()
    for group in FakeWorld(2):
        share = load(name, group, split="experts")
        for expert in range(share.local.start, share.local.stop):
            assert_same_bits(through(share.get_linear(), x, expert), through(whole, x, expert))


def test_a_share_that_lacks_the_others_is_refused_alike_unless_its_own_maximum_is_asked_for() -> None:
    shares = [load(TOKEN, group, split="tensor") for group in FakeWorld(2)]
    said = set()
    for share in shares:
        with pytest.raises(ArgumentError, match=r"experts\.down: maximum\n.*covers all 32 inputs") as caught:
            share.get_linear()
        said.add(str(caught.value))
        with pytest.raises(ArgumentError, match=r"down: maximum"):
            experts(inputs(), torch.zeros(5, 1).long(), torch.ones(5, 1), share)
    assert len(said) == 1

    own = sum(through(share.get_linear(maximum="own"), inputs(), 0) for share in shares)

    assert not torch.equal(torch.as_tensor(own), through(load(TOKEN).get_linear(), inputs(), 0))
    assert shares[0].get_linear(activations="unquantized").activations == "unquantized"


@pytest.mark.parametrize("name", STATIC)
def test_a_share_with_stored_scales_needs_no_other_rank(name: str) -> None:
    shares = [load(name, group, split="tensor") for group in FakeWorld(2)]

    summed = torch.stack([through(share.get_linear(), inputs(), 2) for share in shares]).sum(0)

    taken, down = into_down(name, inputs(), 2)
    assert bool((distance(summed, taken, down, torch.zeros(())) <= 1).all())


def by_hand(scheme: ActivationScheme | None, side: Any = "output") -> ExpertsWeight:
    """One expert of one input: y = down * silu(8 x) * x."""
    gate_up = UnquantizedWeight(
        weight=torch.tensor([[8.0], [1.0]]), layer=Layer((1, 1), 1, (2, 1), "up", None, scheme)
    )
    down = UnquantizedWeight(weight=torch.ones(1, 1), layer=Layer((1,), 1, (1, 1), "down"))
    facts = ExpertFacts(GatedActivation("silu"), side)
    return ExpertsWeight(
        stacked("up", 1, [gate_up]), stacked("down", 1, [down]), facts, LocalExperts(0, 1, 1)
    )


@pytest.mark.parametrize(("side", "taken", "outside"), [("input", 1.75, 1.0), ("output", 1.0, 1.625)])
def test_a_routing_weight_on_the_input_is_part_of_what_is_quantized(
    side: str, taken: float, outside: float
) -> None:
    """Floats of 8 bits have eighths between 1 and 2: 1.0625 becomes 1, and 1.625 times as much 1.75."""
    scheme = ActivationScheme("float", 8, True, "group", 1, scale_type="e8m0", owner="modelopt")
    x, weight = torch.tensor([[1.0625]]), torch.tensor([[1.625]])

    y = by_hand(scheme, side).get_linear()(x, torch.zeros(1, 1).long(), weight)

    plain = by_hand(None).get_linear()
    assert_same_bits(y, plain(torch.tensor([[taken]]), torch.zeros(1, 1).long(), torch.ones(1, 1)) * outside)


@pytest.mark.parametrize(
    ("scheme", "reason"),
    [
        (ActivationScheme("int", 8, True, "tensor"), "another result beside other tokens"),
        (ActivationScheme("int", 16, True, "token"), "nothing here makes codes of int16"),
        (ActivationScheme("int", 8, False, "tensor"), "no scale is stored"),
    ],
    ids=str,
)
def test_a_scheme_that_cannot_be_done_is_refused_when_the_module_is_made(
    scheme: ActivationScheme, reason: str
) -> None:
    with pytest.raises(ArgumentError, match=r"up\.gate_up: activations") as caught:
        by_hand(scheme).get_linear()

    assert reason in str(caught.value)
    assert by_hand(scheme).get_linear(activations="unquantized") is not None


@pytest.mark.parametrize("name", ["w8a8_int8_tensor_dynamic_sym", "fp8_tensor_dynamic"])
def test_a_scale_over_all_tokens_is_refused_by_every_rank(name: str) -> None:
    said = set()
    for group in FakeWorld(2):
        for how in ({}, {"maximum": "own"}):
            with pytest.raises(ArgumentError, match=r"gate_up: activations") as caught:
                load(name, group, split="tensor").get_linear(**how)
            said.add(str(caught.value))
    assert len(said) == 1


@pytest.mark.parametrize(
    ("part", "other"),
    [("gate_proj", r"experts\.2\.(gate|up)_"), ("down_proj", r"experts\.2\.down_")],
    ids=["gate", "down"],
)
def test_experts_whose_inputs_are_quantized_apart_are_refused_before_a_weight_is_read(
    part: str, other: str
) -> None:
    config = copy.deepcopy(named(TOKEN).config)
    (group,) = config["config_groups"].values()
    apart, other = (
        copy.deepcopy(group),
        r"experts\.2\.(gate|up)_" if part == "gate_proj" else r"experts\.2\.down_",
    )
    group["targets"], apart["targets"] = [rf"re:^(?!.*{other}).*$"], [rf"re:.*{other}.*"]
    apart["input_activations"]["symmetric"] = False
    config["config_groups"] = {"one": group, "other": apart}
    loader: FormatLoader = Case({}, config, {}).loader
    storage = MemoryStorage(tensors(TOKEN))

    with pytest.raises(MismatchError, match="differ in what is declared of its inputs") as caught:
        Weights(storage, loader=loader).get_experts(PREFIX, facts=FACTS)

    assert f"{PREFIX}.2.{part}" in str(caught.value)
    assert "int8 token dynamic asymmetric" in str(caught.value)
    assert not storage.reads


def test_typed_weights_whose_inputs_are_quantized_apart_are_not_stacked() -> None:
    one, other = by_hand(None).down.expert(0), by_hand(ActivationScheme("int", 8, True, "token")).gate_up
    layer = replace(one.layer, activations=other.layer.activations, name="second")

    with pytest.raises(
        MismatchError, match=r"(?s)second: experts of one layer differ in layer.*strategy='token'"
    ):
        stacked("down", 2, [one, replace(one, layer=layer)])


@every_scheme
def test_the_module_says_how_inputs_are_quantized(name: str) -> None:
    weight = load(name)
    said = str(weight.down.layer.activations)

    assert repr(weight.get_linear()).count(said) == 2
    assert said not in repr(weight.get_linear(activations="unquantized"))
