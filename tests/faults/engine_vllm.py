"""Faults of engines: shares, parts, experts, and the completion of layers."""

from tests.faults.fault import Fault

CHECKPOINT, LOADING = "qload/engines/vllm/checkpoint.py", "qload/engines/vllm/weight_loading.py"
EXPERTS = "qload/methods/typed_experts.py"

FAULTS = (
    Fault(
        "engine-finishes-too-soon",
        CHECKPOINT,
        "return self._known and not self._pending",
        "return self._known",
    ),
    Fault("engine-never-finishes", CHECKPOINT, "self._pending.discard(name)", "self._pending.discard('')"),
    Fault(
        "engine-mappers-backwards",
        CHECKPOINT,
        "for mapper in self._mappers:",
        "for mapper in reversed(self._mappers):",
    ),
    Fault(
        "engine-tensors-of-a-layer-like-it", CHECKPOINT, 'f"{module}.{suffix}" for', 'f"{module}{suffix}" for'
    ),
    Fault(
        "engine-keeps-what-arrived",
        "qload/engines/vllm/weight_loading.py",
        "param.data = param.data.new_empty(0)",
        "param.data",
    ),
    Fault(
        "engine-bias-of-joined-parts-turned",
        "qload/methods/checkpoint_linear.py",
        "torch.split(bias, list(self.widths))",
        "torch.split(bias, list(self.widths))[::-1]",
    ),
    Fault(
        "engine-head-bias-twice",
        LOADING,
        "return y if bias is None else y + bias",
        "return y if bias is None else y + bias + bias",
    ),
    Fault(
        "engine-rows-of-the-first-rank",
        "qload/methods/typed_linear.py",
        "parts = [Part(share.prefix, *rows)]",
        "parts = [Part(share.prefix, 0, rows[1] - rows[0])]",
    ),
    Fault(
        "engine-gate-and-up-exchanged",
        EXPERTS,
        '{"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}',
        '{"w1": "up_proj", "w3": "gate_proj", "w2": "down_proj"}',
    ),
    Fault(
        "engine-experts-by-their-number-elsewhere",
        LOADING,
        "loader(param, loaded_weight, weight_name, shard_id, local)",
        "loader(param, loaded_weight, weight_name, shard_id, expert_id)",
    ),
    Fault(
        "engine-experts-elsewhere-as-the-first",
        EXPERTS,
        "torch.where(local < 0, layer.expert_buffer.num_experts, local)",
        "torch.where(local < 0, 0, local)",
    ),
    Fault(
        "engine-experts-of-one-rank",
        EXPERTS,
        '"process_group": buffer.group}',
        "}",
    ),
    Fault(
        "engine-routing-weight-on-the-other-side",
        LOADING,
        '"input" if layer.apply_router_weight_on_input else "output"',
        '"output" if layer.apply_router_weight_on_input else "input"',
    ),
    Fault(
        "engine-experts-not-counted",
        EXPERTS,
        "if len(experts.local) != count:",
        "if len(experts.local) > count:",
    ),
    Fault(
        "engine-versions-not-told",
        "qload/engines/vllm/hooks.py",
        'installed.partition("+")[0] not in TRIED',
        'installed.partition("+")[0] in TRIED',
    ),
    Fault(
        "engine-kernel-dequantizes",
        "qload/engines/vllm/kernel_config.py",
        "compute_capability is not None and kernel is DequantizeLinearKernel",
        "compute_capability is None and kernel is DequantizeLinearKernel",
    ),
)
