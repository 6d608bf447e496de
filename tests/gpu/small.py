"""Every CUDA kernel of ours once, on shapes that a sanitizer gets through: `nox -s sanitize`.

Results are compared too, so that a checker that runs nothing is seen. `large` is left out: what it adds to
dequantize is the vendor's product, whose copies sanitizers do not follow.
"""

from dataclasses import replace
from tempfile import TemporaryFile

import torch
from torch import Tensor

from qload import devices, native
from qload.devices import StoredTable, cuda
from qload.devices.cuda_stored import dequantize_stored
from qload.experts import GatedActivation, Routing
from qload.formats import AWQConfig, AWQWeight
from qload.kernel_formats import ExllamaWeight, GPTQMarlinWeight, repack
from qload.kernels import products, scaled
from qload.kernels.activations import quantize
from qload.kernels.cuda import (
    byte_strips,
    decode,
    decoder_ops,
    exllama,
    experts,
    hopper_gemm,
    launch,
    mma_gemm,
    w8a8,
)
from qload.kernels.cuda.byte_strips import ByteStripsCall
from qload.kernels.cuda.decoder_ops import attend_pages
from qload.kernels.cuda.marlin import MarlinCall, arguments
from qload.kernels.cuda.quantize import finish
from qload.kernels.cuda.quantize import inputs as inputs_of
from qload.kernels.cuda.strips import StripsCall
from qload.kernels.quantized_inputs import MadeInputs
from qload.layouts import awq, gptq, marlin
from qload.sentences import Digit
from qload.spec import ActivationScheme, Weight
from tests.bench import cell_layers
from tests.gpu import exllama_layers
from tests.gpu.expert_layers import Tokens, drawn, drawn_numbers, tokens
from tests.gpu.layers import far_apart, layer
from tests.gpu.test_quantize import SCHEMES
from tests.kernels.cuda_layers import byte_layer

K, N, GROUP = 512, 128, 64
KINDS = ("block", "channel", "e5m2", "mxfp8", "nvfp4", "mxfp4", "nf4")  # of bytes in strips
DIVISIONS = (
    (32, 128, False, 2),
    (96, 256, True, 1),
    (64, 128, False, 1),
    (128, 128, True, 2),
    (
        128,
        192,
        True,
        1,
    ),  # no slot twice: what a lane says for its warp, racecheck takes as said for itself alone
    (64, 128, False, 1, False, 2),
    (32, 64, True, 1, False, 2),
)
MMA_DIVISIONS = tuple(mma_gemm.MmaDivision(*way) for way in ((32, 2, 4, 1), (48, 4, 1, 2), (64, 2, 2, 2)))


def same(got: Tensor, want: Tensor) -> None:
    """Equal, or the run ends with an error."""
    if not torch.equal(got.cpu(), want.cpu()):
        raise SystemExit("a result differs from the reference")


def moves() -> None:
    """Tiles, rows that are looked up, elements one by one."""
    codes = torch.randint(16, (K, N), dtype=torch.int32)
    one, other = gptq.rows(4), marlin.rows(4)
    words, want = one.pack(codes).cuda(), other.pack(codes)
    same(other.pack(one.packed(words)), want)
    same(awq.columns(4).pack(one.packed(words)), awq.columns(4).pack(codes))
    perm = torch.randperm(K)
    plain = torch.arange(33 * 65, dtype=torch.int16).reshape(33, 65)
    packed = one.packed(words)[perm.cuda()]
    same(other.pack(packed), other.pack(codes[perm]))  # rows in two passes
    same(one.pack(one.unpack(words)), words)  # numbers
    turned = torch.empty(65, 33, dtype=torch.int16, device="cuda")
    if not cuda.move(plain.cuda(), turned, 16, [Digit(33, 65, 1), Digit(65, 1, 33)]):
        raise SystemExit("the module moves nothing")
    same(turned, plain.T)


