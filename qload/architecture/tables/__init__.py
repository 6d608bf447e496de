"""One table for each type of model, by the `model_type` of its config.

Names, shapes and defaults are those of transformers 5.23; `nox -s transformers` checks each table against
what transformers itself writes of tiny models.
"""

from collections.abc import Mapping

from qload.architecture.table import Table
from qload.architecture.tables import dense, latent, mixtures, older

TABLES: Mapping[str, Table] = {
    "llama": dense.LLAMA,
    "mistral": dense.MISTRAL,
    "qwen2": dense.QWEN2,
    "qwen3": dense.QWEN3,
    "gemma": dense.GEMMA,
    "gemma2": dense.GEMMA2,
    "gemma3_text": dense.GEMMA3,
    "phi3": dense.PHI3,
    "mixtral": mixtures.MIXTRAL,
    "qwen2_moe": mixtures.QWEN2_MOE,
    "qwen3_moe": mixtures.QWEN3_MOE,
    "gpt_oss": mixtures.GPT_OSS,
    "llama4_text": mixtures.LLAMA4,
    "deepseek_v2": latent.DEEPSEEK_V2,
    "deepseek_v3": latent.DEEPSEEK_V3,
    "phi": older.PHI,
    "starcoder2": older.STARCODER2,
    "gpt_neox": older.GPT_NEOX,
    "bloom": older.BLOOM,
}

# Whose text model is of another type than they are, where that does not say its own.
TEXT_OF: Mapping[str, str] = {"gemma3": "gemma3_text", "llama4": "llama4_text", "idefics2": "mistral"}

# Types that tie the head by default, around a text model that does not.
TIED_AROUND = frozenset(
    (
        *("deepseek_vl", "deepseek_vl_hybrid", "fun_asr_nano", "glmasr", "got_ocr2", "internvl", "janus"),
        *("kimi_k25", "lighton_ocr", "mistral3", "moss_transcribe_diarize", "ovis2", "pp_chart2table"),
        "qwen3_asr",
    )
)

__all__ = ["TABLES", "TEXT_OF", "TIED_AROUND"]
