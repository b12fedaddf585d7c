"""Metadata that a file should have: llama.cpp loads it without, and then writes another text."""

from __future__ import annotations

from gguf_mtp.types import ModelFacts

__all__ = ["missing_keys", "warning"]

_ROUTER = ("expert_gating_func", "expert_weights_norm", "expert_weights_scale")
"""How DeepSeek V3 weighs its experts; V2's routers need none of these, and have no bias."""
_YARN = ("rope.scaling.factor", "rope.scaling.original_context_length")
_ROUTED_LIKE_V3 = frozenset({"deepseek2", "deepseek32"})
_GLM_LITE_VOCAB = 154_880
"""llama.cpp knows GLM-4.7-Flash by it, whose first files had no `expert_gating_func`."""


def missing_keys(facts: ModelFacts) -> tuple[str, ...]:
    """Keys without which llama.cpp runs the model by defaults that are not the model's.

    Only keys that the model needs: a sigmoid router's where the router has a bias, YaRN's where the
    context is stretched by it. Source: llama.cpp's `llama-vocab.cpp` (`load`), `llama-model.cpp`
    (`load_hparams`) and `models/deepseek2.cpp`.
    """
    kv, arch = facts.kv, facts.architecture
    needed = ["tokenizer.ggml.eos_token_id"]
    if kv.get("tokenizer.ggml.model") == "gpt2":
        needed.append("tokenizer.ggml.pre")
    if f"{arch}.rope.dimension_count" in kv:
        needed.append(f"{arch}.rope.freq_base")
    if kv.get(f"{arch}.rope.scaling.type") == "yarn":
        needed += [f"{arch}.{key}" for key in _YARN]
    if arch in _ROUTED_LIKE_V3 and any("exp_probs_b" in t.name for t in facts.tensors):
        needed += [f"{arch}.{key}" for key in _ROUTER]
        if facts.n_vocab == _GLM_LITE_VOCAB:
            needed.remove(f"{arch}.expert_gating_func")
    return tuple(sorted(key for key in needed if key not in kv))


def warning(facts: ModelFacts) -> str | None:
    """What to tell the user, in a sentence; None for a file that lacks nothing."""
    keys = missing_keys(facts)
    if not keys:
        return None
    return (
        f"{facts.path} lacks {', '.join(keys)}: llama.cpp uses defaults, so the text may differ "
        "from the original model's"
    )
