"""A DeepSeek-V4 in miniature for training: transformers' trunk, an MTP block, DSpark's stages.

It knows its architecture and its losses; data, optimiser and files are elsewhere. transformers has
neither drafter, so both are its decoder layers behind the release's own projections. Sources:
transformers' modeling_deepseek_v4.py; llama.cpp's src/models/deepseek4.cpp and dflash.cpp.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.deepseek_v4 import DeepseekV4Config, DeepseekV4ForCausalLM
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4DecoderLayer,
    DeepseekV4HyperHead,
    DeepseekV4RMSNorm,
    DeepseekV4TopKRouter,
    apply_rotary_pos_emb,
)

CONFIG = Path(__file__).with_name("v4_config.json")
LOSS_WEIGHTS = (1.0, 0.3, 0.15)  # next token, MTP at depth 1, the same block run again
N_STAGES = 3
N_ANCHORS = 24  # blocks of DSpark trained on per window
BIAS_STEP = 1e-3  # how fast a router's bias balances the experts


class Config(NamedTuple):
    """`trunk` and `block` are transformers' configurations, `raw` is config.json."""

    raw: dict[str, Any]
    trunk: DeepseekV4Config
    block: DeepseekV4Config

    @classmethod
    def load(cls, path: Path = CONFIG) -> Config:
        raw = json.loads(path.read_text(encoding="utf-8"))
        given = {k: v for k, v in raw.items() if not k.startswith(("dspark", "quantization"))}
        del given["expert_dtype"]
        rope = {k: v for k, v in given.pop("rope_scaling").items() if k != "type"}
        n_layer, ratios = raw["num_hidden_layers"], raw["compress_ratios"]
        given |= {"torch_dtype": "float32", "compress_ratios": ratios[:n_layer]}
        trunk = DeepseekV4Config(**given, rope_parameters={**rope, "rope_type": "yarn"})
        alone = {"num_hidden_layers": 1, "compress_ratios": [0], "num_hash_layers": 0}
        block = DeepseekV4Config(**(given | alone))
        for made in (trunk, block):
            made._attn_implementation = made._experts_implementation = "eager"
        return cls(raw, trunk, block)


class MtpBlock(nn.Module):
    """Residual streams of a position and the next token's embedding -> the next streams."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        n, eps = c.block.hidden_size, c.block.rms_norm_eps
        self.layer = DeepseekV4DecoderLayer(c.block, 0)
        self.hc_head = DeepseekV4HyperHead(c.block)
        self.enorm, self.hnorm, self.norm = (DeepseekV4RMSNorm(n, eps=eps) for _ in range(3))
        self.e_proj, self.h_proj = (nn.Linear(n, n, bias=False) for _ in range(2))


class DsparkStages(nn.Module):
    """Features of the trunk and one certain token -> logits and confidences of a whole block."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        n, eps, rank = c.block.hidden_size, c.block.rms_norm_eps, c.raw["dspark_markov_rank"]
        n_target = len(c.raw["dspark_target_layer_ids"])
        self.layers = nn.ModuleList(DeepseekV4DecoderLayer(c.block, 0) for _ in range(N_STAGES))
        self.main_proj = nn.Linear(n_target * n, n, bias=False)
        self.main_norm, self.norm = (DeepseekV4RMSNorm(n, eps=eps) for _ in range(2))
        self.hc_head = DeepseekV4HyperHead(c.block)
        self.markov_w1, self.markov_w2 = (nn.Embedding(c.block.vocab_size, rank) for _ in range(2))
        self.confidence = nn.Linear(n + rank, 1, bias=False)


