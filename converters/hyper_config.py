"""config.json of DeepSeek-V4 -> `HyperConfig`, `Dspark` and GGUF metadata, or a sentence why not.

A value the run time would treat otherwise than the configuration asks is an error here. It knows
nothing of tensors. Keys and their meaning: llama.cpp's `src/models/deepseek4.cpp` and
`dflash.cpp`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..errors import ConversionError
from ..gguf.arch.deepseek4 import CSA, HCA, SQRT_SOFTPLUS, STREAMS
from .mla_config import Yarn, count, fp8_block, number, section
from .tensors import Value

__all__ = ["ARCHITECTURE", "STAGES_ARCHITECTURE", "Dspark", "HyperConfig"]

ARCHITECTURE = "deepseek4"
STAGES_ARCHITECTURE = "dflash"
_FIXED = {"scoring_func": "sqrtsoftplus", "hidden_act": "silu", "tie_word_embeddings": False}


class Dspark(NamedTuple):
    """DSpark's own numbers: `n_stage` layers draft blocks of `block_size` tokens from what the
    trunk's layers `layer_inputs` read; `mask` is the token that stands for one yet to be drafted,
    `rank` the width of the Markov head."""

    n_stage: int
    block_size: int
    mask: int
    rank: int
    layer_inputs: tuple[int, ...]

    @classmethod
    def read(cls, config: Mapping[str, Any], n_stage: int) -> Dspark:
        """Raises `ConversionError` with the key and its value."""
        n_layer = count(config, "num_hidden_layers", maximum=511)
        outputs = config.get("dspark_target_layer_ids")
        if not (
            isinstance(outputs, list)
            and outputs
            and all(type(i) is int and 0 <= i < n_layer for i in outputs)
        ):
            raise ConversionError(
                f"config.json: dspark_target_layer_ids is {outputs!r:.60}, but must name some of "
                f"{n_layer} layers"
            )
        mask, n_vocab = count(config, "dspark_noise_token_id"), count(config, "vocab_size")
        if mask >= n_vocab:
            raise ConversionError(
                f"config.json: dspark_noise_token_id is {mask}, but there are {n_vocab} tokens"
            )
        return cls(
            n_stage,
            count(config, "dspark_block_size", maximum=256),
            mask,
            count(config, "dspark_markov_rank"),
            tuple(i + 1 for i in outputs),  # a layer's output is what the next one reads
        )


@dataclass(frozen=True, slots=True)
class HyperConfig:
    """Counts are `n_*`, widths of one head `d_*`; `ratios` are those of the trunk's layers and of
    an MTP block behind them."""

    n_layer: int
    n_vocab: int
    n_ctx: int
    n_embd: int
    n_head: int
    d_head: int
    d_rope: int
    q_rank: int
    n_index_head: int
    d_index: int
    n_index_key: int
    n_out_group: int
    out_rank: int
    n_expert: int
    n_expert_used: int
    n_shared: int
    n_ff_expert: int
    n_hash: int
    n_stream: int
    n_sinkhorn: int
    window: int
    ratios: tuple[int, ...]
    routed_scale: float
    normalise: bool
    clamp: float
    hc_eps: float
    rms_eps: float
    rope_base: float
    compress_rope_base: float
    yarn: Yarn | None
    fp8_block: tuple[int, int] | None

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> HyperConfig:
        """Raises `ConversionError` with the key and its value."""
        for key, value in _FIXED.items():
            if config.get(key, value) != value:
                raise ConversionError(
                    f"config.json: {key} is {config[key]!r}, but llama.cpp runs {value!r} only"
                )
        n_layer = count(config, "num_hidden_layers", maximum=511)
        h = cls(
            n_layer=n_layer,
            n_vocab=count(config, "vocab_size"),
            n_ctx=count(config, "max_position_embeddings"),
            n_embd=count(config, "hidden_size"),
            n_head=count(config, "num_attention_heads", maximum=4096),
            d_head=count(config, "head_dim"),
            d_rope=count(config, "qk_rope_head_dim"),
            q_rank=count(config, "q_lora_rank"),
            n_index_head=count(config, "index_n_heads"),
            d_index=count(config, "index_head_dim"),
            n_index_key=count(config, "index_topk"),
            n_out_group=count(config, "o_groups"),
            out_rank=count(config, "o_lora_rank"),
            n_expert=count(config, "n_routed_experts", maximum=1024),
            n_expert_used=count(config, "num_experts_per_tok"),
            n_shared=count(config, "n_shared_experts"),
            n_ff_expert=count(config, "moe_intermediate_size"),
            n_hash=count(config, "num_hash_layers", minimum=0),
            n_stream=count(config, "hc_mult"),
            n_sinkhorn=count(config, "hc_sinkhorn_iters"),
            window=count(config, "sliding_window"),
            ratios=_ratios(config, n_layer),
            routed_scale=number(config, "routed_scaling_factor"),
            normalise=bool(config.get("norm_topk_prob")),
            clamp=number(config, "swiglu_limit"),
            hc_eps=number(config, "hc_eps"),
            rms_eps=number(config, "rms_norm_eps"),
            rope_base=number(config, "rope_theta"),
            compress_rope_base=number(config, "compress_rope_theta"),
            yarn=_yarn(section(config, "rope_scaling")),
            fp8_block=fp8_block(config),
        )
        h._check()
        return h

    def _check(self) -> None:
        for is_wrong, why in (
            (
                self.n_stream != STREAMS,
                f"hc_mult is {self.n_stream}, but llama.cpp runs {STREAMS}",
            ),
            (self.n_hash > self.n_layer, f"num_hash_layers is {self.n_hash} of {self.n_layer}"),
            (
                self.n_expert_used > self.n_expert,
                f"num_experts_per_tok is {self.n_expert_used} of {self.n_expert} experts",
            ),
            (
                self.n_head % self.n_out_group != 0,
                f"o_groups is {self.n_out_group}, which does not divide {self.n_head} heads",
            ),
        ):
            if is_wrong:
                raise ConversionError(f"config.json: {why}")

    def metadata(self, has_block: bool) -> dict[str, Value]:
        """GGUF keys without the architecture's prefix, of the trunk or of an MTP side file."""
        kv = self._layers([*self.ratios, *([0] * has_block)], self.n_hash)
        kv["embedding_length_out"] = self.n_embd * self.n_stream
        if has_block:
            kv["nextn_predict_layers"] = 1
        return kv

    def stages_metadata(self, dspark: Dspark) -> dict[str, Value]:
        """The same of DSpark's stages: layers that attend to a window alone."""
        kv = self._layers([0] * dspark.n_stage, n_hash=0)
        return kv | {"block_size": dspark.block_size, "target_layers": list(dspark.layer_inputs)}

    def _layers(self, ratios: Sequence[int], n_hash: int) -> dict[str, Value]:
        n_blocks = len(ratios)
        kv: dict[str, Value] = {
            "block_count": n_blocks,
            "context_length": self.n_ctx,
            "embedding_length": self.n_embd,
            "vocab_size": self.n_vocab,
            "attention.head_count": self.n_head,
            "attention.head_count_kv": 1,
            "attention.key_length": self.d_head,
            "attention.value_length": self.d_head,
            "attention.layer_norm_rms_epsilon": self.rms_eps,
            "attention.q_lora_rank": self.q_rank,
            "attention.sliding_window": self.window,
            "attention.compress_ratios": list(ratios),
            "attention.compress_rope_freq_base": self.compress_rope_base,
            "attention.output_group_count": self.n_out_group,
            "attention.output_lora_rank": self.out_rank,
            "attention.indexer.head_count": self.n_index_head,
            "attention.indexer.key_length": self.d_index,
            "attention.indexer.top_k": self.n_index_key,
            "rope.dimension_count": self.d_rope,
            "rope.freq_base": self.rope_base,
            "expert_count": self.n_expert,
            "expert_used_count": self.n_expert_used,
            "expert_shared_count": self.n_shared,
            "expert_feed_forward_length": self.n_ff_expert,
            "expert_gating_func": SQRT_SOFTPLUS,
            "expert_weights_scale": self.routed_scale,
            "expert_weights_norm": self.normalise,
            "swiglu_clamp_exp": [self.clamp] * n_blocks,
            "swiglu_clamp_shexp": [self.clamp] * n_blocks,
            "hyper_connection.count": self.n_stream,
            "hyper_connection.sinkhorn_iterations": self.n_sinkhorn,
            "hyper_connection.epsilon": self.hc_eps,
            "hash_layer_count": n_hash,
        }
        if self.yarn is not None:
            kv |= {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": self.yarn.factor,
                "rope.scaling.original_context_length": self.yarn.n_ctx,
                "rope.scaling.yarn_beta_fast": self.yarn.beta_fast,
                "rope.scaling.yarn_beta_slow": self.yarn.beta_slow,
            }
        return kv


