"""DeepSeek-V4 by transformers, in float32: the trunk, the MTP block, and DSpark's stages.

transformers has neither drafter, so both are its decoder layers behind the release's own
projections. Row p of the MTP block takes the streams of position p and the token of p + 1; the
stages attend to the certain rows' features and to the whole block that they fill.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from transformers.masking_utils import create_sliding_window_causal_mask
from transformers.models.deepseek_v4 import DeepseekV4Config, DeepseekV4ForCausalLM
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4DecoderLayer,
    DeepseekV4HyperHead,
    apply_rotary_pos_emb,
)

_FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
_ATTENTION = {
    "q_a_proj": "wq_a", "q_a_norm": "q_norm", "q_b_proj": "wq_b", "kv_proj": "wkv",
    "kv_norm": "kv_norm", "o_a_proj": "wo_a", "o_b_proj": "wo_b",
}  # fmt: skip
_COMPRESSOR = {"kv_proj": "wkv", "gate_proj": "wgate", "kv_norm": "norm"}
_PARTS = ("fn", "base", "scale")


class Expected(NamedTuple):
    """float32: logits [n, n_vocab] and streams [n, 4 * n_embd] of the trunk, and those of the
    block's rows 1 to n - 1."""

    logits: NDArray[np.float32]
    hidden: NDArray[np.float32]
    mtp_logits: NDArray[np.float32]
    mtp_hidden: NDArray[np.float32]


class ExpectedBlock(NamedTuple):
    """float32: what the trunk's layers read [n - 1, 3 * n_embd], and of a block its logits
    [size, n_vocab] and its confidences [size]."""

    features: NDArray[np.float32]
    logits: NDArray[np.float32]
    confidence: NDArray[np.float32]


