"""A DeepSeek-V3 for training: MLA, grouped sigmoid routing, YaRN, one MTP block.

Module and parameter names are the official checkpoint's. It knows its architecture and its losses;
data, optimiser and files are elsewhere. Source: DeepSeek-V3 report, arXiv 2412.19437, and the
released modeling_deepseek.py.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Weight of the losses: next token, MTP at depth 1, and the same block run again at depth 2.
LOSS_WEIGHTS = (1.0, 0.3, 0.15)
BIAS_STEP = 1e-3  # how fast the router's bias balances the experts (report, section 2.1.2)


@dataclass(frozen=True, slots=True)
class Config:
    """The hyperparameters that the model reads, as config.json names them."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    first_k_dense_replace: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    intermediate_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    n_shared_experts: int
    routed_scaling_factor: float
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any]

    @classmethod
    def load(cls, path: Path) -> Config:
        raw = json.loads(path.read_text(encoding="utf-8"))
        return cls(**{name: raw[name] for name in cls.__slots__})


# -- positions ---------------------------------------------------------------------------------


def yarn_frequencies(c: Config) -> Tensor:
    """Rotation per position [pairs]: slow dimensions are stretched (YaRN, arXiv 2309.00071)."""
    scaling, dim = c.rope_scaling, c.qk_rope_head_dim
    plain = torch.pow(c.rope_theta, -(torch.arange(0, dim, 2).float() / dim))
    original = scaling["original_max_position_embeddings"]

    def dimension(n_turns: float) -> float:
        turns = math.log(original / (n_turns * 2 * math.pi))
        return dim * turns / (2 * math.log(c.rope_theta))

    low = max(math.floor(dimension(scaling["beta_fast"])), 0)
    high = min(math.ceil(dimension(scaling["beta_slow"])), dim - 1)
    ramp = ((torch.arange(dim // 2).float() - low) / max(high - low, 1e-3)).clamp(0, 1)
    stretched: Tensor = plain / scaling["factor"]
    return stretched * ramp + plain * (1 - ramp)


def softmax_scale(c: Config) -> float:
    scaling = c.rope_scaling
    mscale = 0.1 * scaling["mscale_all_dim"] * math.log(scaling["factor"]) + 1
    return float((c.qk_nope_head_dim + c.qk_rope_head_dim) ** -0.5 * mscale * mscale)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Turn pairs of neighbours in the last dimension by `angles` [n_token, pairs]."""
    a, b = x[..., 0::2], x[..., 1::2]
    cos, sin = angles.cos(), angles.sin()
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)


# -- layers ------------------------------------------------------------------------------------


def linear(n_in: int, n_out: int) -> nn.Linear:
    return nn.Linear(n_in, n_out, bias=False)


class RmsNorm(nn.Module):
    def __init__(self, n: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight, self.eps)


class Attention(nn.Module):
    """Multi-head latent attention (report, section 2.1.1), keys and values expanded."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.c, self.scale = c, softmax_scale(c)
        n_head, nope, rope = c.num_attention_heads, c.qk_nope_head_dim, c.qk_rope_head_dim
        self.q_a_proj = linear(c.hidden_size, c.q_lora_rank)
        self.q_a_layernorm = RmsNorm(c.q_lora_rank, c.rms_norm_eps)
        self.q_b_proj = linear(c.q_lora_rank, n_head * (nope + rope))
        self.kv_a_proj_with_mqa = linear(c.hidden_size, c.kv_lora_rank + rope)
        self.kv_a_layernorm = RmsNorm(c.kv_lora_rank, c.rms_norm_eps)
        self.kv_b_proj = linear(c.kv_lora_rank, n_head * (nope + c.v_head_dim))
        self.o_proj = linear(n_head * c.v_head_dim, c.hidden_size)

    def _heads(self, x: Tensor) -> Tensor:
        return x.reshape(*x.shape[:2], self.c.num_attention_heads, -1).transpose(1, 2)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        c, nope = self.c, self.c.qk_nope_head_dim
        q = self._heads(self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))))
        both = self.kv_a_proj_with_mqa(x)
        latent, k_rope = both[..., : c.kv_lora_rank], both[..., c.kv_lora_rank :]
        kv = self._heads(self.kv_b_proj(self.kv_a_layernorm(latent)))
        k_nope, v = kv[..., :nope], kv[..., nope:]
        q_rope = rotate(q[..., nope:], angles).to(v.dtype)
        k_rope = rotate(k_rope[:, None], angles).to(v.dtype)
        k_rope = k_rope.expand(-1, c.num_attention_heads, -1, -1)
        out = F.scaled_dot_product_attention(
            torch.cat((q[..., :nope], q_rope), -1),
            torch.cat((k_nope, k_rope), -1),
            v,
            is_causal=True,
            scale=self.scale,
        )
        return self.o_proj(out.transpose(1, 2).flatten(-2))  # type: ignore[no-any-return]


