"""A PyTorch reference for DeepSeek-V3 checkpoints: transformers' trunk, and the MTP block by hand.

Shares no code with the converter: shards are read by safetensors, FP8 is dequantised by torch, and
the block follows the DeepSeek-V3 report (arXiv 2412.19437, section 2.2) and its released weights.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM


def dequantised(folder: Path) -> dict[str, Tensor]:
    """Every weight as float32, scales multiplied in."""
    raw: dict[str, Tensor] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        raw |= load_file(shard)
    weights = {}
    for name, weight in raw.items():
        if name.endswith("_scale_inv"):
            continue
        value, scale = weight.float(), raw.get(f"{name}_scale_inv")
        if scale is not None:
            rows, cols = value.shape
            each = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :cols]
            value = value * each
        weights[name] = value
    return weights


class Reference:
    """Full-precision logits of a checkpoint, on the CPU."""

    def __init__(self, folder: Path, scratch: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self.weights = dequantised(folder)
        self.n_layer = self.config["num_hidden_layers"]
        self._trunk = self._load_trunk(scratch)

    def _load_trunk(self, scratch: Path) -> DeepseekV3ForCausalLM:
        without = ("quantization_config", "num_nextn_predict_layers", "torch_dtype")
        config = {k: v for k, v in self.config.items() if k not in without}
        config = DeepseekV3Config(**config, num_mtp_layers=0, dtype="float32")
        config.save_pretrained(scratch)
        mtp = f"model.layers.{self.n_layer}."
        trunk = {n: w for n, w in self.weights.items() if not n.startswith(mtp)}
        save_file(trunk, scratch / "model.safetensors", metadata={"format": "pt"})
        model = DeepseekV3ForCausalLM.from_pretrained(scratch, attn_implementation="eager")
        return model.eval()

    @torch.no_grad()
    def trunk(self, tokens: list[int]) -> tuple[Tensor, Tensor]:
        """Logits [n, n_vocab] and the rows after the last norm [n, n_embd]."""
        hidden = self._trunk.model(torch.tensor([tokens])).last_hidden_state[0]
        return hidden @ self.weights["lm_head.weight"].T, hidden

    @torch.no_grad()
    def mtp(self, hidden: Tensor, tokens: list[int]) -> tuple[Tensor, Tensor]:
        """Row i takes the trunk's row i and token i + 1, stands at position i + 1 and predicts
        token i + 2. Logits [n, n_vocab] and the rows after the block's own norm [n, n_embd]."""
        embedding = self.weights["model.embed_tokens.weight"][torch.tensor(tokens)]
        joined = torch.cat((self._norm(embedding, "enorm"), self._norm(hidden, "hnorm")), -1)
        x = joined @ self._weight("eh_proj").T
        x = x + self._attention(self._norm(x, "input_layernorm"))
        x = x + self._experts(self._norm(x, "post_attention_layernorm"))
        out = self._norm(x, "shared_head.norm")
        return out @ self.weights["lm_head.weight"].T, out

    def _weight(self, name: str) -> Tensor:
        return self.weights[f"model.layers.{self.n_layer}.{name}.weight"]

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight = self._weight(name)
        return F.rms_norm(x, weight.shape, weight, self.config["rms_norm_eps"])

    def _attention(self, x: Tensor) -> Tensor:
        c, n = self.config, len(x)
        n_head, d_nope, d_rope = (
            c["num_attention_heads"], c["qk_nope_head_dim"], c["qk_rope_head_dim"],
        )  # fmt: skip
        q = self._norm(x @ self._weight("self_attn.q_a_proj").T, "self_attn.q_a_layernorm")
        q = (q @ self._weight("self_attn.q_b_proj").T).view(n, n_head, d_nope + d_rope)
        compressed, k_rope = (x @ self._weight("self_attn.kv_a_proj_with_mqa").T).split(
            (c["kv_lora_rank"], d_rope), -1
        )
        kv = self._norm(compressed, "self_attn.kv_a_layernorm")
        kv = (kv @ self._weight("self_attn.kv_b_proj").T).view(n, n_head, d_nope + c["v_head_dim"])
        frequencies, mscale = self._yarn()
        angles = (torch.arange(n) + 1)[:, None, None] * frequencies
        q_rope = _rotate(q[..., d_nope:], angles)
        k_rope = _rotate(k_rope[:, None], angles).expand(-1, n_head, -1)
        queries = torch.cat((q[..., :d_nope], q_rope), -1)
        keys = torch.cat((kv[..., :d_nope], k_rope), -1)
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * (d_nope + d_rope) ** -0.5 * mscale**2
        scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), -math.inf)
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), kv[..., d_nope:])
        return mixed.reshape(n, -1) @ self._weight("self_attn.o_proj").T

    def _yarn(self) -> tuple[Tensor, float]:
        """Frequencies [d_rope / 2] and the factor on each of query and key (arXiv 2309.00071)."""
        rope, d, base = (
            self.config["rope_scaling"], self.config["qk_rope_head_dim"], self.config["rope_theta"],
        )  # fmt: skip
        plain = base ** (-torch.arange(0, d, 2) / d)

        def dimension(rotations: float) -> float:
            n_ctx = rope["original_max_position_embeddings"]
            return d * math.log(n_ctx / (rotations * 2 * math.pi)) / (2 * math.log(base))

        low = max(math.floor(dimension(rope["beta_fast"])), 0)
        high = min(math.ceil(dimension(rope["beta_slow"])), d - 1)
        ramp = ((torch.arange(d // 2) - low) / max(high - low, 1e-3)).clamp(0, 1)
        mscale = 0.1 * rope["mscale_all_dim"] * math.log(rope["factor"]) + 1
        return plain / rope["factor"] * ramp + plain * (1 - ramp), mscale

    def _experts(self, x: Tensor) -> Tensor:
        c = self.config
        n_expert, n_group = c["n_routed_experts"], c["n_group"]
        scores = (x @ self._weight("mlp.gate").T).sigmoid()
        layer = f"model.layers.{self.n_layer}."
        choice = scores + self.weights[f"{layer}mlp.gate.e_score_correction_bias"]
        groups = choice.view(-1, n_group, n_expert // n_group).topk(2, -1).values.sum(-1)
        allowed = torch.zeros_like(groups).scatter_(1, groups.topk(c["topk_group"], -1).indices, 1)
        allowed = allowed.repeat_interleave(n_expert // n_group, 1).bool()
        chosen = choice.masked_fill(~allowed, -math.inf).topk(c["num_experts_per_tok"], -1).indices
        weights = scores.gather(1, chosen)
        weights = weights / weights.sum(-1, keepdim=True) * c["routed_scaling_factor"]
        out = self._mlp(x, "mlp.shared_experts")
        for expert in range(n_expert):
            row, column = torch.where(chosen == expert)
            each = self._mlp(x[row], f"mlp.experts.{expert}") * weights[row, column, None]
            out = out.index_add(0, row, each)
        return out

    def _mlp(self, x: Tensor, name: str) -> Tensor:
        gate = F.silu(x @ self._weight(f"{name}.gate_proj").T)
        return (gate * (x @ self._weight(f"{name}.up_proj").T)) @ self._weight(
            f"{name}.down_proj"
        ).T


def _rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate neighbouring pairs of the last dimension, as DeepSeek's weights are laid out."""
    even, odd = x[..., 0::2], x[..., 1::2]
    cos, sin = angles.cos(), angles.sin()
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)
