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
_MAX_HEADS = 4096
_MAX_NUMBER = 3.4e38  # float32's
_MAX_COUNT = 2**31 - 1  # llama.cpp keeps counts in 32 bits


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
        rope = section(config, "rope_parameters") or section(config, "rope_scaling")
        h = cls(
            n_layer=count(config, "num_hidden_layers", maximum=_MAX_LAYERS - 1),
            n_dense=count(config, "first_k_dense_replace", minimum=0),
            n_mtp=count(config, "num_nextn_predict_layers", minimum=0, default=0),
            n_vocab=count(config, "vocab_size"),
            n_ctx=count(config, "max_position_embeddings"),
            n_embd=count(config, "hidden_size"),
            n_ff=count(config, "intermediate_size"),
            n_head=count(config, "num_attention_heads", maximum=_MAX_HEADS),
            q_rank=0 if config.get("q_lora_rank", 0) is None else count(config, "q_lora_rank"),
            kv_rank=count(config, "kv_lora_rank"),
            d_nope=count(config, "qk_nope_head_dim"),
            d_rope=count(config, "qk_rope_head_dim"),
            d_v=count(config, "v_head_dim"),
            n_expert=count(config, "n_routed_experts", maximum=_MAX_EXPERTS),
            n_expert_used=count(config, "num_experts_per_tok"),
            n_shared=count(config, "n_shared_experts"),
            n_ff_expert=count(config, "moe_intermediate_size"),
            n_group=n_group,
            n_group_used=n_group_used,
            has_bias=config.get("topk_method", "noaux_tc") == "noaux_tc",
            gating=_gating(config),
            normalise=bool(config.get("norm_topk_prob")),
            routed_scale=number(config, "routed_scaling_factor"),
            rms_eps=number(config, "rms_norm_eps"),
            rope_base=number(rope if "rope_theta" in rope else config, "rope_theta"),
            yarn=_yarn(rope),
            tied=bool(config.get("tie_word_embeddings")),
            fp8_block=fp8_block(config),
        )
        h._check()
        return h

    def _check(self) -> None:
        is_lite = self.n_layer in LITE_DEPTHS or (self.n_layer == 48 and self.n_vocab == 128256)
        if self.q_rank and is_lite:
            raise ConversionError(
                f"num_hidden_layers is {self.n_layer}, a depth at which llama.cpp expects a model "
                "without q_lora_rank"
            )
        if not self.n_dense < self.n_layer:
            raise ConversionError(
                f"first_k_dense_replace is {self.n_dense}, which leaves no experts "
                f"in {self.n_layer} layers"
            )
        if self.n_expert_used > self.n_expert:
            raise ConversionError(
                f"num_experts_per_tok is {self.n_expert_used}, but the model has only "
                f"{self.n_expert} experts"
            )
        if self.d_rope % 2:
            raise ConversionError(
                f"config.json: qk_rope_head_dim is {self.d_rope}, but RoPE rotates pairs of values"
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
                f"config.json: {key} is {_shown(config[key])}, but only "
                f"{' and '.join(map(repr, allowed))} "
                f"{'are' if len(allowed) > 1 else 'is'} supported"
            )
    if config.get("topk_method") == "greedy" and config.get("n_group") != 1:
        raise ConversionError(
            f"config.json: topk_method is 'greedy' with n_group {_shown(config.get('n_group'))}, "
            "but llama.cpp would select expert groups"
        )


def _groups(config: Mapping[str, Any]) -> tuple[int, int]:
    """Groups of experts, and how many of them a token may use."""
    n, n_used = count(config, "n_group"), count(config, "topk_group")
    if n_used > n:
        raise ConversionError(f"config.json: topk_group is {n_used}, but n_group is {n}")
    # To use all groups is to have none, and llama.cpp aborts on a header that says the former.
    return (1, 1) if n_used == n else (n, n_used)


def count(
    config: Mapping[str, Any],
    key: str,
    minimum: int = 1,
    maximum: int = _MAX_COUNT,
    default: int | None = None,
) -> int:
    """The whole number at `key`. Raises `ConversionError` when it is none, or out of bounds."""
    value = config.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= maximum:
        raise ConversionError(
            f"config.json: {key} is {_shown(value)}, but must be a whole number from {minimum} to "
            f"{maximum}"
        )
    return value


def section(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The object at `key`; an empty one where it is null or absent. Raises `ConversionError`."""
    value = config.get(key)
    if value is not None and not isinstance(value, dict):
        raise ConversionError(f"config.json: {key} is {_shown(value)}, but must be an object")
    return value or {}


def number(config: Mapping[str, Any], key: str) -> float:
    value = config.get(key)
    if isinstance(value, bool) or not (isinstance(value, int | float) and 0 < value <= _MAX_NUMBER):
        raise ConversionError(
            f"config.json: {key} is {_shown(value)}, but must be a number above 0 that float32 "
            "holds"
        )
    return float(value)


def _shown(value: object) -> str:
    """A value in a message: whole if it is short."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _gating(config: Mapping[str, Any]) -> int:
    name = config.get("scoring_func")
    if not isinstance(name, str) or name not in _GATING:
        raise ConversionError(
            f"config.json: scoring_func is {_shown(name)}, but must be one of "
            f"{', '.join(_GATING)}; llama.cpp would otherwise assume softmax"
        )
    return _GATING[name]


def _yarn(rope: Mapping[str, Any]) -> Yarn | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "yarn":
        raise ConversionError(
            f"config.json: RoPE scaling is {_shown(kind)}, but only 'yarn' is supported"
        )
    mscale, all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
    if mscale != all_dim or not all_dim:
        raise ConversionError(
            f"config.json: mscale is {_shown(mscale)} and mscale_all_dim {_shown(all_dim)}, "
            "but llama.cpp needs them equal and not zero"
        )
    return Yarn(
        number(rope, "factor"),
        count(rope, "original_max_position_embeddings"),
        number(rope, "beta_fast"),
        number(rope, "beta_slow"),
        number(rope, "mscale_all_dim"),
    )


def fp8_block(config: Mapping[str, Any]) -> tuple[int, int] | None:
    quantization = section(config, "quantization_config")
    if not quantization:
        return None
    method, fmt = quantization.get("quant_method"), quantization.get("fmt")
    if method != "fp8" or fmt not in (None, "e4m3"):
        raise ConversionError(
            "config.json: the weights are quantised with "
            f"{_shown(method)}{f' ({_shown(fmt)})' if fmt else ''}, but only 'fp8' ('e4m3') can be "
            "converted"
        )
    block: Any = quantization.get("weight_block_size")
    ok = (
        isinstance(block, list) and len(block) == 2 and all(type(b) is int and b > 0 for b in block)
    )
    if not ok:
        raise ConversionError(
            f"config.json: weight_block_size is {_shown(block)}, but must be two whole numbers"
        )
    return block[0], block[1]
