"""Small checkpoints in the dialects of many programs: configs, forms of experts, and expected values.

A form stores the quantized matrices as a dense layer, as a layer for each expert, or as stacks. The module
does not import qload.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.support.dialect_layers import (
    BLOCK,
    GROUP,
    Fields,
    Values,
    as_floats,
    awq,
    fp8,
    gptq,
    int8,
    mlx,
    mx,
    mx_blocks,
    nobodys,
    nvfp4,
    packed,
    plain,
    quanto,
    rounded,
)  # fmt: skip

Section = dict[str, Any]
HIDDEN, INNER, HEADS, HEAD, VOCAB, EXPERTS = 64, 128, 2, 32, 32, 3


# ---------- configs in the words of each program ----------


def of_ct(ignore: list[str], *, layout: str, **weights: Any) -> Section:
    said = {
        "num_bits": 8,
        "type": "float",
        "symmetric": True,
        "strategy": "tensor",
        "group_size": None,
        "dynamic": False,
    }
    group = {
        "targets": ["Linear"],
        "input_activations": None,
        "output_activations": None,
        "weights": said | weights,
    }
    return {
        "quant_method": "compressed-tensors", "format": layout, "quantization_status": "compressed",
        "kv_cache_scheme": None, "ignore": ignore, "config_groups": {"group_0": group},
    }  # fmt: skip


def of_fp8(ignore: list[str], **more: Any) -> Section:
    return {"quant_method": "fp8", "activation_scheme": "dynamic", "modules_to_not_convert": ignore, **more}


def of_blocks(ignore: list[str], **more: Any) -> Section:
    return of_fp8(ignore, fmt="e4m3", weight_block_size=[BLOCK, BLOCK], **more)


def of_modelopt(ignore: list[str], *, algorithm: str, **more: Any) -> Section:
    producer = {"name": "modelopt", "version": "0.47.0"}
    return {
        "quant_method": "modelopt",
        "quant_algo": algorithm,
        "ignore": ignore,
        "producer": producer,
        **more,
    }


def of_gptq(ignore: list[str], *, layout: str, sym: bool) -> Section:
    kept = {f"-:{name.replace('.', chr(92) + '.')}$": {} for name in ignore}
    return {
        "quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": sym,
        "checkpoint_format": layout, "dynamic": kept,
    }  # fmt: skip


def of_awq(ignore: list[str]) -> Section:
    return {
        "quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm",
        "modules_to_not_convert": [name.rpartition(".")[2] for name in ignore],
    }  # fmt: skip


def of_auto_round(ignore: list[str], **more: Any) -> Section:
    return {
        "quant_method": "auto-round", "bits": 4, "group_size": GROUP, "sym": True, "data_type": "int",
        "packing_format": "auto_round:auto_gptq", "autoround_version": "0.16.1",
        "extra_config": {name: {"bits": 16, "data_type": "float"} for name in ignore}, **more,
    }  # fmt: skip


def of_method(ignore: list[str], **more: Any) -> Section:
    return dict(more)


# ---------- the table of dialects ----------

DENSE, EACH, JOINED, DOTTED, SPLIT, LINEAR = "dense", "per expert", "joined", "dotted", "split", "linear"
SINGLE, STACKS = (DENSE, EACH), (DOTTED, SPLIT, LINEAR)
FORMS = (*SINGLE, *STACKS, JOINED)


@dataclass(frozen=True)
class Dialect:
    """A program's storage of a layer: its quantizer, its config, and the possible forms.

    `read`: forms with a mandatory reader. `unread`: no reader can decode the tensors. `foreign`: a format of
    one program, for refusal by name. `of_experts`: all layers but experts are plain.
    `weight_only`: inputs stay floats. `codes`: the field with the code bytes.
    """

    name: str
    quantize: Callable[..., tuple[Fields, Values]]
    section: Callable[[list[str]], Section] | None
    read: tuple[str, ...] = FORMS
    forms: tuple[str, ...] = FORMS
    floats: torch.dtype = torch.bfloat16
    foreign: bool = False
    unread: bool = False
    of_experts: bool = False
    weight_only: bool = True
    codes: str = "weight"
    top: Mapping[str, Any] = field(default_factory=dict)  # keys of config.json in addition to the model's
    side: Mapping[str, Any] = field(default_factory=dict)  # further files

    @property
    def plain(self) -> bool:
        return self.section is None and not self.foreign and not self.unread


BF16, FP16, FP32, BYTE, E8M0 = torch.bfloat16, torch.float16, torch.float32, torch.uint8, torch.float8_e8m0fnu
NAMES = {BF16: "bf16", FP16: "fp16", FP32: "fp32", BYTE: "u8", E8M0: "e8m0"}
channel = partial(of_ct, layout="float-quantized", strategy="channel")
blocks = partial(of_ct, layout="float-quantized", strategy="block", block_structure=[BLOCK, BLOCK])
pack = partial(of_ct, layout="pack-quantized", num_bits=4, type="int", strategy="group", group_size=GROUP)
int_group = partial(of_ct, layout="int-quantized", type="int")
FOURS = {"num_bits": 4, "scale_dtype": "torch.uint8", "strategy": "group", "group_size": 32}
EIGHTS = {"scale_dtype": "torch.uint8", "strategy": "group", "group_size": 32}
mxfp8_section = partial(of_fp8, quant_method="mxfp8", weight_block_size=[1, 32], scale_fmt="ue8m0")

DIALECTS = (
    *[
        Dialect(f"plain {NAMES[d]}", partial(plain, dtype=d), None, SINGLE, floats=d)
        for d in (BF16, FP16, FP32)
    ],
    *[
        Dialect(f"fp8 tensor [{'1' * axes}]", partial(fp8, axes=axes), of_fp8, weight_only=False)
        for axes in (0, 1)
    ],
    Dialect("fp8 tensor inv", partial(fp8, scale="weight_scale_inv"), of_fp8, (), weight_only=False),
    Dialect(
        "fp8 tensor modelopt", partial(fp8, static=True), partial(of_modelopt, algorithm="FP8"),
        weight_only=False,
    ),
    *[
        Dialect(f"fp8 channel {NAMES[d]}", partial(fp8, per="channel", dtype=d, axes=1), channel)
        for d in (BF16, FP16, FP32)
    ],
    Dialect(
        "fp8 channel modelopt", partial(fp8, per="channel"),
        partial(of_modelopt, algorithm="FP8_PER_CHANNEL_PER_TOKEN"), weight_only=False,
    ),
    *[
        Dialect(
            f"fp8 block inv {NAMES[d]}", partial(fp8, per="block", scale="weight_scale_inv", dtype=d),
            partial(of_blocks, **({"scale_fmt": "ue8m0"} if d in (BYTE, E8M0) else {})),
            () if d == BYTE else FORMS, weight_only=False,
        )
        for d in (FP32, BF16, E8M0, BYTE)
    ],
    Dialect("fp8 block ct", partial(fp8, per="block", dtype=BF16), blocks),
    Dialect(
        "fp8 block .scale", partial(fp8, per="block", scale="scale", dtype=E8M0),
        partial(of_blocks, scale_fmt="ue8m0"), (), weight_only=False,
    ),
    Dialect(
        "fp8 tensor qscale", partial(fp8, scale="qscale_weight", dtype=BF16), of_fp8, SINGLE, SINGLE,
        weight_only=False,
    ),
    Dialect(
        "fp8 block auto-round", partial(fp8, per="block", scale="weight_scale_inv", dtype=BF16),
        partial(
            of_auto_round, bits=8, data_type="fp", packing_format="auto_round:fp8",
            group_size=[BLOCK, BLOCK], weight_block_size=[BLOCK, BLOCK], activation_scheme="dynamic",
        ), (), weight_only=False,
    ),
    Dialect("e5m2 tensor", partial(fp8, kind="e5m2"), partial(of_fp8, fmt="e5m2"), (), weight_only=False),
    *[
        Dialect(
            f"int8 channel {NAMES[d]}", partial(int8, group=None, dtype=d),
            partial(int_group, strategy="channel"),
        )
        for d in (BF16, FP32)
    ],
    Dialect(
        "int8 group", partial(int8, group=GROUP, dtype=BF16),
        partial(int_group, strategy="group", group_size=GROUP), (),
    ),
    *[
        Dialect(
            f"pack4 {'sym' if s else 'asym'} {g}", partial(packed, group=g, symmetric=s),
            partial(pack, symmetric=s, **({} if g > 0 else {"strategy": "channel", "group_size": None})),
            codes="weight_packed", forms=(*SINGLE, *STACKS),
        )
        for s in (True, False) for g in (GROUP, -1)
    ],
    Dialect(
        "pack8", partial(packed, bits=8), partial(pack, num_bits=8),
        codes="weight_packed", forms=(*SINGLE, *STACKS),
    ),
    *[
        Dialect(
            f"gptq {layout} {'sym' if s else 'asym'}", partial(gptq, v2=layout == "gptq_v2", symmetric=s),
            partial(of_gptq, layout=layout, sym=s), SINGLE, (*SINGLE, DOTTED), floats=FP16, codes="qweight",
        )
        for layout in ("gptq", "gptq_v2") for s in (True, False)
    ],
    Dialect(
        "gptq auto-round", partial(gptq, v2=False, symmetric=True, g_idx=False), of_auto_round,
        read=SINGLE, floats=FP16, codes="qweight", forms=(*SINGLE, DOTTED),
    ),
    Dialect("awq", awq, of_awq, SINGLE, floats=FP16, codes="qweight", forms=(*SINGLE, DOTTED)),
    Dialect(
        "nvfp4 modelopt", partial(nvfp4, owner="modelopt"),
        partial(of_modelopt, algorithm="W4A16_NVFP4", group_size=16),
    ),
    Dialect(
        "nvfp4 ct", partial(nvfp4, owner="ct"), partial(
            of_ct, layout="nvfp4-pack-quantized", num_bits=4, strategy="tensor_group", group_size=16,
            scale_dtype="torch.float8_e4m3fn",
        ), codes="weight_packed", forms=(*SINGLE, *STACKS),
    ),
    *[
        Dialect(
            f"mxfp4 ct {NAMES[d]}", partial(mx, bits=4, weight="weight_packed", dtype=d),
            partial(of_ct, layout="mxfp4-pack-quantized", **FOURS), FORMS if d == BYTE else (),
            codes="weight_packed", forms=(*SINGLE, *STACKS),
        )
        for d in (BYTE, E8M0)
    ],
    Dialect(
        "mxfp4 modelopt", partial(mx, bits=4), partial(of_modelopt, algorithm="mxfp4", group_size=32), (),
    ),
    Dialect(
        "mxfp4 blocks", mx_blocks, partial(of_method, quant_method="mxfp4"), (), (JOINED,),
        codes="blocks", of_experts=True,
    ),
    *[
        Dialect(
            f"mxfp8 ct {NAMES[d]}", partial(mx, bits=8, dtype=d),
            partial(of_ct, layout="mxfp8-quantized", **EIGHTS), FORMS if d == BYTE else (),
        )
        for d in (BYTE, E8M0)
    ],
    Dialect(
        "mxfp8 modelopt", partial(mx, bits=8), partial(of_modelopt, algorithm="MXFP8", group_size=32),
        weight_only=False,
    ),
    Dialect("mxfp8 own", partial(mx, bits=8, scale="weight_scale_inv"), mxfp8_section, (), weight_only=False),
    Dialect(
        "fp4 as int8 .scale", partial(mx, bits=4, scale="scale", dtype=E8M0, stored=torch.int8),
        partial(of_blocks, scale_fmt="ue8m0"), (), weight_only=False, top={"expert_dtype": "fp4"},
    ),
    Dialect(
        "mlx", mlx, partial(of_method, group_size=GROUP, bits=4, mode="affine"), SINGLE, SINGLE,
    ),
    Dialect(
        "quanto", quanto, partial(of_method, quant_method="quanto", weights="int8"), SINGLE, SINGLE,
        codes="weight._data", side={"quanto_qmap.json": {}},
    ),
    *[
        Dialect(
            f"nobody's {name}", partial(nobodys, dtype=d, scale=scale), None, (), (JOINED, DOTTED, SPLIT),
            unread=True, of_experts=True,
        )
        for name, d, scale in (("i8", torch.int8, "step"), ("u8", BYTE, "weight_step"))
    ],
    Dialect(
        "quark mxfp4", partial(mx, bits=4), partial(
            of_method, quant_method="quark", exclude=["lm_head"],
            global_quant_config={
                "weight": {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
            },
        ), (),
    ),
)  # fmt: skip


# ---------- forms ----------


@dataclass
class Stored:
    """Tensors of a checkpoint, and the permitted results of a reader.

    `shown`: the value under each permitted name of a layer. `turned`: the same with gate and up interleaved,
    in stored order. `choices`: for each layer or stack, sets of names; a reader must return one set.
    `sources`: stored names for each name of `shown`.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    shown: dict[str, Values] = field(default_factory=dict)
    turned: dict[str, Values] = field(default_factory=dict)
    choices: list[list[list[str]]] = field(default_factory=list)
    sources: dict[str, tuple[str, ...]] = field(default_factory=dict)
    codes: list[str] = field(default_factory=list)  # stored names of code bytes
    plain: dict[str, Values] = field(default_factory=dict)  # unquantized layers

    def put(
        self, tensors: Mapping[str, Tensor], codes: str, shown: Mapping[str, Values], choices: list[list[str]]
    ) -> None:
        self.tensors |= tensors
        self.shown |= shown
        self.choices.append(choices)
        self.sources |= dict.fromkeys(shown, tuple(tensors))
        self.codes.append(codes)