class Reference:
    def __init__(self, folder: Path) -> None:
        files = sorted(folder.glob("*.safetensors"))
        self.raw = {name: t for file in files for name, t in load_file(file).items()}
        config = json.loads((folder / "config.json").read_text())
        for key in ("quantization_config", "expert_dtype"):
            del config[key]
        config["torch_dtype"] = "float32"
        rope = config.pop("rope_scaling")
        rope = {k: v for k, v in rope.items() if k != "type"} | {"rope_type": "yarn"}
        self.config = config
        self.model = DeepseekV4ForCausalLM(self._made(rope_parameters=rope)).float().eval()
        self.block_config = self._made(num_hidden_layers=1, compress_ratios=[0], num_hash_layers=0)
        state = {
            "model.embed_tokens.weight": self.weight("embed"),
            "model.norm.weight": self.weight("norm"),
            "lm_head.weight": self.weight("head"),
        }
        state |= {f"model.hc_head.hc_{part}": self.raw[f"hc_head_{part}"] for part in _PARTS}
        for i in range(config["num_hidden_layers"]):
            is_hash = i < config["num_hash_layers"]
            layer = self._layer(f"layers.{i}.", config["compress_ratios"][i], is_hash)
            state |= {f"model.layers.{i}.{name}": value for name, value in layer.items()}
        _load(self.model, state)

    def weight(self, name: str) -> torch.Tensor:
        weight, scale = self.raw[f"{name}.weight"], self.raw.get(f"{name}.scale")
        if scale is None:
            return weight.float()
        factor = torch.exp2(scale.view(torch.uint8).float() - 127)
        if weight.dtype == torch.int8:
            codes = weight.view(torch.uint8)
            pairs = torch.stack((codes & 15, codes >> 4), -1).flatten(1).long()
            return _FP4[pairs] * factor.repeat_interleave(32, 1)
        rows, cols = weight.shape
        wide = factor.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :cols]
        return weight.float() * wide

    @torch.no_grad()
    def run(self, ids: list[int]) -> Expected:
        """The trunk and the MTP block."""
        block, block_head = self._stage(0), self._head(0)
        tokens, streams = torch.tensor([ids]), []
        hook = self.model.model.layers[-1].register_forward_hook(
            lambda _module, _given, out: streams.append(out[0] if isinstance(out, tuple) else out)
        )
        logits = self.model(tokens, use_cache=False).logits[0]
        hook.remove()
        hidden = streams[0]
        embedded = self._norm(self.model.model.embed_tokens(tokens[:, 1:]), "mtp.0.enorm")
        rows = (embedded @ self.weight("mtp.0.e_proj").T).unsqueeze(2)
        rows = rows + self._norm(hidden[:, :-1], "mtp.0.hnorm") @ self.weight("mtp.0.h_proj").T
        positions = torch.arange(1, len(ids)).unsqueeze(0)
        mask = create_sliding_window_causal_mask(
            config=self.block_config, inputs_embeds=embedded, attention_mask=None, cache=None,
            position_ids=positions,
        )  # fmt: skip
        rope = {
            kind: self.model.model.rotary_emb(embedded, position_ids=positions, layer_type=kind)
            for kind in ("main", "compress")
        }
        out = block(
            rows, position_embeddings=rope, position_ids=positions, attention_mask=mask,
            input_ids=tokens[:, 1:], cache=None,
        )  # fmt: skip
        own = self._norm(block_head(out), "mtp.0.norm")[0] @ self.weight("head").T
        found = (logits, hidden[0].flatten(1), own, out[0].flatten(1))
        return Expected(*(value.numpy() for value in found))

    @torch.no_grad()
    def draft(self, ids: list[int]) -> ExpectedBlock:
        """The block of DSpark behind `ids`, of which the last one is not decoded yet."""
        c, model = self.config, self.model.model
        taken: dict[int, torch.Tensor] = {}
        hooks = [
            model.layers[i].register_forward_hook(
                lambda _m, _given, out, i=i: taken.__setitem__(i, out.mean(2)[0])
            )
            for i in c["dspark_target_layer_ids"]
        ]
        self.model(torch.tensor([ids[:-1]]), use_cache=False)
        for hook in hooks:
            hook.remove()
        features = torch.cat([taken[i] for i in c["dspark_target_layer_ids"]], -1)
        main = self._norm(features @ self.weight("mtp.0.main_proj").T, "mtp.0.main_norm")[None]
        size = c["dspark_block_size"]
        tokens = torch.tensor([[ids[-1]] + [c["dspark_noise_token_id"]] * (size - 1)])
        rows = model.embed_tokens(tokens).unsqueeze(2).expand(-1, -1, c["hc_mult"], -1).contiguous()
        n_stage = 1 + max(int(name.split(".")[1]) for name in self.raw if name.startswith("mtp."))
        for i in range(n_stage):
            rows = self._through(self._stage(i), rows, main, tokens)
        last = f"mtp.{n_stage - 1}."
        hidden = self._head(n_stage - 1)(rows)[0]
        logits = self._norm(hidden, f"{last}norm") @ self.weight("head").T
        w1, w2 = (self.weight(f"{last}markov_head.markov_w{i}") for i in (1, 2))
        proj, before = self.weight(f"{last}confidence_head.proj")[0], ids[-1]
        chained, sure = [], []
        for k in range(size):
            chained.append(logits[k] + w1[before] @ w2.T)
            sure.append(torch.sigmoid(torch.cat((hidden[k], w1[before])) @ proj))
            before = int(chained[-1].argmax())
        found = features, torch.stack(chained), torch.stack(sure)
        return ExpectedBlock(*(value.numpy() for value in found))

    def _through(
        self, layer: Any, x: torch.Tensor, main: torch.Tensor, tokens: torch.Tensor
    ) -> torch.Tensor:
        """One stage: the block's rows ask, the certain rows within the window and the block
        itself answer."""
        a, n, size = layer.self_attn, main.shape[1], x.shape[1]

        def turn(positions: torch.Tensor) -> Any:
            rope = self.model.model.rotary_emb
            return rope(main, position_ids=positions[None], layer_type="main")

        certain, own = torch.arange(n), torch.arange(n, n + size)
        post, comb, y = layer.attn_hc(x)
        y = layer.input_layernorm(y)
        q = a.q_b_proj(a.q_a_norm(a.q_a_proj(y))).view(1, size, a.num_heads, a.head_dim)
        q = apply_rotary_pos_emb(a.q_b_norm(q.transpose(1, 2)), *turn(own))
        keys = ((main, certain), (y, own))
        kv = torch.cat(
            [apply_rotary_pos_emb(a.kv_norm(a.kv_proj(z))[:, None], *turn(at)) for z, at in keys], 2
        )
        behind = own[:, None] - torch.cat((certain, own))[None]
        scores = (q @ kv.transpose(-1, -2)) * a.scaling
        scores = scores.masked_fill(behind >= self.config["sliding_window"], float("-inf"))
        sinks = a.sinks.view(1, -1, 1, 1).expand(1, -1, size, 1)
        out = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1] @ kv
        cos, sin = turn(own)
        out = apply_rotary_pos_emb(out, cos, -sin).transpose(1, 2)
        out = a.o_a_proj(out.reshape(1, size, self.config["o_groups"], -1)).flatten(2)
        x = post.unsqueeze(-1) * a.o_b_proj(out).unsqueeze(-2) + comb.transpose(-1, -2) @ x
        post, comb, y = layer.ffn_hc(x)
        y = layer.mlp(layer.post_attention_layernorm(y), input_ids=tokens)
        return post.unsqueeze(-1) * y.unsqueeze(-2) + comb.transpose(-1, -2) @ x

    def _stage(self, i: int) -> Any:
        made = DeepseekV4DecoderLayer(self.block_config, 0).float().eval()
        _load(made, self._layer(f"mtp.{i}.", 0, False))
        return made

    def _head(self, i: int) -> Any:
        made = DeepseekV4HyperHead(self.block_config).float().eval()
        _load(made, {f"hc_{part}": self.raw[f"mtp.{i}.hc_head_{part}"] for part in _PARTS})
        return made

    def _made(self, **changed: Any) -> Any:
        made = DeepseekV4Config(**{**self.config, **changed})
        made._attn_implementation = made._experts_implementation = "eager"
        return made

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return self.weight(name) * x * scale

    def _layer(self, p: str, ratio: int, is_hash: bool) -> dict[str, torch.Tensor]:
        a, f, raw = f"{p}attn.", f"{p}ffn.", self.raw
        s = {
            "input_layernorm.weight": self.weight(f"{p}attn_norm"),
            "post_attention_layernorm.weight": self.weight(f"{p}ffn_norm"),
            "self_attn.sinks": raw[f"{a}attn_sink"],
            "mlp.gate.weight": self.weight(f"{f}gate"),
        }
        for to, name in _ATTENTION.items():
            s[f"self_attn.{to}.weight"] = self.weight(f"{a}{name}")
        if ratio:
            s |= self._compressor("self_attn.compressor.", a)
        if ratio == 4:
            index = "self_attn.compressor.indexer."
            s |= self._compressor(index, f"{a}indexer.")
            s[f"{index}q_b_proj.weight"] = self.weight(f"{a}indexer.wq_b")
            s[f"{index}scorer.weights_proj.weight"] = self.weight(f"{a}indexer.weights_proj")
        for to in ("attn", "ffn"):
            s |= {f"{to}_hc.{part}": raw[f"{p}hc_{to}_{part}"] for part in _PARTS}
        if is_hash:
            s["mlp.gate.tid2eid"] = raw[f"{f}gate.tid2eid"]
        else:
            s["mlp.gate.e_score_correction_bias"] = raw[f"{f}gate.bias"]
        experts = [f"{f}experts.{e}." for e in range(self.config["n_routed_experts"])]
        both = [torch.cat((self.weight(f"{e}w1"), self.weight(f"{e}w3"))) for e in experts]
        s["mlp.experts.gate_up_proj"] = torch.stack(both)
        s["mlp.experts.down_proj"] = torch.stack([self.weight(f"{e}w2") for e in experts])
        for to, name in (("gate_proj", "w1"), ("down_proj", "w2"), ("up_proj", "w3")):
            s[f"mlp.shared_experts.{to}.weight"] = self.weight(f"{f}shared_experts.{name}")
        return s

    def _compressor(self, to: str, p: str) -> dict[str, torch.Tensor]:
        found = {
            f"{to}{name}.weight": self.weight(f"{p}compressor.{source}")
            for name, source in _COMPRESSOR.items()
        }
        return found | {f"{to}position_bias": self.raw[f"{p}compressor.ape"]}


def _load(module: torch.nn.Module, state: dict[str, torch.Tensor]) -> None:
    missing, unknown = module.load_state_dict(state, strict=False)
    assert [name for name in missing if "inv_freq" not in name] == []
    assert list(unknown) == []
