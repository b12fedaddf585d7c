"""DeepSeek-V4 by transformers, in float32: the trunk's logits and streams, and the MTP block's.

transformers has no MTP block, so the block is one of its decoder layers behind the release's own
projections: row p takes the streams of position p and the token of p + 1.
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
        self.block = DeepseekV4DecoderLayer(self.block_config, 0).float().eval()
        self.block_head = DeepseekV4HyperHead(self.block_config).float().eval()
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
        _load(self.block, self._layer("mtp.0.", 0, False))
        _load(self.block_head, {f"hc_{p}": self.raw[f"mtp.0.hc_head_{p}"] for p in _PARTS})

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
        out = self.block(
            rows, position_embeddings=rope, position_ids=positions, attention_mask=mask,
            input_ids=tokens[:, 1:], cache=None,
        )  # fmt: skip
        own = self._norm(self.block_head(out), "mtp.0.norm")[0] @ self.weight("head").T
        found = (logits, hidden[0].flatten(1), own, out[0].flatten(1))
        return Expected(*(value.numpy() for value in found))

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