def draw(rng: np.random.Generator, *shape: int) -> Values:
    return np.asarray(rng.standard_normal(shape) * 0.05)


def add_dense(to: Stored, dialect: Dialect, prefix: str, w: Values) -> None:
    """Add one layer (N, K)."""
    fields, values = dialect.quantize(w[None])
    tensors = {f"{prefix}.{name}": tensor[0] for name, tensor in fields.items()}
    to.put(tensors, f"{prefix}.{dialect.codes}", {prefix: values[0]}, [[prefix]])


def add_each(to: Stored, dialect: Dialect, lead: str, names: Iterable[str], w: Mapping[str, Values]) -> None:
    for name, matrix in zip(names, w.values(), strict=True):
        for expert, one in enumerate(matrix):
            add_dense(to, dialect, f"{lead}.{expert}.{name}", one)


def flipped(tensor: Tensor) -> Tensor:
    """Exchange the last two axes of a tensor with three, for storage with inputs first."""
    return tensor.transpose(1, 2).contiguous() if tensor.dim() == 3 else tensor


JOINTS = {"weight": "", "weight_scale_inv": "_scale_inv", "blocks": "_blocks", "scales": "_scales"}


@dataclass(frozen=True)
class Lie:
    """Memory order of stacks: inputs first, interleaved rows of gate and up, one scalar for all experts."""

    inputs_first: bool = False
    interleaved: bool = False
    together: bool = False


