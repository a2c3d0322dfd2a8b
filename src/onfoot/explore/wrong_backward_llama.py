"""The backward pass of the LLaMA family in the checker's pieces: RMS norm, RoPE, grouped queries and SwiGLU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from onfoot.check.layer import Pieces
from onfoot.check.layers import rms_norm, rope, swiglu
from onfoot.explore.study_context import StudyContext
from onfoot.explore.wrong_backward import Backward
from onfoot.ops.rope import frequencies

Array = np.ndarray


class LlamaBackward(Backward):
    """Blocks of an RMS norm, attention, an RMS norm and a gated MLP, each branch with a skip connection."""

    def _recording(self, pieces: Pieces) -> Pieces:
        if pieces.frequencies is rope.PIECES.frequencies:  # not replaced by a mistake
            pieces = pieces.with_changes({"frequencies": _scaled_frequencies(self.m)})
        return super()._recording(pieces)

    def _norm_forward(self, x: Array, layer: str) -> Array:
        p = self.p
        centred = p.rms_centred(x)
        rstd = p.rms_rstd(p.mean_square(centred), self.m.config.rms_norm_eps)
        return p.rms_normed(centred, rstd) * self.weight(f"{layer}.weight")

    def _norm_backward(self, x: Array, layer: str, dout: Array) -> Array:
        dx, dweight = rms_norm.steps(self.p, x, self.weight(f"{layer}.weight"), dout, self.m.config.rms_norm_eps)
        self._store(f"{layer}.weight", dweight)
        return dx

    def _linear(self, x: Array, layer: str) -> Array:
        y = x @ self.weight(f"{layer}.weight")
        return y + self.m.params[f"{layer}.bias"] if f"{layer}.bias" in self.m.params else y

    def _linear_backward(self, x: Array, layer: str, dy: Array) -> Array:
        name = f"{layer}.weight"
        dweight = self.p.dweight(x, dy)
        self._store(name, lambda: np.swapaxes(dweight(), -1, -2))  # the file has (out, in)
        if f"{layer}.bias" in self.m.params:
            self._store(f"{layer}.bias", self.p.dbias(dy))
        return self.p.through(dy, self.weight(name), x)

    def _final_norm(self, d11: Array) -> Array:
        return self._norm_backward(self.m.trace.blocks[-1].a[10], "model.norm", d11)

    def _block(self, b: int, d10: Array) -> Array:
        p, name = self.p, f"model.layers.{b}"
        attn, mlp = f"{name}.self_attn", f"{name}.mlp"
        norm_1, norm_2 = f"{name}.input_layernorm", f"{name}.post_attention_layernorm"
        a1 = self.m.trace.blocks[b].a[1]

        a2 = self._norm_forward(a1, norm_1)
        heads = Heads(self, attn, a2)
        a3 = p.merge(heads.out)
        a5 = a1 + self._linear(a3, f"{attn}.o_proj")
        a6 = self._norm_forward(a5, norm_2)
        gate, up = self._linear(a6, f"{mlp}.gate_proj"), self._linear(a6, f"{mlp}.up_proj")
        a8 = p.silu(gate, p.sigmoid(gate)) * up

        d8 = self._linear_backward(a8, f"{mlp}.down_proj", d10)
        dgate, dup = swiglu.steps(p, gate, up, d8)
        d6 = self._linear_backward(a6, f"{mlp}.up_proj", dup) + self._linear_backward(a6, f"{mlp}.gate_proj", dgate)
        d5 = p.skip_mlp(d10, self._norm_backward(a5, norm_2, d6))
        d3 = self._linear_backward(a3, f"{attn}.o_proj", d5)
        d2 = heads.backward(d3)
        signals = {"8": d8, "g": dgate, "u": dup, "6": d6, "5": d5, "3": d3}
        self.signals |= {f"{b}.Δ_{i}": value for i, value in signals.items()}
        self.signals |= {f"{b}.Δ_scaled": self.outputs["dscores"][0], f"{b}.Δ_2": d2}
        return p.skip_attention(d5, self._norm_backward(a1, norm_1, d2))


class Heads:
    """Grouped-query attention with RoPE: queries, keys and values of a_2, and their way back."""

    def __init__(self, backward: LlamaBackward, attn: str, a2: Array) -> None:
        self.of, self.attn, self.a2 = backward, attn, a2
        p, config = backward.p, backward.m.config
        self.n = {"q": config.n_head, "k": config.n_kv_head, "v": config.n_kv_head}
        self.lin = {x: backward._linear(a2, f"{attn}.{x}_proj") for x in "qkv"}  # (B, T, H D)
        q, k, self.v = (p.split(self._normed(x), self.n[x]) for x in "qkv")  # (B, H, T, D)
        self.angle = p.angles(np.arange(a2.shape[1]), p.frequencies(config.key_width, config.rope_theta))  # (T, D/2)
        self.q, self.k = p.rotated(q, self.angle), p.rotated(k, self.angle)
        self.before = q, k
        self.keys = p.repeated(self.k, config.n_head)
        self.values = p.repeated(p.rotated_v(self.v, self.angle), config.n_head)
        self.mask = p.mask(a2.shape[1], a2.shape[1], True)
        self.scores = p.scores(self.q, self.keys)
        self.rho = p.weights(self.scores, self.mask)
        self.out = self.rho @ self.values

    def _per_head(self, x: Array) -> Array:
        return x.reshape(*x.shape[:2], -1, self.of.m.config.key_width)  # (B, T, H, D)

    def _normed(self, x: str) -> Array:
        """Qwen3's norm of each head's queries and keys; the others have none."""
        y = self.lin[x]
        if not self.of.m.config.qk_norm or x == "v":
            return y
        return self.of._norm_forward(self._per_head(y), f"{self.attn}.{x}_norm").reshape(y.shape)

    def backward(self, d3: Array) -> Array:
        """Δ_3 -> Δ_2, and the gradients of the projections."""
        p, config, of = self.of.p, self.of.m.config, self.of
        dout = p.split_dout(d3, config.n_head)
        drho = p.drho(dout, self.values)
        draw = p.draw(p.dscores(drho, self.rho, p.row_dots(drho, self.rho), self.scores, self.mask), self.q)
        with_q = p.for_products(self.q, self.before[0])
        with_k = p.repeated(p.for_products(self.k, self.before[1]), config.n_head)
        dq = p.dq(draw, with_k, with_q)
        dk = p.dk_of_group(p.dk(draw, with_q, with_k), config.n_kv_head)
        dv = p.dv_of_group(p.dv(self.rho, dout), config.n_kv_head)
        merged = {
            "q": p.merge(p.dq_below(dq, p.rotate_back(dq, self.angle))),
            "k": p.merge(p.dk_below(dk, p.rotate_back(dk, self.angle))),
            "v": p.merge(p.dv_below(dv, self.angle)),
        }
        total: Any = 0
        for x in "vkq":
            d = merged[x]
            if config.qk_norm and x != "v":
                norm = f"{self.attn}.{x}_norm"
                d = of._norm_backward(self._per_head(self.lin[x]), norm, self._per_head(d)).reshape(d.shape)
            total = total + of._linear_backward(self.a2, f"{self.attn}.{x}_proj", d)
        return np.asarray(total)


def _scaled_frequencies(m: StudyContext) -> Callable[[int, float], Any]:
    """The frequencies of this model, which may be scaled for long texts."""
    return lambda width, theta: frequencies(theta, width, m.config.rope_scaling, m.n_tokens)