class V4Model(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.c = c
        self.trunk = DeepseekV4ForCausalLM(c.trunk).float()  # type: ignore[no-untyped-call]
        self.mtp, self.dspark = MtpBlock(c).float(), DsparkStages(c).float()
        for drafter in (self.mtp, self.dspark):
            drafter.apply(self.trunk._init_weights)
        nn.init.zeros_(self.dspark.markov_w2.weight)
        for module in self.modules():
            if isinstance(module, DeepseekV4TopKRouter):
                module.register_forward_hook(_balance)
        for layer in self.trunk.model.layers[: c.raw["num_hash_layers"]]:
            layer.mlp.gate.tid2eid.copy_(_hashed_experts(c))

    def streams(self, ids: Tensor) -> tuple[Tensor, list[Tensor]]:
        """ids [batch, n] -> the last layer's streams [batch, n, hc, hidden], and DSpark's features:
        the mean stream after each target layer [batch, n, hidden]."""
        model, taken = self.trunk.model, []
        x = model.embed_tokens(ids)
        given = self._given(x, 0, ids)
        x = x.unsqueeze(2).expand(-1, -1, self.c.trunk.hc_mult, -1).contiguous()
        for index, layer in enumerate(model.layers):
            x = layer(x, **given)
            if index in self.c.raw["dspark_target_layer_ids"]:
                taken.append(x.mean(2))
        return x, taken

    def logits(self, streams: Tensor) -> Tensor:
        model = self.trunk.model
        return self.trunk.lm_head(model.norm(model.hc_head(streams))).float()  # type: ignore[no-any-return]

    def draft(self, streams: Tensor, ids: Tensor, first: int) -> Tensor:
        """One run of the MTP block: `streams`, and the tokens after them from position `first`."""
        mtp = self.mtp
        x = self.trunk.model.embed_tokens(ids)
        y = mtp.e_proj(mtp.enorm(x)).unsqueeze(2) + mtp.h_proj(mtp.hnorm(streams))
        return mtp.layer(y, **self._given(x, first, ids))  # type: ignore[no-any-return]

    def draft_logits(self, streams: Tensor) -> Tensor:
        return self.trunk.lm_head(self.mtp.norm(self.mtp.hc_head(streams))).float()  # type: ignore[no-any-return]

    def losses(self, ids: Tensor) -> list[Tensor]:
        """Cross entropy of the next token, and of the MTP block's first and second draft token."""
        n = ids.shape[1] - len(LOSS_WEIGHTS)
        rows, _ = self.streams(ids[:, :n])
        losses = [_cross_entropy(self.logits(rows), ids[:, 1 : n + 1])]
        for k in range(1, len(LOSS_WEIGHTS)):
            rows = self.draft(rows, ids[:, k : n + k], first=k)
            losses.append(_cross_entropy(self.draft_logits(rows), ids[:, k + 1 : n + k + 1]))
        return losses

    def block(self, features: list[Tensor], ids: Tensor, anchors: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [batch, n_anchor, size, vocab] and confidence logits of the blocks that begin at
        `anchors` [n_anchor] >= 1: the token there is certain, the trunk's rows before it are read.
        """
        c, stages, model = self.c, self.dspark, self.trunk.model
        size, n_batch, n_anchor = c.raw["dspark_block_size"], len(ids), len(anchors)
        main = stages.main_norm(stages.main_proj(torch.cat(features, -1)))
        places = anchors[:, None] + torch.arange(size)  # [n_anchor, size]
        inputs = torch.full((n_batch, n_anchor, size), c.raw["dspark_noise_token_id"])
        inputs[:, :, 0] = ids[:, anchors]
        flat = inputs.flatten(1)
        x = model.embed_tokens(flat).unsqueeze(2).expand(-1, -1, c.trunk.hc_mult, -1).contiguous()
        mask = _block_mask(places, main.shape[1], c.trunk.sliding_window)
        for layer in stages.layers:
            x = self._stage(layer, x, main, places.flatten(), mask, flat)
        hidden = stages.hc_head(x)
        before = torch.stack([ids[:, anchors + i] for i in range(size)], -1).flatten(1)
        previous = stages.markov_w1(before)
        logits = self.trunk.lm_head(stages.norm(hidden)) + previous @ stages.markov_w2.weight.T
        sure = stages.confidence(torch.cat((hidden, previous), -1))
        return logits.float().unflatten(1, places.shape), sure.float().view(n_batch, *places.shape)

    def block_losses(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Cross entropy of a block's tokens, and of the confidence that each is the right one."""
        with torch.no_grad():
            _, features = self.streams(ids)
        size = self.c.raw["dspark_block_size"]
        anchors = torch.randint(1, ids.shape[1] - size - 1, (N_ANCHORS,))
        logits, sure = self.block(features, ids, anchors)
        wanted = torch.stack([ids[:, anchors + i + 1] for i in range(size)], -1)
        is_right = (logits.argmax(-1) == wanted).float()
        return _cross_entropy(logits, wanted), F.binary_cross_entropy_with_logits(sure, is_right)

    def _given(self, x: Tensor, first: int, ids: Tensor) -> dict[str, Any]:
        positions = (torch.arange(x.shape[1]) + first)[None]
        rope = self.trunk.model.rotary_emb
        return {
            "position_embeddings": {
                kind: rope(x, position_ids=positions, layer_type=kind)
                for kind in ("main", "compress")
            },
            "position_ids": positions,
            "attention_mask": _window_mask(x.shape[1], self.c.trunk.sliding_window).expand(
                len(x), -1, -1, -1
            ),
            "input_ids": ids,
            "cache": None,
        }

    def _stage(
        self, layer: Any, x: Tensor, main: Tensor, positions: Tensor, mask: Tensor, ids: Tensor
    ) -> Tensor:
        """A decoder layer: the blocks ask, the features and the blocks answer."""
        a, rope = layer.self_attn, self.trunk.model.rotary_emb

        def turn(at: Tensor) -> tuple[Tensor, Tensor]:
            return rope(x, position_ids=at[None], layer_type="main")  # type: ignore[no-any-return]

        post, comb, y = layer.attn_hc(x)
        y = layer.input_layernorm(y)
        q = a.q_b_proj(a.q_a_norm(a.q_a_proj(y))).view(*y.shape[:2], a.num_heads, a.head_dim)
        q = apply_rotary_pos_emb(a.q_b_norm(q.transpose(1, 2)), *turn(positions))
        keys = [
            apply_rotary_pos_emb(a.kv_norm(a.kv_proj(rows))[:, None], *turn(at))
            for rows, at in ((main, torch.arange(main.shape[1])), (y, positions))
        ]
        kv = torch.cat(keys, 2)
        scores = (q @ kv.transpose(-1, -2)) * a.scaling + mask
        sinks = a.sinks.view(1, -1, 1, 1).expand(len(x), -1, q.shape[2], 1)
        weights = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
        cos, sin = turn(positions)
        out = apply_rotary_pos_emb(weights @ kv, cos, -sin).transpose(1, 2)
        out = a.o_a_proj(out.reshape(*y.shape[:2], self.c.block.o_groups, -1)).flatten(2)
        x = post.unsqueeze(-1) * a.o_b_proj(out).unsqueeze(-2) + comb.transpose(-1, -2) @ x
        post, comb, y = layer.ffn_hc(x)
        y = layer.mlp(layer.post_attention_layernorm(y), input_ids=ids)
        return post.unsqueeze(-1) * y.unsqueeze(-2) + comb.transpose(-1, -2) @ x  # type: ignore[no-any-return]


def _window_mask(n: int, window: int) -> Tensor:
    behind = torch.arange(n)[:, None] - torch.arange(n)
    return torch.zeros(n, n).masked_fill((behind < 0) | (behind >= window), -torch.inf)[None, None]


def _block_mask(places: Tensor, n_main: int, window: int) -> Tensor:
    """Rows of a block see the features before it, as far as the window goes, and their block."""
    first = places[:, :1].expand_as(places).flatten()[:, None]
    at = places.flatten()[:, None]
    main = torch.arange(n_main)
    sees_main = (main < first) & (at - main < window)
    owner = torch.arange(len(places)).repeat_interleave(places.shape[1])
    seen = torch.cat((sees_main, owner[:, None] == owner), 1)
    return torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)


def _cross_entropy(logits: Tensor, wanted: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), wanted.flatten())


def _hashed_experts(c: Config) -> Tensor:
    """A fixed choice of experts for every token id [vocab, top_k]."""
    order = torch.rand(c.trunk.vocab_size, c.trunk.n_routed_experts, generator=_seeded())
    return order.argsort(-1)[:, : c.trunk.num_experts_per_tok]


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@torch.no_grad()
def _balance(router: Any, _given: Any, found: tuple[Tensor, Tensor, Tensor]) -> None:
    if router.training:
        load = torch.bincount(found[2].flatten(), minlength=router.num_experts).float()
        router.e_score_correction_bias.add_(BIAS_STEP * torch.sign(load.mean() - load))