def add_stack(
    to: Stored,
    dialect: Dialect,
    lead: str,
    name: str,
    w: Values,
    lie: Lie,
    *,
    joined: bool,
    halves: tuple[str, ...],
) -> None:
    """Add one stacked matrix (E, N, K) under `lead.name`; `halves` has the names of its parts."""
    fields, values = dialect.quantize(w, together=lie.together)
    stack, tensors = f"{lead}.{name}", {}
    for own, tensor in fields.items():
        stored = flipped(tensor) if lie.inputs_first else tensor
        if own == "weight_shape":
            stored = torch.tensor([len(w), *w.shape[1:]])
        if (
            lie.together
            and own in ("weight_scale", "weight_scale_2", "input_scale")
            and tensor.numel() == len(w)
        ):
            stored = tensor.reshape(-1)[0]
        tensors[f"{stack}{JOINTS.get(own, '_' + own)}" if joined else f"{stack}.{own}"] = stored
    experts, parts = range(len(w)), len(halves)
    if (
        lie.interleaved and parts > 1
    ):  # a reader may keep the interleaved rows of the stack, or put the gate's rows first
        to.turned |= {stack: values} | {f"{lead}.{e}.{name}": values[e] for e in experts}
        values = np.concatenate([values[:, at::parts] for at in range(parts)], 1)
    shown = {stack: values} | {
        at: values[e] for e in experts for at in (f"{stack}.{e}", f"{lead}.{e}.{name}")
    }
    choices = [[stack], [f"{stack}.{e}" for e in experts], [f"{lead}.{e}.{name}" for e in experts]]
    each = w.shape[1] // parts
    rows = {half: slice(at * each, (at + 1) * each) for at, half in enumerate(halves)}
    shown |= {f"{lead}.{e}.{half}": values[e][row] for e in experts for half, row in rows.items()}
    choices.append([f"{lead}.{e}.{half}" for e in experts for half in halves])
    codes = {"weight": "", "blocks": "_blocks"}.get(dialect.codes, "") if joined else f".{dialect.codes}"
    to.put(tensors, f"{stack}{codes}", shown, choices)