def copies() -> None:
    """Runs of bytes from the host, on a stream of their own."""
    memory, stream = torch.randint(256, (1 << 12,), dtype=torch.uint8).pin_memory(), torch.cuda.Stream()
    places = [slice(0, 1), slice(64, 200), slice(1024, 4096)]
    targets = [torch.empty(place.stop - place.start, dtype=torch.uint8, device="cuda") for place in places]
    if not cuda.copy_from_host(memory, places, targets, stream):
        raise SystemExit("the module copies nothing")
    stream.synchronize()
    for place, target in zip(places, targets, strict=True):
        same(target, memory[place])


def files() -> None:
    """Ranges of a file, one of which is larger than a buffer, by threads of the module."""
    data, device = torch.randint(256, (1 << 20,), dtype=torch.uint8), torch.device("cuda", 0)
    cuda.READ_BYTES = 1 << 14
    reader = devices.file_reader(device)
    if reader is None:
        raise SystemExit("the module reads no files")
    asked = [(0, 5), (77, 1), (100, 300_001), (1 << 19, 1 << 19)]
    outs = [torch.empty(count, dtype=torch.uint8, device=device) for _, count in asked]
    with TemporaryFile() as file:
        file.write(data.numpy().tobytes())
        file.flush()
        ranges = [(file.fileno(), *one, out.data_ptr(), 1, 0) for one, out in zip(asked, outs, strict=True)]
        if not reader.wait(reader.begin(ranges, torch.cuda.current_stream(device))):
            raise SystemExit("the module could not read a file")
        for (begin, count), out in zip(asked, outs, strict=True):
            same(out, data[begin : begin + count])
        reader.close()


