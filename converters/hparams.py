"""config.json of DeepSeek-V3 and its relatives -> `Hyperparameters`, or one sentence why not.

A value the run time would treat otherwise than the configuration asks is an error here: nothing is
guessed. It knows nothing of tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..errors import ConversionError

_GATING = {"softmax": 1, "sigmoid": 2}  # llama.cpp's llama_expert_gating_func_type
# Trunk depths that llama.cpp's deepseek2 loader takes for models without a compressed query.
LITE_DEPTHS = (26, 27)
_MAX_LAYERS, _MAX_EXPERTS = 512, 1024  # llama.cpp's, which aborts beyond them


class Yarn(NamedTuple):
    """RoPE scaling by YaRN (Peng et al. 2023, arXiv 2309.00071); `n_ctx` before scaling."""

    factor: float
    n_ctx: int
    beta_fast: float
    beta_slow: float
    mscale: float


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """Counts are `n_*`, widths of one head `d_*`. `q_rank` 0 is a query of full rank. `fp8_block`
    is None when nothing is FP8."""

    n_layer: int
    n_dense: int
    n_mtp: int
    n_vocab: int
    n_ctx: int
    n_embd: int
    n_ff: int
    n_head: int
    q_rank: int
    kv_rank: int
    d_nope: int
    d_rope: int
    d_v: int
    n_expert: int
    n_expert_used: int
    n_shared: int
    n_ff_expert: int
    n_group: int
    n_group_used: int
    has_bias: bool
    gating: int
    normalise: bool
    routed_scale: float
    rms_eps: float
    rope_base: float
    yarn: Yarn | None
    tied: bool
    fp8_block: tuple[int, int] | None

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Hyperparameters:
        """Raises `ConversionError` with the key and its value."""
        _refuse_unknown(config)
        n_group, n_group_used = _groups(config)
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        h = cls(
            n_layer=count(config, "num_hidden_layers"),
            n_dense=count(config, "first_k_dense_replace", minimum=0),
            n_mtp=count(config, "num_nextn_predict_layers", minimum=0, default=0),
            n_vocab=count(config, "vocab_size"),
            n_ctx=count(config, "max_position_embeddings"),
            n_embd=count(config, "hidden_size"),
            n_ff=count(config, "intermediate_size"),
            n_head=count(config, "num_attention_heads"),
            q_rank=0 if config.get("q_lora_rank", 0) is None else count(config, "q_lora_rank"),
            kv_rank=count(config, "kv_lora_rank"),
            d_nope=count(config, "qk_nope_head_dim"),
            d_rope=count(config, "qk_rope_head_dim"),
            d_v=count(config, "v_head_dim"),
            n_expert=count(config, "n_routed_experts"),
            n_expert_used=count(config, "num_experts_per_tok"),
            n_shared=count(config, "n_shared_experts"),
            n_ff_expert=count(config, "moe_intermediate_size"),
            n_group=n_group,
            n_group_used=n_group_used,
            has_bias=config.get("topk_method", "noaux_tc") == "noaux_tc",
            gating=_gating(config),
            normalise=bool(config.get("norm_topk_prob")),
            routed_scale=_number(config, "routed_scaling_factor"),
            rms_eps=_number(config, "rms_norm_eps"),
            rope_base=_number(rope if "rope_theta" in rope else config, "rope_theta"),
            yarn=_yarn(rope),
            tied=bool(config.get("tie_word_embeddings")),
            fp8_block=_fp8_block(config),
        )
        h._check()
        return h

    def _check(self) -> None:
        is_lite = self.n_layer in LITE_DEPTHS or (self.n_layer == 48 and self.n_vocab == 128256)
        if self.q_rank and is_lite:
            raise ConversionError(
                f"num_hidden_layers is {self.n_layer}, a depth that the run time takes for a model "
                "without q_lora_rank"
            )
        if not self.n_dense < self.n_layer:
            raise ConversionError(
                f"first_k_dense_replace is {self.n_dense}, which leaves no experts "
                f"in {self.n_layer} layers"
            )
        if self.n_layer + 1 > _MAX_LAYERS or self.n_expert > _MAX_EXPERTS:
            raise ConversionError(
                f"config.json: {self.n_layer} layers of {self.n_expert} experts, but the run time "
                f"takes at most {_MAX_LAYERS - 1} of {_MAX_EXPERTS}"
            )
        if self.n_expert_used > self.n_expert:
            raise ConversionError(
                f"num_experts_per_tok is {self.n_expert_used} of {self.n_expert} experts"
            )
        # Group routing sums the two best scores of each group.
        if self.n_group > 1 and (self.n_expert % self.n_group or self.n_expert // self.n_group < 2):
            raise ConversionError(
                f"n_group is {self.n_group}, which does not divide {self.n_expert} experts "
                "into groups of two or more"
            )


def _refuse_unknown(config: Mapping[str, Any]) -> None:
    for key, allowed in (
        ("hidden_act", ("silu",)),
        ("moe_layer_freq", (1,)),
        ("topk_method", ("noaux_tc", "greedy")),
    ):
        if config.get(key, allowed[0]) not in allowed:
            raise ConversionError(
                f"config.json: {key} is {config[key]!r}, but only "
                f"{' and '.join(map(repr, allowed))} {'are' if len(allowed) > 1 else 'is'} known"
            )
    if config.get("topk_method") == "greedy" and config.get("n_group") != 1:
        raise ConversionError(
            f"config.json: topk_method is 'greedy' with n_group {config.get('n_group')!r}; "
            "the run time would choose among groups"
        )


def _groups(config: Mapping[str, Any]) -> tuple[int, int]:
    """Groups of experts, and how many of them a token may use."""
    n, n_used = count(config, "n_group"), count(config, "topk_group")
    if n_used > n:
        raise ConversionError(f"config.json: topk_group is {n_used} of {n} groups")
    # To use all groups is to have none, and llama.cpp aborts on a header that says the former.
    return (1, 1) if n_used == n else (n, n_used)


def count(config: Mapping[str, Any], key: str, minimum: int = 1, default: int | None = None) -> int:
    value = config.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ConversionError(
            f"config.json: {key} is {value!r}, but must be a whole number, {minimum} or more"
        )
    return value


def _number(config: Mapping[str, Any], key: str) -> float:
    value = config.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise ConversionError(f"config.json: {key} is {value!r}, but must be a number above 0")
    return float(value)


def _gating(config: Mapping[str, Any]) -> int:
    name = config.get("scoring_func")
    if name not in _GATING:
        raise ConversionError(
            f"config.json: scoring_func is {name!r}, but must be one of {', '.join(_GATING)}; "
            "the run time would otherwise assume softmax"
        )
    return _GATING[name]


def _yarn(rope: Mapping[str, Any]) -> Yarn | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "yarn":
        raise ConversionError(f"config.json: RoPE scaling is {kind!r}, but only 'yarn' is known")
    mscale, all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
    if mscale != all_dim or not all_dim:
        raise ConversionError(
            f"config.json: mscale is {mscale!r} and mscale_all_dim {all_dim!r}; the run time "
            "computes only the case where they are equal"
        )
    return Yarn(
        _number(rope, "factor"),
        count(rope, "original_max_position_embeddings"),
        _number(rope, "beta_fast"),
        _number(rope, "beta_slow"),
        float(all_dim),
    )


def _fp8_block(config: Mapping[str, Any]) -> tuple[int, int] | None:
    quantization = config.get("quantization_config")
    if not quantization:
        return None
    method = quantization.get("quant_method")
    if method != "fp8" or quantization.get("fmt", "e4m3") != "e4m3":
        raise ConversionError(
            f"config.json: quantization is {method!r} {quantization.get('fmt', '')!r}, "
            "but only 'fp8' 'e4m3' can be converted"
        )
    block = quantization.get("weight_block_size")
    ok = (
        isinstance(block, list) and len(block) == 2 and all(type(b) is int and b > 0 for b in block)
    )
    if not ok:
        raise ConversionError(
            f"config.json: weight_block_size is {block!r}, but must be two whole numbers"
        )
    return block[0], block[1]