# ---------- models ----------

KNOWN = ("llama", "qwen3_moe", "mixtral", "gpt_oss", "granitemoe")
UNKNOWN = ("nimbus", "")  # a type without a table, and a config without a type
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Case:
    """A drawn combination of dialect, form and model."""

    seed: int
    dialect: Dialect
    form: str
    kind: str
    door: str
    lead: str
    lie: Lie
    names: tuple[str, ...] = PROJECTIONS

    @property
    def id(self) -> str:
        lies = "".join(letter for letter, is_so in zip("kit", vars(self.lie).values(), strict=True) if is_so)
        parts = (
            self.dialect.name,
            self.form + (f" {lies}" if lies else ""),
            self.kind or "no type",
            self.door,
        )
        return f"{self.seed}-" + "-".join(part.replace(" ", "_") for part in parts)


def config_of(case: Case, ignore: list[str]) -> dict[str, Any]:
    dtype = {BF16: "bfloat16", FP16: "float16", FP32: "float32"}[case.dialect.floats]
    config: dict[str, Any] = {
        "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": 1,
        "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "head_dim": HEAD, "vocab_size": VOCAB,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 64,
        "tie_word_embeddings": False, "hidden_act": "silu", "attention_bias": False, "torch_dtype": dtype,
        "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    if case.kind:
        config["model_type"] = case.kind
        config["architectures"] = [f"{case.kind.title().replace('_', '')}ForCausalLM"]
    if case.form != DENSE:
        config |= {"num_experts_per_tok": 2, "moe_intermediate_size": INNER, "norm_topk_prob": True}
        config["num_experts" if case.kind in ("qwen3_moe", *UNKNOWN) else "num_local_experts"] = EXPERTS
    if case.kind == "granitemoe":
        ones = ("embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier")
        config |= dict.fromkeys(ones, 1.0)
    if case.dialect.section is not None:
        config["quantization_config"] = case.dialect.section(ignore)
    return config | case.dialect.top


def router_of(case: Case) -> str:
    above = case.lead.removesuffix(".experts")
    return {"gpt_oss": f"{above}.router", "granitemoe": f"{above}.router.layer"}.get(
        case.kind, f"{above}.gate"
    )


def build(case: Case) -> tuple[Stored, list[str]]:
    """Return the tensors of a model with one layer, and the names of its plain modules."""
    rng, to, dialect = np.random.default_rng(case.seed), Stored(), case.dialect

    def floats(name: str, values: Values, layer: bool = True) -> None:
        kept = rounded(values, dialect.floats)
        to.tensors[name] = as_floats(kept, dialect.floats)
        if layer:
            to.plain[name.removesuffix(".weight")] = kept

    above = "model.layers.0"
    floats("model.embed_tokens.weight", draw(rng, VOCAB, HIDDEN))
    floats("lm_head.weight", draw(rng, VOCAB, HIDDEN))
    ignore = ["lm_head"]
    norms = {
        "model.norm": HIDDEN,
        f"{above}.input_layernorm": HIDDEN,
        f"{above}.post_attention_layernorm": HIDDEN,
    }
    if case.kind == "qwen3_moe":
        norms |= {f"{above}.self_attn.q_norm": HEAD, f"{above}.self_attn.k_norm": HEAD}
    for name, size in norms.items():
        floats(f"{name}.weight", 1 + draw(rng, size), layer=False)
    if case.kind == "gpt_oss":
        floats(f"{above}.self_attn.sinks", draw(rng, HEADS), layer=False)
    for letter in "qkvo":
        own = Dialect("", partial(plain, dtype=dialect.floats), None) if dialect.of_experts else dialect
        add_dense(to, own, f"{above}.self_attn.{letter}_proj", draw(rng, HEADS * HEAD, HIDDEN))
    if case.form == DENSE:
        for name in PROJECTIONS:
            add_dense(
                to,
                dialect,
                f"{above}.mlp.{name}",
                draw(rng, *((HIDDEN, INNER) if "down" in name else (INNER, HIDDEN))),
            )
        return to, ignore
    router = router_of(case)
    floats(f"{router}.weight", draw(rng, EXPERTS, HIDDEN) * 20)
    if case.kind == "gpt_oss":
        floats(f"{router}.bias", draw(rng, EXPERTS), layer=False)
    ignore.append(router)
    gate, up, down = (
        draw(rng, EXPERTS, INNER, HIDDEN),
        draw(rng, EXPERTS, INNER, HIDDEN),
        draw(rng, EXPERTS, HIDDEN, INNER),
    )
    if case.form == EACH:
        add_each(to, dialect, case.lead, case.names, {"gate": gate, "up": up, "down": down})
        return to, ignore
    if case.form == SPLIT:
        for name, w in zip(PROJECTIONS, (gate, up, down), strict=True):
            add_stack(to, dialect, case.lead, name, w, case.lie, joined=False, halves=(name,))
        return to, ignore
    both = np.concatenate([gate, up], 1)
    names, joined = ("gate_up_proj", "down_proj"), case.form == JOINED
    if case.form == LINEAR:
        names = ("input_linear", "output_linear")
    add_stack(
        to, dialect, case.lead, names[0], both, case.lie, joined=joined, halves=("gate_proj", "up_proj")
    )
    add_stack(to, dialect, case.lead, names[1], down, case.lie, joined=joined, halves=("down_proj",))
    return to, ignore


def write(case: Case, folder: Path) -> Stored:
    """Write the checkpoint of a case to a folder."""
    stored, ignore = build(case)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.clone().contiguous() for name, tensor in stored.tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config_of(case, ignore)))
    for name, values in case.dialect.side.items():
        (folder / name).write_text(json.dumps(values))
    return stored
