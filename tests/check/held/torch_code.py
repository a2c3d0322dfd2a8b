"""PyTorch code in the forms in which people hold it, right and wrong."""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn


class NormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, eps=1e-5):
        mean = x.mean(-1, keepdim=True)
        rstd = torch.rsqrt(((x - mean) ** 2).mean(-1, keepdim=True) + eps)
        normed = (x - mean) * rstd
        ctx.save_for_backward(normed, rstd, weight)
        return normed * weight + bias

    @staticmethod
    def backward(ctx, grad_output):
        normed, rstd, weight = ctx.saved_tensors
        g = grad_output * weight
        dx = rstd * (g - g.mean(-1, keepdim=True) - normed * (g * normed).mean(-1, keepdim=True))
        return dx, (grad_output * normed).sum((0, 1)), grad_output.sum((0, 1)), None


class NormFunctionWrong(NormFunction):
    @staticmethod
    def backward(ctx, grad_output):
        normed, rstd, weight = ctx.saved_tensors
        g = grad_output * weight
        dx = rstd * (g - normed * (g * normed).mean(-1, keepdim=True))
        return dx, (grad_output * normed).sum((0, 1)), grad_output.sum((0, 1)), None


class LinearWithSetup(torch.autograd.Function):
    """With setup_context, and the weight first."""

    @staticmethod
    def forward(w, b, inp):
        return inp @ w + b

    @staticmethod
    def setup_context(ctx, inputs, output):
        w, _, inp = inputs
        ctx.save_for_backward(w, inp)

    @staticmethod
    def backward(ctx, g):
        w, inp = ctx.saved_tensors
        return torch.einsum("bti,bto->io", inp, g), g.sum((0, 1)), g @ w.T


class LinearWithSetupWrong(LinearWithSetup):
    @staticmethod
    def backward(ctx, g):
        w, inp = ctx.saved_tensors
        return torch.einsum("bti,bto->io", inp, g), g.mean((0, 1)), g @ w.T


class Norm(nn.Module):
    """In its own names, around an autograd.Function."""

    def __init__(self, dim, eps=1e-5):
        super().__init__()
        self.gamma, self.beta, self.eps = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.zeros(dim)), eps

    def forward(self, hidden_states):
        return NormFunction.apply(hidden_states, self.gamma, self.beta, self.eps)


class NormWrong(Norm):
    def forward(self, hidden_states):
        return NormFunctionWrong.apply(hidden_states, self.gamma, self.beta, self.eps)


class Config(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln = nn.LayerNorm(config.n_embd, bias=config.bias)

    def forward(self, x):
        return self.ln(x)


class OwnLinear(nn.Module):
    """(in, out), as the layer has it."""

    def __init__(self, in_features, out_features):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(in_features, out_features))
        self.b = nn.Parameter(torch.zeros(out_features))

    def forward(self, x):
        return x @ self.w + self.b


class WrappedLinear(nn.Module):
    """nn.Linear's (out, in) inside."""

    def __init__(self, in_features, out_features):
        super().__init__()
        self.proj = nn.Linear(in_features, out_features)

    def forward(self, x):
        return self.proj(x)


class TwiceLinear(WrappedLinear):
    def forward(self, x):
        return 2 * self.proj(x)


class Head(nn.Module):
    """One head with three nn.Linear and a buffer for the mask."""

    def __init__(self, n_embd, head_size, block_size):
        super().__init__()
        self.key = nn.Linear(n_embd, head_size)
        self.query = nn.Linear(n_embd, head_size)
        self.value = nn.Linear(n_embd, head_size)
        self.register_buffer("tril", torch.tril(torch.ones(block_size, block_size)))
        self.dropout = nn.Dropout(0.2)

    def forward(self, x):
        _, t, _d = x.shape
        k, q, v = self.key(x), self.query(x), self.value(x)
        scores = q @ k.transpose(-2, -1) * k.shape[-1] ** -0.5
        scores = scores.masked_fill(self.tril[:t, :t] == 0, float("-inf"))
        return self.dropout(scores.softmax(-1)) @ v


class HeadWrong(Head):
    def forward(self, x):
        k, q, v = self.key(x), self.query(x), self.value(x)
        scores = q @ k.transpose(-2, -1) * k.shape[-1] ** -0.5
        return self.dropout(scores.softmax(-1)) @ v


class HeadWithoutBiases(Head):
    def __init__(self, n_embd, head_size, block_size):
        super().__init__(n_embd, head_size, block_size)
        self.key, self.query, self.value = (nn.Linear(n_embd, head_size, bias=False) for _ in range(3))


class HeadWithoutBiasesWrong(HeadWithoutBiases):
    forward = HeadWrong.forward


class LoRALinear(nn.Module):
    """The base's weight is a frozen parameter, not yet set."""

    def __init__(self, in_features, out_features, r=4, alpha=8):
        super().__init__()
        self.weight = nn.Parameter(torch.full((out_features, in_features), float("nan")), requires_grad=False)
        self.lora_A = nn.Parameter(torch.empty(r, in_features))
        self.lora_B = nn.Parameter(torch.empty(out_features, r))
        self.scale = alpha / r

    def forward(self, x):
        return x @ self.weight.T + self.scale * (x @ self.lora_A.T) @ self.lora_B.T


class LoRALinearWrong(LoRALinear):
    def forward(self, x):
        return x @ self.weight.T + (x @ self.lora_A.T) @ self.lora_B.T


class CausalSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.n_head = config.n_head

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (z.view(b, t, self.n_head, -1).transpose(1, 2) for z in self.c_attn(x).split(c, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(b, t, c))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.gelu = nn.GELU(approximate="tanh")
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)

    def forward(self, x):
        return self.c_proj(self.gelu(self.c_fc(x)))


class Block(nn.Module):
    """nanoGPT's block: the MLP is 4 times as wide as its input."""

    def __init__(self, config):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(config.n_embd), nn.LayerNorm(config.n_embd)
        self.attn, self.mlp = CausalSelfAttention(config), MLP(config)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class BlockWrong(Block):
    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return self.mlp(self.ln_2(x))


block_instance = Block(SimpleNamespace(n_embd=8, n_head=2, bias=True))
layer_norm_instance = nn.LayerNorm(6)
linear_instance = nn.Linear(5, 3)
embedding_instance = nn.Embedding(7, 4)
extra_parameter = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4))


def norm_function(x, weight, bias, eps=1e-5):
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def norm_function_wrong(x, weight, bias, eps=1e-5):
    return F.layer_norm(x, x.shape[-1:], weight, bias, 1e-3)


def sdpa(query, key, value, is_causal=True):
    return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)


def sdpa_bthd(q, k, v):
    out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True)
    return out.transpose(1, 2)


def sdpa_without_mask(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


def loss(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def loss_of_sums(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def linear_out_in(input, weight, bias):
    return F.linear(input, weight, bias)


def half(q, k, v, dout):
    """Attention by hand in the dtype of its inputs."""
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    p = scores.softmax(-1)
    dp = dout @ v.transpose(-1, -2)
    ds = p * (dp - (p * dp).sum(-1, keepdim=True)) / math.sqrt(q.shape[-1])
    return ds @ k, ds.transpose(-1, -2) @ q, p.transpose(-1, -2) @ dout


def half_wrong(q, k, v, dout):
    dq, dk, dv = half(q, k, v, dout)
    return dq * math.sqrt(q.shape[-1]), dk * math.sqrt(q.shape[-1]), dv