def weight() -> AWQWeight:
    """Random codes, zero points and scales."""
    groups = K // GROUP
    return AWQWeight(
        config=AWQConfig(GROUP),
        qweight=torch.randint(-(2**31), 2**31, (K, N // 8), dtype=torch.int64).to(torch.int32),
        qzeros=torch.randint(-(2**31), 2**31, (groups, N // 8), dtype=torch.int64).to(torch.int32),
        scales=(torch.rand(groups, N) * 0.02).half(),
    )


def strips_of_scaled_operands() -> None:
    """Tiles of 16, 24, 32 and 48 tokens, and scales that do and do not fit beside each other."""
    for far in (None, True, False):
        held = layer(K, N, 128, layout="strips")
        held = held if far is None else far_apart(held, exact=True, in_rows=far)
        w = held.dequantize()
        for M in (9, 24, 32, 48):
            rows = torch.arange(M, device="cuda") * (K // 48)  # of all groups
            x = torch.eye(K, dtype=torch.float16, device="cuda")[rows]
            for columns, split in ((1, 1), (1, 2), (2, 2), (0, 0)):
                same(decode.run(StripsCall(*arguments(x, held)), columns, split), w.T[rows].half())


def strips_of_many_tokens() -> None:
    """Both widths, small groups and one of all rows, every way to add up."""
    for bits, group, zeros in ((4, GROUP, True), (8, 32, True), (8, -1, False)):
        held = layer(K, N, group, zeros, bits=bits, layout="strips")
        w = held.dequantize()
        for M in (17, 64, 100):
            x = torch.eye(K, dtype=torch.float16, device="cuda")[:M].contiguous()
            for how in DIVISIONS:
                call = StripsCall(*arguments(x, held))
                divided = hopper_gemm.ManyDivision(*how)
                if hopper_gemm.why_not(call) is None and hopper_gemm.STAGE * divided.parts <= K:
                    same(hopper_gemm.run(call, divided), w.T[:M].half())
            for way in MMA_DIVISIONS:
                same(mma_gemm.run(StripsCall(*arguments(x, held)), way), w.T[:M].half())


def bytes_in_strips() -> None:
    """All codes of numbers, and all kinds of scales; few tokens and many, every way to add up."""
    for held in (byte_layer(K, N, kind).to("cuda") for kind in KINDS):
        w = held.dequantize()
        for M in (1, 9, 24, 64, 100):
            x = torch.eye(K, dtype=torch.float16, device="cuda")[:M].contiguous()
            call = ByteStripsCall(*byte_strips.arguments(x, held))  # type: ignore[arg-type]
            for columns, split in ((1, 1), (1, 2), (2, 2)) if M <= 24 else ():
                same(decode.run(call, columns, split), w.T[:M].half())
            for how in DIVISIONS:
                divided = hopper_gemm.ManyDivision(*how)
                if hopper_gemm.why_not(call) is None and hopper_gemm.STAGE * divided.parts <= K:
                    same(hopper_gemm.run(call, divided), w.T[:M].half())
            for way in MMA_DIVISIONS:
                same(mma_gemm.run(call, way), w.T[:M].half())


def codes_in_strips() -> None:
    """FP8 by blocks and by outputs, int8, with inputs that are their own codes; every way to add up."""
    for held in (byte_layer(K, N, kind).to("cuda") for kind in ("block", "channel", "int8")):
        w = held.dequantize()
        for M in (1, 64, 100):
            x = torch.eye(K, dtype=torch.float16, device="cuda")[:M].contiguous()
            call = ByteStripsCall(*byte_strips.arguments(x, held))  # type: ignore[arg-type]
            kind = w8a8.TYPES[call.code]
            scheme = ActivationScheme(kind, 8, False, "tensor", scale="input_scale")  # type: ignore[arg-type]
            coded = replace(call, scheme=scheme, stored=torch.ones(1, device="cuda"))
            for how in (
                (64, 128, False, 2),
                (128, 128, True, 1),
                (256, 128, False, 1, True),
                (128, 128, True, 1, True),
            ):
                same(w8a8.run(coded, hopper_gemm.ManyDivision(*how)), w.T[:M].half())


def experts_that_tokens_chose() -> None:
    """Both widths and all codes, in one pass and not, sorted and not; one by one as all together."""
    kinds = (
        drawn(3, 256, 64, 64, True),
        drawn(3, 256, 40, 32, bias=True),
        drawn(3, 256, 128, act_order=True, bits=8),
        *(drawn_numbers(3, 256, 64, per) for per in ("channel", "int8", "mxfp8", "nvfp4", "mxfp4", "nf4")),
        drawn_numbers(3, 256, 160, "block", bias=True),
    )
    for held in kinds:
        chosen = tokens(20, 256, 2, 3, torch.float16)
        chosen.ids[5:7, 1] = 3  # which is elsewhere
        place = torch.tensor([0, 1, 2, -1], device="cuda", dtype=torch.int32)
        all_ways = [Tokens(chosen.x[:M], chosen.ids[:M], chosen.weights[:M]) for M in (1, 7, 20)]
        for way in experts.WAYS:
            rows = [
                experts.multiply(
                    each.x, each.ids, each.weights, held.gate_up, held.down, expert_map=place, way=way
                )
                for each in all_ways
            ]
            same(rows[2][:7], rows[1])
            same(rows[2][:1], rows[0])


def inputs_in_order() -> None:
    """By way of shared memory and not, of rows that a layer has not, at addresses that nothing divides."""
    memory = torch.arange(5 * 104 + 1, device="cuda").half()
    perm = torch.randperm(128, device="cuda").to(torch.int32)
    for x in (memory[:520].view(5, 104), memory[1:].view(5, 104), memory[:500].view(5, 100)):
        want = torch.nn.functional.pad(x, (0, 128 - x.shape[1]))[:, perm.long()]
        for staged in (False, True):
            same(launch.gathered(x, perm, staged=staged), want)


def three_bits() -> None:
    """Of which a kernel rounds some columns."""
    for act_order in (False, True):
        held = exllama_layers.layer(288, 96, 48, 3, act_order=act_order)
        order = slice(None) if held.q_perm is None else held.q_perm.long()
        want = held.dequantize(torch.float16)[:, order]
        call = exllama_layers.call(want.new_zeros(1, 288), held)
        for columns in (slice(0, 96), slice(32, 96)):
            same(exllama._rounded(call, columns), want[columns])


def bytes_and_streams() -> None:
    """Codes in bytes, in pairs, sparse and down columns, in layers whose last rows fill no block."""
    for name in (
        "fp8 block",
        "fp8 channel",
        "ct int8 group",
        "mxfp8",
        "mxfp4",
        "nvfp4",
        "modelopt awq",
        "2:4",
    ):
        check_layer(cell_layers.LAYERS[name](192, 384))
    for name in ("eetq", "exl2", "gptq 3", "fp8 in marlin's order", "nvfp4 in marlin's order"):
        check_layer(cell_layers.LAYERS[name](192, 640))
    check_layer(cell_layers.fp8(3, 5, block=(3, 5))(67, 328))


def few_floats() -> None:
    """Each number of tokens that has a kernel, of small whole numbers."""
    for M in (1, 2, 3, 8, 16):
        x, w = (torch.randint(-8, 9, (rows, 260)).float() for rows in (M, 37))
        y = torch.empty(M, 37, device="cuda")
        if not products.multiply_floats(y, x.cuda(), w.cuda(), None):
            raise SystemExit("the module multiplies no float32")
        same(y, x @ w.T)


def check_layer(weight: Weight) -> None:
    """Against plain torch."""
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        with native.reference():
            want = weight.dequantize(dtype)
        same(weight.dequantize(dtype), want)


def quantized_inputs() -> None:
    """One scale for all, one a token, one a group; codes, padded ones, numbers; sums as results."""
    for name in (
        "fp8 tensor",
        "fp8 group",
        "mxfp8",
        "int8 token",
        "int8 asymmetric",
        "int8 asymmetric group",
    ):
        scheme = SCHEMES[name]
        for M, K_ in ((1, 256), (5, 4352)):
            x = torch.randn(M, K_, device="cuda").half()
            made, want = inputs_of(x, scheme, None, None), MadeInputs(quantize(x, scheme))
            if made is None:
                raise SystemExit("the module quantizes nothing")
            kind = torch.int8 if scheme.type == "int" else torch.float8_e4m3fn
            same(made.codes(kind, 32).view(torch.uint8), want.codes(kind, 32).view(torch.uint8))
            same(made.counted(torch.bfloat16), want.counted(torch.bfloat16))
            if not want.one_step:
                same(made.meant(torch.float16)[0], want.meant(torch.float16)[0])
    whole = torch.randint(-999, 999, (4, 1028), device="cuda", dtype=torch.int32)
    row, column = torch.rand(3, 1, device="cuda"), torch.rand(1028, device="cuda")
    for found, zeros in ((whole, torch.ones(3, 1, device="cuda")), (whole[:3].float(), None)):
        y, exact = (torch.empty(3, 1028, device="cuda", dtype=torch.half) for _ in range(2))
        scaled._finish(scaled.Sums(slice(0, 1028), found.clone(), row, column, zeros), None, exact)
        if not finish(found, row, column, zeros, None, y):
            raise SystemExit("the module scales nothing")
        same(y, exact)


def close(got: Tensor | None, want: Tensor) -> None:
    """Equal but for one rounding to 16 bits, or the run ends with an error."""
    if got is None or not torch.allclose(
        got.double(), want.double(), rtol=2 * torch.finfo(got.dtype).eps, atol=1e-6
    ):
        raise SystemExit("a result differs from the reference")


def between_products() -> None:
    """Sums and norms, heads and their cache, gates, routing, attention of shared keys and of one alone."""
    ones = {size: torch.ones(size, device="cuda").half() for size in (64, 264, 8200)}
    for size, weight in ones.items():
        x = torch.randn(3, size, device="cuda").half()
        want = torch.nn.functional.rms_norm((x + x).double(), (size,), None, 1e-5)
        made = decoder_ops.add_norm(x, x.clone(), weight, 1e-5)
        close(None if made is None else made[1], want)
    both = torch.randn(3, 272, device="cuda").half()
    gate, up = both.double().chunk(2, -1)
    close(decoder_ops.gated(both, GatedActivation("silu")), torch.nn.functional.silu(gate) * up)
    router = torch.randn(40, 264, device="cuda").half()
    routing = Routing("softmax_top_k", 40, 4, renormalized=True)
    chosen = decoder_ops.route(torch.randn(11, 264, device="cuda").half(), router, None, routing)
    close(None if chosen is None else chosen[1].sum(1), torch.ones(11, device="cuda"))
    for sequences, heads, kv, size in ((2, 8, 2, 64), (3, 5, 1, 96), (40, 16, 16, 128)):
        keys, values = torch.zeros(2, 1 + 3 * sequences, 7, kv, size, device="cuda").half()
        table = torch.arange(1, 1 + 3 * sequences, device="cuda").view(sequences, 3)
        still, turn = (
            torch.ones(sequences, size // 2, device="cuda"),
            torch.zeros(sequences, size // 2, device="cuda"),
        )
        for at in range(15):
            given = torch.randn(sequences, heads + 2 * kv, size, device="cuda").half()
            slots = table[:, at // 7] * 7 + at % 7
            q = decoder_ops.place_heads(given, still, turn, slots, (keys, values), pairs=at % 2 == 0)
            close(q, given[:, :heads])
        same(values.flatten(0, 1)[slots], given[:, heads + kv :])
        places, scale = torch.full((sequences,), 14, device="cuda"), size**-0.5
        k, v = (
            held[table].flatten(1, 2)[:, :15].double().repeat_interleave(heads // kv, 2)
            for held in (keys, values)
        )
        weights = (torch.einsum("shd,snhd->shn", given[:, :heads].double(), k) * scale).softmax(-1)
        y = attend_pages(given[:, :heads], (keys, values), places, table, v_size=size, scale=scale)
        close(y, torch.einsum("shn,snhd->shd", weights, v))


def main() -> None:
    """All of it, and the linear in every division."""
    torch.manual_seed(0)
    moves()
    copies()
    files()
    made = weight()
    for layout in ("awq", "gptq_v2", "marlin"):
        held = made if layout == "awq" else repack(made, layout)
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            same(held.to("cuda").dequantize(dtype), made.dequantize().to(dtype))
            same(held.codes().dequantize(dtype), made.dequantize().to(dtype))
    table, scales = torch.rand(16), torch.rand(9)
    flat = torch.randint(256, (33 * 17 // 2 + 1,), dtype=torch.uint8)
    values = torch.stack([flat >> 4, flat & 15], 1).flatten()[: 33 * 17].long()
    want = table[values] * scales.repeat_interleave(64)[: 33 * 17]
    for dtype in (torch.float16, torch.float32):
        got = torch.empty(33, 17, dtype=dtype, device="cuda")
        if not dequantize_stored(StoredTable(flat.cuda(), table.cuda(), scales.cuda(), 64), got):
            raise SystemExit("the module reads no table")
        same(got, want.reshape(33, 17).to(dtype))
    read = repack(made, "marlin").to("cuda")
    assert isinstance(read, GPTQMarlinWeight)
    w = read.dequantize()
    for layout, kind in (("marlin", MarlinCall), ("strips", StripsCall)):
        held = repack(made, layout).to("cuda")
        assert isinstance(held, GPTQMarlinWeight)
        for M in (1, 8, 9, decode.MOST_TOKENS[layout]):
            x = torch.eye(K, dtype=torch.float16, device="cuda")[:M].contiguous()
            for columns, split in ((1, 1), (1, 2), (2, 2), (0, 0)):
                same(decode.run(kind(*arguments(x, held)), columns, split), w.T[:M].half())
    strips_of_scaled_operands()
    strips_of_many_tokens()
    bytes_in_strips()
    codes_in_strips()
    experts_that_tokens_chose()
    inputs_in_order()
    between_products()
    three_bits()
    bytes_and_streams()
    quantized_inputs()
    few_floats()
    shuffled = repack(made, "exllama").to("cuda")
    assert isinstance(shuffled, ExllamaWeight)
    for M in (1, 8, 9, 33):
        x = torch.eye(K, dtype=torch.float16, device="cuda")[:M].contiguous()
        for columns, split in ((1, 1), (1, 2), (2, 2), (0, 0)):
            rows = exllama.ExllamaCall(*exllama.arguments(x, shuffled))
            same(exllama.multiply_few(rows, columns, split), w.T[:M].half())


if __name__ == "__main__":
    main()
