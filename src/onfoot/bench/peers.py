"""The peers, tuned: PyTorch with scaled_dot_product_attention and fused AdamW, eager or compiled; HF + PEFT."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from onfoot.bench.jobs import Job
from onfoot.config import Config, GPT2Config, LlamaConfig
from onfoot.models.params import default_targets

Step = Callable[[], float]


class Block(nn.Module):
    def __init__(self, c: GPT2Config) -> None:
        super().__init__()
        d = c.n_embd
        self.heads = c.n_head
        self.ln_1, self.ln_2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.expand, self.contract = nn.Linear(d, c.inner_width), nn.Linear(c.inner_width, d)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.ln_1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
        x = x + self.proj(y)
        return x + self.contract(F.gelu(self.expand(self.ln_2(x)), approximate="tanh"))


class GPT(nn.Module):
    """GPT-2 as commonly written in PyTorch, with a tied head."""

    def __init__(self, c: GPT2Config) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(c.vocab_size, c.n_embd), nn.Embedding(c.n_positions, c.n_embd)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.n_layer))
        self.ln_f = nn.LayerNorm(c.n_embd)
        for p in self.parameters():
            if p.ndim > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.ln_f(x), self.wte.weight)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


class Llama(nn.Module):
    """transformers' LLaMA with the loss computed outside the model, which needs less memory."""

    def __init__(self, c: LlamaConfig) -> None:
        super().__init__()
        self.model = _transformers(c)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = self.model(tokens, use_cache=False).logits
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


def trainer(job: Job, compiled: bool) -> Step:
    torch.manual_seed(0)
    model = Llama(job.config) if isinstance(job.config, LlamaConfig) else GPT(job.config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    run: Any = torch.compile(model) if compiled else model
    tokens, targets = _batch(job)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = run(tokens, targets)
        loss.backward()
        if job.clip:
            nn.utils.clip_grad_norm_(model.parameters(), job.clip)
        optimizer.step()
        return float(loss.detach())

    return step


def peft_trainer(job: Job) -> Step:
    """transformers' model with PEFT's LoRA and the loss computed outside the model, which needs less memory."""
    from peft import LoraConfig, get_peft_model

    layers = default_targets(job.config)
    stored = isinstance(job.config, GPT2Config)
    settings = LoraConfig(r=16, lora_alpha=16, target_modules=list(layers), fan_in_fan_out=stored)
    model = get_peft_model(_transformers(job.config), settings).train()
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=3e-4, fused=True)
    tokens, targets = _batch(job)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        logits = model(tokens, use_cache=False).logits
        loss = F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


def generator(job: Job) -> Step:
    """transformers' `generate`, greedy, with its KV cache."""
    model = _transformers(job.config).eval()
    tokens, _ = _batch(job)

    def step() -> float:
        with torch.inference_mode():
            out = model.generate(
                tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=job.new_tokens,
                min_new_tokens=job.new_tokens, do_sample=False, pad_token_id=0,
            )  # fmt: skip
        return float(out.shape[1])

    return step


def _transformers(c: Config) -> Any:
    from transformers import GPT2Config as TheirConfig
    from transformers import GPT2LMHeadModel

    torch.manual_seed(0)
    if isinstance(c, LlamaConfig):
        return _transformers_llama(c)
    sizes = {name: getattr(c, name) for name in ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head")}
    rest: dict[str, Any] = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "attn_implementation": "sdpa"}
    return GPT2LMHeadModel(TheirConfig(**sizes, **rest))


def _transformers_llama(c: LlamaConfig) -> Any:
    from transformers import LlamaConfig as TheirConfig
    from transformers import LlamaForCausalLM

    names = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "max_position_embeddings", "tie_word_embeddings",
    )  # fmt: skip
    sizes = {name: getattr(c, name) for name in names}
    rest: dict[str, Any] = {"attn_implementation": "sdpa"}
    return LlamaForCausalLM(TheirConfig(**sizes, **rest))


def _batch(job: Job) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(0)
    shape = (job.batch, job.tokens)
    return (
        torch.from_numpy(rng.integers(0, job.config.vocab_size, shape)),
        torch.from_numpy(rng.integers(0, job.config.vocab_size, shape)),
    )
