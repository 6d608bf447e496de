"""Transforms of inputs and outputs that layers of compressed-tensors apply when they run."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor

from qload.checkpoint import open_checkpoint
from qload.conversion import convert, shard
from qload.errors import (
    ArgumentError,
    CutError,
    MismatchError,
    MissingTensorError,
    QloadError,
    ShapeError,
    UnsupportedFormatError,
)
from qload.kernel_formats import repack, restore
from qload.kernels import bounds
from qload.kernels.linear import copy_into
from qload.parallel import FakeWorld
from qload.spec.transforms import BlockTransform, regular_hadamard, walsh_hadamard
from qload.testing import assert_same_bits

pytestmark = pytest.mark.usefixtures("seen_texts")

N, K, BLOCK = 16, 32, 4
UP, DOWN = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"
# Orthogonal, and neither symmetric nor Sylvester's: its inverse is another matrix.
HADAMARD = np.array([[1, 1, 1, 1], [1, -1, 1, -1], [-1, -1, 1, 1], [1, -1, -1, 1]], np.float64)
SYLVESTER = np.array([[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]], np.float64)


def codes(seed: int) -> NDArray[np.int64]:
    return np.random.default_rng(seed).integers(0, 16, (N, K))


def layer(seed: int) -> dict[str, Tensor]:
    """Codes of four bits with one scale of 0.5 an output."""
    shifted = codes(seed).reshape(N, K // 8, 8) << 4 * np.arange(8)
    words = shifted.sum(-1).astype(np.uint32).view(np.int32)
    return {
        "weight_packed": torch.from_numpy(words),
        "weight_scale": torch.full((N, 1), 0.5, dtype=torch.bfloat16),
        "weight_shape": torch.tensor([N, K]),
    }


def stored(seed: int) -> NDArray[np.float64]:
    return (codes(seed) - 8) * 0.5


def turned(values: NDArray[np.float64], left: Any = None, right: Any = None) -> NDArray[np.float64]:
    """left @ values @ right, by blocks on the diagonals."""
    by_rows, by_columns = (
        np.eye(size) if block is None else np.kron(np.eye(size // len(block)), block)
        for block, size in ((left, values.shape[0]), (right, values.shape[1]))
    )
    return np.asarray(by_rows @ values @ by_columns)


def step(location: str, targets: Any = ("Linear",), *, inverse: bool = False, ignore: Any = ()) -> Any:
    return {"targets": [*targets], "location": location, "inverse": inverse, "ignore": [*ignore]}


def save(
    folder: Path,
    tensors: dict[str, Tensor],
    head_dim: int | None = BLOCK,
    *,
    randomize: bool = False,
    **schemes: list[Any],
) -> Path:
    shared = {"type": "hadamard", "head_dim": head_dim, "randomize": randomize}
    groups = {name: shared | {"apply": steps} for name, steps in schemes.items()}
    weights = {"num_bits": 4, "strategy": "channel", "symmetric": True}
    section = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
        "transform_config": {"config_groups": groups},
    }
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"quantization_config": section}))
    save_file(tensors, folder / "model.safetensors")
    return folder


def tensors(*prefixes: str, **matrices: NDArray[np.float64]) -> dict[str, Tensor]:
    """Layers, and matrices beside the first of them."""
    named = {f"{p}.{name}": t for seed, p in enumerate(prefixes) for name, t in layer(seed).items()}
    return named | {f"{prefixes[0]}.{name}.weight": torch.tensor(m) for name, m in matrices.items()}


@pytest.fixture
def quip(tmp_path: Path) -> Path:
    """Inputs are turned by H / 2, outputs by its inverse; the matrices are stored once."""
    schemes = {
        "v": [step("input"), step("weight_input", inverse=True)],
        "u": [step("weight_output"), step("output", inverse=True)],
    }
    return save(tmp_path, tensors(UP, DOWN, v_input=HADAMARD, u_output=HADAMARD), **schemes)


def effective(seed: int) -> NDArray[np.float64]:
    """x V stored' U' is x W', with V = H / 2 and U' = H' / 2, so that W = H stored H' / 4."""
    return turned(stored(seed), HADAMARD, HADAMARD.T) / 4


@pytest.mark.parametrize(("prefix", "seed"), [(UP, 0), (DOWN, 1)])
def test_a_weight_is_in_the_basis_of_the_caller(quip: Path, prefix: str, seed: int) -> None:
    """The second layer stores no matrix: it is found beside the first."""
    with open_checkpoint(quip) as weights:
        weight = weights.get_weights(prefix)

        assert torch.equal(weight.dequantize().double(), torch.from_numpy(effective(seed)))
        assert torch.equal(weight.without_transforms().dequantize().double(), torch.from_numpy(stored(seed)))
        assert weights.report().exempted.keys() == {f"{UP}.u_output.weight", f"{UP}.v_input.weight"}


def test_a_transform_of_one_side_leaves_the_other(tmp_path: Path) -> None:
    for side, matrix, want in (
        ("input", "R4_input", turned(stored(0), right=HADAMARD.T) / 2),
        ("output", "R4_output", turned(stored(0), left=HADAMARD.T) / 2),
    ):
        folder = save(tmp_path / side, tensors(UP, **{matrix: HADAMARD}), R4=[step(side, ["re:.*up_proj$"])])
        with open_checkpoint(folder) as weights:
            assert torch.equal(weights.get_weights(UP).dequantize().double(), torch.from_numpy(want))


def test_layers_without_a_target_are_as_stored(tmp_path: Path) -> None:
    plain = {"lm_head.weight": torch.ones(4, K), "model.embed_tokens.weight": torch.ones(4, K)}
    named = tensors(UP, DOWN, R4_input=HADAMARD) | plain | {"model.norm.weight": torch.ones(K)}
    save(tmp_path, named, R4=[step("input", ignore=["re:.*down_proj", "lm_head"])])

    with open_checkpoint(tmp_path) as weights:
        assert weights.get_weights(UP).layer.transforms is not None
        assert torch.equal(weights.get_weights(DOWN).dequantize().double(), torch.from_numpy(stored(1)))
        for name in ("lm_head", "model.embed_tokens"):
            assert torch.equal(weights.get_weights(name).dequantize(), torch.ones(4, K))
        weights.get_tensor("model.norm.weight")
        assert weights.report().complete


def test_a_matrix_of_the_whole_side_has_its_size(tmp_path: Path) -> None:
    whole = np.kron(np.kron(HADAMARD, SYLVESTER), SYLVESTER[:2, :2])
    save(tmp_path, tensors(UP, R1_input=whole), None, R1=[step("input")])

    with open_checkpoint(tmp_path) as weights:
        got = weights.get_weights(UP).dequantize()
    assert torch.equal(got, torch.from_numpy(stored(0) @ whole.T / np.sqrt(K)).float())


def test_a_layer_with_a_matrix_of_its_own_uses_it(tmp_path: Path) -> None:
    named = tensors(UP, DOWN, R4_input=HADAMARD) | {f"{DOWN}.R4_input.weight": torch.from_numpy(SYLVESTER)}
    save(tmp_path, named, R4=[step("input")])

    with open_checkpoint(tmp_path) as weights:
        got = weights.get_weights(DOWN).dequantize().double()
    assert torch.equal(got, torch.from_numpy(turned(stored(1), right=SYLVESTER) / 2))


def test_shares_are_the_whole_between_blocks(quip: Path) -> None:
    want = torch.from_numpy(effective(0)).float()
    for world in (2, 4):
        for load, dim in (("get_weights_col", 0), ("get_weights_row", 1)):
            shares = []
            for rank in FakeWorld(world):
                with open_checkpoint(quip, process_group=rank) as weights:
                    shares.append(getattr(weights, load)(UP).dequantize())
            assert_same_bits(torch.cat(shares, dim), want)


@pytest.mark.parametrize(("side", "load"), [("output", "get_weights_col"), ("input", "get_weights_row")])
def test_a_cut_within_a_block_is_refused(side: str, load: str, tmp_path: Path) -> None:
    """Words have 8 inputs, and blocks 16."""
    save(tmp_path, tensors(UP, **{f"R4_{side}": np.kron(HADAMARD, HADAMARD)}), 16, R4=[step(side)])

    for rank in FakeWorld(4):
        cut = pytest.raises(CutError, match=f"as the layer transforms its {side}s")
        with open_checkpoint(tmp_path, process_group=rank) as weights, cut:
            getattr(weights, load)(UP)


def test_equal_transforms_are_fused(quip: Path) -> None:
    with open_checkpoint(quip) as weights:
        fused = weights.get_multi_weights_col([UP, DOWN])

    want = np.concatenate([effective(0), effective(1)])
    assert torch.equal(fused.dequantize().double(), torch.from_numpy(want))


@pytest.mark.parametrize("side", ["input", "output"])
def test_different_transforms_are_not_fused(side: str, tmp_path: Path) -> None:
    named = tensors(UP, DOWN, **{f"R4_{side}": HADAMARD})
    save(tmp_path, named, R4=[step(side, ["re:.*up_proj"])])

    with open_checkpoint(tmp_path) as weights, pytest.raises(MismatchError, match="differ in transforms"):
        weights.get_multi_weights_col([UP, DOWN])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layout", [None, "gptq_v2", "panels"])
def test_a_linear_turns_inputs_and_outputs(quip: Path, dtype: torch.dtype, layout: str | None) -> None:
    with open_checkpoint(quip) as weights:
        weight = weights.get_weights(UP)
    ordered = weight if layout is None else repack(weight, layout)
    x = torch.randn(3, K, generator=torch.Generator().manual_seed(0)).to(dtype)
    bias = torch.arange(N).to(dtype)

    linear = ordered.get_linear(bias)
    assert bool((bounds.excess(linear(x), bounds.of_linear(x, weight, bias)) <= 1).all())
    exact = x.double() @ torch.from_numpy(effective(0)).T + bias.double()
    units = torch.finfo(dtype).eps * (x.double().abs() @ torch.from_numpy(np.abs(effective(0))).T + 32).max()
    assert (linear(x).double() - exact).abs().max() < 4 * units  # a turn of x and of y, a product, and a sum
    assert torch.equal(restore(ordered).dequantize(), weight.dequantize()) or layout is None
    assert torch.equal(ordered.dequantize(), weight.dequantize())


@pytest.mark.filterwarnings("ignore")  # of what torch's compiler imports
@pytest.mark.parametrize("matrix", [HADAMARD, SYLVESTER], ids=["other", "sylvester"])
def test_a_linear_with_transforms_is_one_graph(matrix: NDArray[np.float64], tmp_path: Path) -> None:
    steps = {"u": [step("output")], "v": [step("input")]}
    save(tmp_path, tensors(UP, u_output=matrix, v_input=matrix), **steps)
    with open_checkpoint(tmp_path) as weights:
        linear = weights.get_weights(UP).get_linear()
    x = torch.randn(3, K, generator=torch.Generator().manual_seed(0))

    torch._dynamo.reset()
    compiled = torch.compile(linear, backend="eager", fullgraph=True)

    assert torch.equal(compiled(x), linear(x))


def test_a_weight_without_the_transforms_of_a_linear_is_not_copied_into_it(quip: Path) -> None:
    with open_checkpoint(quip) as weights:
        weight = weights.get_weights(UP)
    linear = weight.get_linear()

    with pytest.raises(ArgumentError, match=f"{UP}: transforms"):
        copy_into(linear, weight.without_transforms())


def test_gradients_pass_the_transforms(quip: Path) -> None:
    with open_checkpoint(quip) as weights:
        linear = weights.get_weights(UP).get_linear()
    x = torch.randn(2, K, requires_grad=True)

    linear(x).sum().backward()

    want = torch.from_numpy(effective(0).sum(0)).float()
    torch.testing.assert_close(x.grad, want.expand(2, K))


def test_only_plain_weights_are_written_of_a_layer_with_transforms(quip: Path, tmp_path: Path) -> None:
    done = convert(quip, tmp_path / "plain", to="float32")
    refused = convert(quip, tmp_path / "gptq", to="gptq")
    cut = shard(quip, tmp_path / "ranks", tp=2)

    assert done.verdict == "ok"
    with open_checkpoint(tmp_path / "plain") as weights:
        assert torch.equal(weights.get_weights(UP).dequantize().double(), torch.from_numpy(effective(0)))
    assert {each.outcome for each in refused.layers} == {"refused"}
    assert "at run time, which gptq cannot express" in refused.layers[0].detail
    assert {(each.outcome, "share the matrix" in each.detail) for each in cut.layers} == {("refused", True)}


def test_another_size_of_a_layers_own_matrix_is_refused(tmp_path: Path) -> None:
    """A matrix of the right size under another layer does not take its place."""
    named = tensors(UP, DOWN, R4_input=HADAMARD) | {f"{DOWN}.R4_input.weight": torch.ones(2, 2)}
    save(tmp_path, named, R4=[step("input")])

    with open_checkpoint(tmp_path) as weights, pytest.raises(ShapeError, match=f"{DOWN}.R4_input.weight"):
        weights.get_weights(DOWN)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_a_matrix_may_have_any_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    named = tensors(UP) | {f"{UP}.R4_input.weight": torch.from_numpy(HADAMARD).to(dtype)}
    save(tmp_path, named, R4=[step("input")])

    with open_checkpoint(tmp_path) as weights:
        got = weights.get_weights(UP).dequantize().double()
    assert torch.equal(got, torch.from_numpy(turned(stored(0), right=HADAMARD.T) / 2))


ORDER = [2, 0, 3, 1]


@pytest.mark.parametrize("inverse", [False, True])
def test_a_permutation_reorders_rows_and_columns_of_the_matrix(inverse: bool, tmp_path: Path) -> None:
    """The second layer stores neither: both are found beside the first."""
    named = tensors(UP, DOWN, R4_input=HADAMARD) | {f"{UP}.R4_input.perm": torch.tensor(ORDER)}
    save(tmp_path, named, randomize=True, R4=[step("input", inverse=inverse)])
    matrix = HADAMARD[ORDER][:, ORDER]

    with open_checkpoint(tmp_path) as weights:
        for seed, prefix in enumerate((UP, DOWN)):
            want = turned(stored(seed), right=matrix if inverse else matrix.T) / 2
            got = weights.get_weights(prefix).dequantize().double()
            assert torch.equal(got, torch.from_numpy(want))
        assert weights.report().complete


def test_each_layer_may_have_a_permutation_of_its_own(tmp_path: Path) -> None:
    orders = {UP: ORDER, DOWN: ORDER[::-1]}
    permutations = {f"{prefix}.R4_input.perm": torch.tensor(order) for prefix, order in orders.items()}
    save(tmp_path, tensors(UP, DOWN, R4_input=HADAMARD) | permutations, randomize=True, R4=[step("input")])

    with open_checkpoint(tmp_path) as weights:
        for seed, (prefix, order) in enumerate(orders.items()):
            want = turned(stored(seed), right=HADAMARD[order][:, order].T) / 2
            assert torch.equal(weights.get_weights(prefix).dequantize().double(), torch.from_numpy(want))


@pytest.mark.parametrize(
    ("order", "randomize", "error", "text"),
    [
        (None, True, MissingTensorError, "R4_input.perm"),
        ([0, 1, 2, 3, 4], True, ShapeError, r"R4_input.perm"),
        ([0, 1, 2, 2], True, ArgumentError, "every index below 4 once"),
        ([2.0, 0.0, 3.0, 1.0], True, ArgumentError, "every index below 4 once"),
        (ORDER, False, UnsupportedFormatError, "R4_input.perm is stored, and its scheme"),
    ],
)
def test_a_permutation_without_a_reading_is_refused(
    order: Any, randomize: bool, error: type[QloadError], text: str, tmp_path: Path
) -> None:
    named = tensors(UP, R4_input=HADAMARD)
    if order is not None:
        named[f"{UP}.R4_input.perm"] = torch.tensor(order)
    save(tmp_path, named, randomize=randomize, R4=[step("input")])

    with open_checkpoint(tmp_path) as weights, pytest.raises(error, match=text):
        weights.get_weights(UP)


def test_a_permutation_without_a_transform_is_unused(tmp_path: Path) -> None:
    save(tmp_path, tensors(UP) | {f"{UP}.R4_input.perm": torch.tensor(ORDER)})

    with open_checkpoint(tmp_path) as weights:
        weights.get_weights(UP)
        assert weights.report().unused == [f"{UP}.R4_input.perm"]


def test_a_matrix_without_a_config_is_refused(tmp_path: Path) -> None:
    """The codes are those of a transformed layer: without the config they would be read untransformed."""
    save(tmp_path, tensors(UP, v_input=HADAMARD))

    with pytest.raises(UnsupportedFormatError, match="has no transform_config of inputs or outputs"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "name",
    [f"{UP}.R2_weight_output.weight", f"{UP}.R1_weight_input.weight", "model.layers.0.attn_output.weight"],
)
def test_a_folded_matrix_and_a_layer_beside_are_no_transforms(name: str, tmp_path: Path) -> None:
    save(tmp_path, tensors(UP) | {name: torch.tensor(HADAMARD)})

    with open_checkpoint(tmp_path) as weights:
        assert weights.get_weights(UP).layer.transforms is None


ROWS_NOT_ORTHOGONAL = np.ones((4, 4))


@pytest.mark.parametrize(
    ("matrices", "steps", "error", "text"),
    [
        ({}, [step("input")], MissingTensorError, "R4_input"),
        ({"R4_input": np.ones((2, 2))}, [step("input")], ShapeError, r"\(4, 4\), a block"),
        ({"R4_input": HADAMARD / 2}, [step("input")], ArgumentError, "entries of 1 and -1"),
        ({"R4_input": ROWS_NOT_ORTHOGONAL}, [step("input")], ArgumentError, "orthogonal"),
        ({"R4_input": HADAMARD}, 2 * [step("input")], UnsupportedFormatError, "several transforms"),
    ],
)
def test_a_transform_without_a_reading_is_refused(
    matrices: Any, steps: list[Any], error: type[QloadError], text: str, tmp_path: Path
) -> None:
    save(tmp_path, tensors(UP, **matrices), R4=steps)

    with open_checkpoint(tmp_path) as weights, pytest.raises(error, match=text):
        weights.get_weights(UP)


@pytest.mark.parametrize("prefix", ["model.layers.0.mlp.gate", "model.layers.0.mlp.experts.0.up_proj"])
def test_plain_layers_and_experts_with_transforms_are_refused(prefix: str, tmp_path: Path) -> None:
    own = {f"{prefix}.weight": torch.ones(N, K)} if prefix.endswith("gate") else tensors(prefix)
    save(tmp_path, own | tensors(UP, R4_input=HADAMARD), R4=[step("input")])

    with (
        open_checkpoint(tmp_path) as weights,
        pytest.raises(UnsupportedFormatError, match="at run time, and it"),
    ):
        weights.get_weights(prefix)


def test_blocks_that_do_not_divide_a_layer_are_refused(tmp_path: Path) -> None:
    twelve = np.ones((12, 12))
    save(tmp_path, tensors(UP, R4_input=twelve), 12, R4=[step("input")])

    with open_checkpoint(tmp_path) as weights, pytest.raises(ShapeError, match="K = 32, which blocks of 12"):
        weights.get_weights(UP)


def test_two_matrices_for_one_layer_are_refused(tmp_path: Path) -> None:
    gate = "model.layers.0.mlp.gate_proj"
    named = tensors(UP, DOWN, gate, R4_input=HADAMARD)
    save(tmp_path, named | {f"{DOWN}.R4_input.weight": torch.from_numpy(SYLVESTER)}, R4=[step("input")])

    with open_checkpoint(tmp_path) as weights, pytest.raises(UnsupportedFormatError, match=r"and .* differ"):
        weights.get_weights(gate)


@pytest.mark.parametrize("size", [1, 2, 8, 64])
def test_the_walsh_hadamard_transform_is_sylvesters_matrix(size: int) -> None:
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.kron(SYLVESTER[:2, :2], matrix)
    x = torch.arange(3 * size).reshape(3, size).double()

    assert torch.equal(walsh_hadamard(x), x @ torch.from_numpy(matrix))
    for sign in (1, -1):
        transform = BlockTransform.of_matrix("H", sign * matrix)
        assert torch.equal(transform.sums(x), sign * x @ torch.from_numpy(matrix))


@pytest.mark.parametrize("shape", [(2, 3), (4,), (0, 0), (2, 2, 2)])
def test_a_matrix_of_a_transform_is_square(shape: tuple[int, ...]) -> None:
    with pytest.raises(ArgumentError, match="expected a square matrix"):
        BlockTransform.of_matrix("H", np.ones(shape))


def test_a_regular_hadamard_matrix_is_its_own_inverse() -> None:
    matrix = regular_hadamard(64).astype(np.int64)

    assert np.array_equal(matrix @ matrix, 64 * np.eye(64))
    assert set(matrix.sum(0)) == {8}
    assert np.array_equal(matrix, matrix.T)
