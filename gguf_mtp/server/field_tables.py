"""What becomes of the fields that clients of OpenAI, llama-server and vLLM send.

A field is honoured (`schemas` declares it), refused when it asks for another answer than this
server would give, or harmless: it does not change the answer. Fields in none of the tables are
nobody's, and are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["HARMLESS", "NOT_BUILT", "NOT_BUILT_IN_CHATS", "NOT_BUILT_IN_COMPLETIONS", "refused"]

Neutral = Mapping[str, tuple[Any, ...]]
"""Fields with the values that ask for nothing."""

NOT_BUILT: Neutral = {
    # sampling
    "adaptive_target": (-1,),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "length_penalty": (1,),
    "lora": ([],),
    "min_keep": (0, 1),
    "mirostat": (0,),
    "top_n_sigma": (-1, 0),
    "use_beam_search": (False,),
    "xtc_probability": (0,),
    # what is answered
    "audio": (),
    "best_of": (1,),
    "include_stop_str_in_output": (False,),
    "modalities": (["text"],),
    "n_indent": (0,),
    "n_probs": (0,),
    "post_sampling_probs": (False,),
    "prompt_logprobs": (0, False),
    "reasoning_budget_tokens": (-1,),
    "reasoning_format": ("auto", "deepseek"),
    "response_fields": ([],),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "suffix": ("",),
    "t_max_predict_ms": (0, -1),
    "t_max_prompt_ms": (0, -1),
    "thinking_budget_tokens": (-1,),
    # what is asked
    "chat_template": (),
    "documents": ([],),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "grammar_lazy": (False,),
    "parse_tool_calls": (True,),
    "prompt_embeds": (),
    "truncate_prompt_tokens": (),
    "web_search_options": (),
}
NOT_BUILT_IN_CHATS: Neutral = {"add_special_tokens": (False,), "echo": (False,)}
NOT_BUILT_IN_COMPLETIONS: Neutral = {"add_special_tokens": (True,), "echo": (False,)}

HARMLESS: Mapping[str, str] = {
    "adaptive_decay": "only counts with adaptive_target",
    "backend_sampling": "where tokens are drawn does not change them",
    "detokenize": "answers are text",
    "dry_allowed_length": "only counts with dry_multiplier",
    "dry_base": "only counts with dry_multiplier",
    "dry_penalty_last_n": "only counts with dry_multiplier",
    "dry_sequence_breakers": "only counts with dry_multiplier",
    "dynatemp_exponent": "only counts with dynatemp_range",
    "id_slot": "slots hold the same prompts for all",
    "kv_transfer_params": "there is one server",
    "metadata": "it is the caller's own",
    "mirostat_eta": "only counts with mirostat",
    "mirostat_tau": "only counts with mirostat",
    "moderation": "it is a service of OpenAI's",
    "n_cache_reuse": "what is reused does not change the answer",
    "n_discard": "contexts are not shifted",
    "n_keep": "contexts are not shifted",
    "prediction": "copies of the conversation are drafted anyway",
    "priority": "requests are served in order",
    "prompt_cache_key": "prefixes are found by their tokens",
    "prompt_cache_options": "prefixes are found by their tokens",
    "prompt_cache_retention": "prefixes are found by their tokens",
    "reasoning_control": "it is another endpoint's",
    "request_id": "the server names the answer",
    "return_progress": "progress is not part of the answer",
    "return_tokens": "return_token_ids adds them",
    "safety_identifier": "it is a service of OpenAI's",
    "service_tier": "it is a service of OpenAI's",
    "speculative.n_max": "drafts do not change the answer",
    "speculative.n_min": "drafts do not change the answer",
    "speculative.ngram_min_hits": "drafts do not change the answer",
    "speculative.ngram_size_m": "drafts do not change the answer",
    "speculative.ngram_size_n": "drafts do not change the answer",
    "speculative.p_min": "drafts do not change the answer",
    "speculative.type": "drafts do not change the answer",
    "sse_ping_interval": "--keep-alive sets it",
    "store": "answers are not stored",
    "timings_per_token": "timings come with the end",
    "user": "it is the caller's own",
    "verbose": "it adds nothing to the answer",
    "verbosity": "it is a service of OpenAI's",
    "xtc_threshold": "only counts with xtc_probability",
}


def refused(given: Mapping[str, Any], tables: tuple[Neutral, ...]) -> str | None:
    """The first field of a request that asks for what is not built."""
    for table in tables:
        for name, neutral in table.items():
            value = given.get(name)
            if value is not None and not any(_equal(value, one) for one in neutral):
                return name
    return None


def _equal(value: Any, neutral: Any) -> bool:
    """0 is 0.0, but not False."""
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)
