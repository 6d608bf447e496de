"""Faults of the kernel formats: Marlin, ExLlama, FP8 in Marlin's order, the kernels' contract."""

from qload.testing.faults.fault import Fault

_ORDERS = "qload/layouts/marlin.py"
_SPARSE = "qload/layouts/marlin_24.py"
_MARLIN = "qload/kernel_formats/marlin.py"
_KERNELS = "qload/kernels/mp_linear"

FAULTS = (
    Fault(
        "marlin-scales-always-grouped",
        _ORDERS,
        "SCALES_GROUPED if groups > 1 else SCALES_PER_COLUMN",
        "SCALES_GROUPED",
    ),
    Fault("marlin-scales-transposed", _ORDERS, '"g (nt j c) -> g (nt c j)"', '"g (nt j c) -> g (nt j c)"'),
    Fault(
        "marlin-single-scales-order",
        _ORDERS,
        'SCALES_PER_COLUMN = Order("g (nt j t r) -> g (nt t j r)"',
        'SCALES_PER_COLUMN = Order("g (nt j t r) -> g (nt t r j)"',
    ),
    Fault("marlin-bias-order", _ORDERS, '"(nt j t r) -> (nt t j r)"', '"(nt j t r) -> (nt j t r)"'),
    Fault("marlin-zeros-not-interleaved", _ORDERS, "g (nt u) (r j)", "g (nt u) (j r)"),
    Fault("marlin-zeros-8-bit", _ORDERS, "g (nt u x) (r j)", "g (nt x u) (r j)"),
    Fault("marlin-tile-transposed", _ORDERS, "kt (nt c t j) (r b h)", "kt (nt t c j) (r b h)"),
    Fault("marlin-8-bit-words", _ORDERS, "kt (nt c t j b) (r h)", "kt (nt c t b j) (r h)"),
    Fault("marlin-nibbles", _ORDERS, "(nt c t j) (r b h)", "(nt c t j) (r h b)"),
    Fault("sparse-tile", _SPARSE, "kt (nt c t j) (r b h)", "kt (nt c t j) (b r h)"),
    Fault("sparse-8-bit", _SPARSE, "kt (nt c t j b) (r h)", "kt (nt c t j b) (h r)"),
    Fault("sparse-scales", _SPARSE, '"g (nt b j) -> g (nt j b)"', '"g (nt b j) -> g (nt b j)"'),
    Fault("metadata-bits-swapped", _SPARSE, "(words >> (2 * i)) & 3", "(words >> (2 * (i ^ 1))) & 3"),
    Fault("metadata-order", _SPARSE, "ch (nb s o p d f)", "ch (nb s o p f d)"),
    Fault("metadata-defaults", _SPARSE, "torch.where(second, 1, 2)", "torch.where(second, 1, 0)"),
    Fault("metadata-unchecked", _SPARSE, "if wrong.numel() else None", "if False else None"),
    Fault(
        "marlin-perm-ignored",
        _MARLIN,
        "wide = codes if perm is None else codes[perm[:K]]",
        "wide = codes",
    ),
    Fault(
        "is-k-full-inverted",
        _MARLIN,
        "if self.g_idx is not None and not self.config.is_k_full:",
        "if self.g_idx is not None and self.config.is_k_full:",
    ),
    Fault(
        "is-k-full-always",
        _MARLIN,
        "is_k_full = config.groups(K) == groups and bool((ordered == here).all())",
        "is_k_full = bool(groups)",
    ),
    Fault(
        "marlin-padding-not-zero",
        _MARLIN,
        "devices.plain(wide), wide_zeros[g_idx]",
        "devices.plain(wide), wide_zeros[g_idx] * 0",
    ),
    Fault("marlin-group-unchecked", _MARLIN, "size not in GROUP_SIZES", "size < 0"),
    Fault(
        "marlin-zero-point-dropped",
        _MARLIN,
        "symmetric, codes = not keep_zeros and integers.symmetric, ",
        "symmetric, codes = True, ",
    ),
    Fault("repack-by-share", "qload/kernel_formats/integers.py", "return self.whole or self", "return self"),
    Fault(
        "repack-index-dtype",
        "qload/kernel_formats/integers.py",
        "None if index is None else index.dtype",
        "None if index is None else torch.int32",
    ),
    Fault(
        "repack-scale-lost",
        "qload/kernel_formats/fp8_marlin.py",
        "tiny=True,",
        "tiny=False,",
    ),
    Fault(
        "marlin-checkpoint-scales",
        "qload/formats/marlin.py",
        "(marlin.SCALES_PER_COLUMN if per_column else marlin.SCALES_GROUPED)",
        "marlin.scales(self.s.shape[0])",
    ),
    Fault(
        "marlin-padding-shape",
        "qload/kernel_formats/marlin_shapes.py",
        "((64, 128), (128, 64))",
        "((64, 64),)",
    ),
    Fault(
        "workspace-too-small",
        "qload/kernel_formats/marlin_shapes.py",
        "return max(-(-N // MIN_THREAD_N) * MAX_PARALLEL, LOCKS_PER_MULTIPROCESSOR * multiprocessors)",
        "return multiprocessors",
    ),
    Fault(
        "zeros-per-field",
        "qload/layouts/zeros.py",
        "return packing.pack(zeros.sub(1).remainder(2**packing.bits))",
        "return packing.pack(zeros.sub(1).clamp(0))",
    ),
    Fault("fp8-bias-forgotten", "qload/kernel_formats/fp8_marlin.py", "(scales * 2.0**-bias).T", "scales.T"),
    Fault(
        "fp8-bias-twice",
        "qload/kernel_formats/fp8_marlin.py",
        "EXPONENT_BIAS = {torch.float16: 8, torch.bfloat16: 120}",
        "EXPONENT_BIAS = {torch.float16: 7, torch.bfloat16: 120}",
    ),
    Fault(
        "fp8-rounded-twice",
        "qload/kernel_formats/fp8_marlin.py",
        ".T.double()\n",
        ".T.to(dtype).double()\n",
    ),
    Fault(
        "fp8-blocks-along-n",
        "qload/formats/fp8.py",
        "torch.arange(size, device=device) // block\n",
        "torch.arange(size, device=device) % -(-size // block)\n",
    ),
    Fault(
        "exllama-zero-not-minus-one",
        f"{_KERNELS}/parameters.py",
        "torch.full_like(scales, config.weight_type.bias, dtype=torch.int32)",
        "torch.full_like(scales, config.weight_type.bias + 1, dtype=torch.int32)",
    ),
    Fault(
        "act-order-over-ranks",
        f"{_KERNELS}/reasons.py",
        "if not (c.has_g_idx and c.is_k_partitioned):",
        "if True:",
    ),
    Fault(
        "orientation-ignored",
        f"{_KERNELS}/parameters.py",
        "words = param.data if here_in == 0 else param.data.t()",
        "words = param.data",
    ),
    Fault("cut-in-a-group-allowed", f"{_KERNELS}/reasons.py", "and K % c.group_size:", "and False:"),
    Fault(
        "scratch-of-the-last-layer",
        "qload/kernels/scratch.py",
        "size = max(need.bytes(longest) for each in needs.values() for need in each)",
        "size = [need.bytes(longest) for each in needs.values() for need in each][-1]",
    ),
    Fault(
        "scratch-shrinks",
        "qload/kernels/scratch.py",
        "longest = max([max_input_len, *(scratch.max_input_len for scratch in before)])",
        "longest = max_input_len",
    ),
    Fault("scalar-type-id", "qload/kernels/scalar_type.py", "(32, self.bias)", "(31, self.bias)"),
)
