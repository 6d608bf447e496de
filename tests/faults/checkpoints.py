"""Faults of stored tensors and their shares: storage, layouts, GPTQ, AWQ, loaders, rules."""

from tests.faults.fault import Fault

_PUBLISHED = "qload/architecture/published_names.py"

FAULTS = (
    Fault(
        "zero-plus-one",
        "qload/layouts/zero_points.py",
        "        return packing.unpack(words)\n",
        "        return packing.unpack(words).add(1)\n",
    ),
    Fault(
        "zero-mask-lost",
        "qload/layouts/zero_points.py",
        "packing.unpack(words.add(_ONES[packing.bits]))",
        "packing.unpack(words).add(1)",
    ),
    Fault("nibble-order-awq", "qload/layouts/awq.py", "k (c j r) -> k c (r j)", "k (c j r) -> k c (j r)"),
    Fault(
        "nibble-order-gptq",
        "qload/layouts/gptq.py",
        '"(kp i) n -> kp n (i)", i=32 // bits',
        '"(kp j r) n -> kp n (r j)", r=2, j=16 // bits',
    ),
    Fault("exllama-order", "qload/layouts/exllama.py", "kp n (r j)", "kp n (j r)"),
    Fault(
        "straddle-lost",
        "qload/sentences/sentence.py",
        "while low < bits:\n",
        "while low < bits and (low == 0 or bits != 3):\n",
    ),
    Fault(
        "sign-extended",
        "qload/devices/reference.py",
        "torch.bitwise_right_shift(parts[f.word], f.bit, out=part).bitwise_and_(_mask(f.width))",
        "torch.bitwise_right_shift(parts[f.word], f.bit, out=part)",
    ),
    Fault(
        "scales-rolled",
        "qload/devices/reference.py",
        "return of_groups.gather(1, ",
        "return of_groups.roll(1, 1).gather(1, ",
    ),
    Fault(
        "index-shifted-always",
        "qload/loader/sharding.py",
        "return fact - first if first else fact",
        "return fact - fact[0] if spec.index_of else fact",
    ),
    Fault(
        "index-never-rebased",
        "qload/loader/sharding.py",
        "return next((span[0] for span in spans if span), 0)",
        "return 0",
    ),
    Fault(
        "index-unchecked",
        "qload/spec/tensor.py",
        "wrong = np.flatnonzero((index < 0) | (index >= limit))",
        "wrong = np.flatnonzero(index < 0)[:0]",
    ),
    Fault(
        "int64-cast",
        "qload/weights/casts.py",
        "or STORED[tensor.dtype] not in FLOATS:",
        "or STORED[tensor.dtype] not in (*FLOATS, STORED[torch.int64]):",
    ),
    Fault("scales-cast", "qload/weights/casts.py", "if role is not Role.FLOAT or", "if role is Role.WORD or"),
    Fault(
        "arrivals-of-rank-0",
        "qload/methods/parameter_buffer.py",
        "return group.rank() // (group.size() // ranks) * extent, extent",
        "return 0 * ranks, extent",
    ),
    Fault(
        "arrivals-of-no-copies",
        "qload/methods/parameter_buffer.py",
        "group.rank() // (group.size() // ranks) * extent",
        "group.rank() % ranks * extent",
    ),
    Fault(
        "arrivals-shared",
        "qload/methods/parameter_buffer.py",
        "param.data = values.to(param.device, copy=True)",
        "param.data = values.to(param.device)",
    ),
    Fault(
        "engines-zero-points",
        "qload/kernels/mp_linear/contract.py",
        "STORED_AS_THEY_ARE = (scalar_types.uint4, scalar_types.uint8)",
        "STORED_AS_THEY_ARE = (scalar_types.uint4b8,)",
    ),
    Fault("overflow-unseen", "qload/weights/casts.py", "if lost.any():", "if lost.all():"),
    Fault(
        "rank-0-everywhere",
        "qload/loader/sharding.py",
        "world, rank = group.size(), group.rank()",
        "world, rank = group.size(), 0",
    ),
    Fault(
        "cut-group",
        "qload/loader/sharding.py",
        "return axis.free is None or all(",
        "return axis.free is None or any(",
    ),
    Fault(
        "cut-unchecked",
        "qload/loader/sharding.py",
        "    return step > 0 and place % step == 0",
        "    return step > 0 and place % 2 == 0",
    ),
    Fault(
        "parts-swapped",
        "qload/loader/sharding.py",
        "at += extent\n    return whole",
        "at += extent\n    whole = whole.roll(extents[0], join)\n    return whole",
    ),
    Fault(
        "permutation-ignored",
        "qload/spec/integers.py",
        "moved = rows[invert_perm(perm)]",
        "moved = rows",
    ),
    Fault(
        "tail-lost",
        "qload/storage/file_reads.py",
        "opened.read_into(run.data, first)",
        "opened.read_into(run.data, first)\n        run[-1] = 0",
    ),
    Fault("replaced-unseen", "qload/storage/file_reads.py", "if now != known:", "if False:"),
    Fault("half-read", "qload/devices/cuda.py", "return bool(place < 0)", "return True"),
    Fault("overlap-unseen", "qload/storage/header.py", "if entry.begin != at:", "if entry.begin > at:"),
    Fault(
        "nan-scale-unseen",
        "qload/verify/rules/tensor_values.py",
        '"NaN": run.isnan(),',
        '"NaN": run.isnan() & False,',
    ),
    Fault("published-scale-as-stored", _PUBLISHED, 'FIELDS = {"scale": "weight_scale_inv"}', "FIELDS = {}"),
    Fault(
        "published-up-and-down-exchanged",
        _PUBLISHED,
        '"w2": "down_proj", "w3": "up_proj"',
        '"w3": "down_proj", "w2": "up_proj"',
    ),
    Fault(
        "renamed-layers-old-in-config",
        "qload/conversion/convert.py",
        "request.output_name(name) for name in plain if",
        "name for name in plain if",
    ),
    Fault(
        "renamed-tensors-of-one-name",
        "qload/conversion/convert.py",
        "(other := owners.setdefault(new, name)) != name",
        "(other := owners.setdefault(new, name)) is None",
    ),
)