def _yarn(rope: Mapping[str, Any]) -> Yarn | None:
    """llama.cpp takes its scale of the attention from the factor, as the release does."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "yarn" or rope.get("mscale", 1) != 1:
        raise ConversionError(
            f"config.json: rope_scaling is {dict(rope)!r:.80}, but only 'yarn' is supported, "
            "without mscale"
        )
    n_ctx = count(rope, "original_max_position_embeddings")
    betas = number(rope, "beta_fast"), number(rope, "beta_slow")
    return Yarn(number(rope, "factor"), n_ctx, *betas, mscale=1.0)


def _ratios(config: Mapping[str, Any], n_layer: int) -> tuple[int, ...]:
    """Of each trunk layer; the list goes on for the blocks behind, whose ratios are 0."""
    ratios = config.get("compress_ratios")
    if not isinstance(ratios, list) or len(ratios) < n_layer:
        raise ConversionError(
            f"config.json: compress_ratios is {ratios!r:.60}, but must have a number for each of "
            f"{n_layer} layers"
        )
    for ratio in ratios:
        if type(ratio) is not int or ratio not in (0, CSA, HCA):
            raise ConversionError(
                f"config.json: compress_ratios holds {ratio!r}, but llama.cpp runs 0, {CSA} and "
                f"{HCA} only"
            )
    return tuple(ratios[:n_layer])