class Mlp(nn.Module):
    def __init__(self, c: Config, width: int) -> None:
        super().__init__()
        self.gate_proj = linear(c.hidden_size, width)
        self.up_proj = linear(c.hidden_size, width)
        self.down_proj = linear(width, c.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.silu(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(hidden)  # type: ignore[no-any-return]


class Router(nn.Module):
    """Which experts a token goes to, and how much of each (report, section 2.1.2)."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.c = c
        self.weight = nn.Parameter(torch.zeros(c.n_routed_experts, c.hidden_size))
        bias = torch.zeros(c.n_routed_experts)
        self.e_score_correction_bias = nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Rows [n, hidden] -> expert ids and weights, both [n, num_experts_per_tok]."""
        c = self.c
        with torch.autocast("cpu", enabled=False):
            scores = torch.sigmoid(x.float() @ self.weight.T)
        choice = (scores + self.e_score_correction_bias).detach()
        groups = choice.view(len(x), c.n_group, -1).topk(2, -1).values.sum(-1)
        kept = torch.zeros_like(groups).scatter_(1, groups.topk(c.topk_group, -1).indices, 1.0)
        in_group = kept.repeat_interleave(c.n_routed_experts // c.n_group, 1) > 0
        ids = choice.masked_fill(~in_group, -math.inf).topk(c.num_experts_per_tok, -1).indices
        weights = scores.gather(1, ids)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * c.routed_scaling_factor
        if self.training:
            self._balance(ids)
        return ids, weights

    @torch.no_grad()
    def _balance(self, ids: Tensor) -> None:
        load = torch.bincount(ids.flatten(), minlength=self.c.n_routed_experts).float()
        self.e_score_correction_bias.add_(BIAS_STEP * torch.sign(load.mean() - load))


class Moe(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.gate = Router(c)
        width = c.moe_intermediate_size
        self.experts = nn.ModuleList(Mlp(c, width) for _ in range(c.n_routed_experts))
        self.shared_experts = Mlp(c, width * c.n_shared_experts)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        ids, weights = self.gate(rows)
        out: Tensor = self.shared_experts(rows)
        for index, expert in enumerate(self.experts):
            row, slot = torch.where(ids == index)
            if len(row):
                part = expert(rows[row]) * weights[row, slot, None]
                out = out.index_add(0, row, part.to(out.dtype))
        return out.view(x.shape)


class Block(nn.Module):
    def __init__(self, c: Config, is_dense: bool) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c)
        self.post_attention_layernorm = RmsNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = Mlp(c, c.intermediate_size) if is_dense else Moe(c)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), angles)
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


class MtpBlock(Block):
    """The hidden row of a position and the next token's embedding -> a hidden row for the next."""

    def __init__(self, c: Config) -> None:
        super().__init__(c, is_dense=False)
        self.enorm = RmsNorm(c.hidden_size, c.rms_norm_eps)
        self.hnorm = RmsNorm(c.hidden_size, c.rms_norm_eps)
        self.eh_proj = linear(2 * c.hidden_size, c.hidden_size)
        self.shared_head = nn.ModuleDict({"norm": RmsNorm(c.hidden_size, c.rms_norm_eps)})

    def step(self, hidden: Tensor, embedding: Tensor, angles: Tensor) -> Tensor:
        x = self.eh_proj(torch.cat((self.enorm(embedding), self.hnorm(hidden)), -1))
        return self.shared_head["norm"](self(x, angles))  # type: ignore[no-any-return]


class Trunk(nn.Module):
    """`layers` holds the MTP block last, as in the checkpoint."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        dense = [index < c.first_k_dense_replace for index in range(c.num_hidden_layers)]
        self.layers = nn.ModuleList([*(Block(c, is_dense) for is_dense in dense), MtpBlock(c)])
        self.norm = RmsNorm(c.hidden_size, c.rms_norm_eps)


class DemoModel(nn.Module):
    """`hidden` and `draft` give rows [batch, n, hidden_size]; `lm_head` makes logits of either."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.model = Trunk(c)
        self.lm_head = linear(c.hidden_size, c.vocab_size)
        self.frequencies = yarn_frequencies(c)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                is_last = name.endswith(("o_proj.weight", "down_proj.weight"))
                depth = math.sqrt(2 * c.num_hidden_layers) if is_last else 1.0
                nn.init.normal_(weight, 0, 0.02 / depth)

    def _angles(self, first: int, n: int) -> Tensor:
        return (torch.arange(n).float() + first)[:, None] * self.frequencies

    def hidden(self, ids: Tensor) -> Tensor:
        """The trunk's rows after its last norm, for ids [batch, n]."""
        angles, x = self._angles(0, ids.shape[1]), self.model.embed_tokens(ids)
        for block in list(self.model.layers)[:-1]:
            x = block(x, angles)
        return self.model.norm(x)  # type: ignore[no-any-return]

    def draft(self, hidden: Tensor, ids: Tensor, first: int) -> Tensor:
        """One run of the MTP block: `hidden` rows, and the tokens after them from `first` on."""
        block = self.model.layers[-1]
        embedding = self.model.embed_tokens(ids)
        return block.step(hidden, embedding, self._angles(first, ids.shape[1]))  # type: ignore[no-any-return, operator]

    def losses(self, ids: Tensor) -> list[Tensor]:
        """Cross entropy of the next token, and of the MTP block's first and second draft token.

        The second run feeds the block its own rows, so that chained drafts stay good.
        """
        n = ids.shape[1] - len(LOSS_WEIGHTS)
        rows, losses = self.hidden(ids[:, :n]), []
        for k in range(len(LOSS_WEIGHTS)):
            if k:
                rows = self.draft(rows, ids[:, k : n + k], first=k)
            logits = self.lm_head(rows).float().flatten(0, 1)
            losses.append(F.cross_entropy(logits, ids[:, k + 1 : n + k + 1].flatten()))
        return losses
