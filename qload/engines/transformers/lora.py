"""LoRA by peft: adapters on layers whose weights are qload's."""
