"""Random configurations on the engines "numba" and "numpy" in float32 against the formulas in float64.

Loss and every gradient, each relative to its own norm. How far rounding may carry a gradient is measured on the
formulas themselves, in float64, by rounding the parameters.

What is drawn: the family, layers, heads, odd widths, tied or own heads, biases, activations, causal or not, packed
examples, dropout, adapters of random ranks and targets, quantised weights, recomputed blocks, threads, and the batch.
`python -m campaigns.engines SEED INDEX` repeats one.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import numpy as np

import onfoot
from campaigns import Outcome
from onfoot.models.model import Model
from onfoot.quantized import KINDS
from onfoot.recording import pool

COUNT = 1_000
LOSS, CLOSE = 1e-5, 2e-5  # relative; float32 rounds to 6e-8, and a network adds that up over its layers
WORSE = 16  # times the change that float32's rounding of the parameters alone makes to a gradient is allowed
KINK = 1e-3  # the same for ReLU: an input within a rounding of 0 may fall on either side of it
TINY = 1e-4  # of the largest gradient: what is smaller is the rest of sums that cancel, and is measured by them
Rng = np.random.Generator


def chosen(rng: Rng, *values: Any) -> Any:
    return values[int(rng.integers(len(values)))]


def gpt2(rng: Rng, blocks: bool) -> onfoot.GPT2Config:
    heads = int(rng.integers(1, 5))
    width = 32 * int(rng.integers(1, 3)) if blocks else heads * int(rng.integers(3, 13))  # of 2, a norm makes signs
    heads = 2 ** int(rng.integers(0, 3)) if blocks else heads
    tied = bool(rng.random() < 0.6)
    p = float(chosen(rng, 0.0, 0.1, 0.4))
    return onfoot.GPT2Config(
        n_layer=int(rng.integers(1, 5)), n_head=heads, n_embd=width, n_positions=40,
        vocab_size=int(rng.integers(2, 90)),
        qk_head_dim=None if blocks or rng.random() < 0.6 else int(rng.integers(1, 9)), tie_word_embeddings=tied,
        lm_head_bias=not tied and rng.random() < 0.5, causal=bool(rng.random() < 0.8),
        activation_function=chosen(rng, "gelu_new", "gelu", "relu"), attn_pdrop=p, resid_pdrop=p, embd_pdrop=p,
    )  # fmt: skip


def llama(rng: Rng, blocks: bool) -> onfoot.LlamaConfig:
    shared, group, half = (int(rng.integers(*x)) for x in ((1, 4), (1, 4), (1, 9)))
    if blocks:
        shared, group, half = 2, int(chosen(rng, 1, 2)), 8
    kind = chosen(rng, "llama", "llama", "mistral", "qwen2", "qwen3")
    biased = kind == "llama" and bool(rng.random() < 0.3)
    window = int(rng.integers(1, 12)) if kind != "llama" and rng.random() < 0.6 else None
    return onfoot.LlamaConfig(
        vocab_size=int(rng.integers(2, 90)), hidden_size=2 * half * shared * group,
        intermediate_size=32 * int(rng.integers(1, 4)) if blocks else int(rng.integers(1, 60)),
        num_hidden_layers=int(rng.integers(1, 4)), num_attention_heads=shared * group, num_key_value_heads=shared,
        max_position_embeddings=40, tie_word_embeddings=bool(rng.random() < 0.5), mlp_bias=biased,
        attention_bias=biased, attention_dropout=float(chosen(rng, 0.0, 0.2)),
        model_type=kind, sliding_window=window,
    )  # fmt: skip


def prepared(rng: Rng) -> tuple[dict[str, Model], dict[str, Any], str]:
    """The same model three times, what is asked of each, and all of it in words."""
    blocks = bool(rng.random() < 0.2)
    config: Any = gpt2(rng, blocks) if rng.random() < 0.55 else llama(rng, blocks)
    seed, kind = int(rng.integers(1 << 30)), chosen(rng, *KINDS)
    lora = {}
    if rng.random() < 0.5 or blocks:
        ends = (
            ["c_attn", "c_proj", "c_fc"] if isinstance(config, onfoot.GPT2Config) else ["q_proj", "v_proj", "up_proj"]
        )
        ends = chosen(rng, None, ends[:1], ends[1:], [*ends[1:], "lm_head"])
        lora = {"r": int(rng.integers(1, 3)), "alpha": float(rng.integers(1, 9)), "targets": ends,
                "dropout": float(chosen(rng, 0.0, 0.3)), "use_rslora": bool(rng.random() < 0.3)}  # fmt: skip
        lora["r"] = min(lora["r"], config.vocab_size, config.n_embd)
    made: dict[str, Model] = {}
    for name, dtype, engine in (
        ("float64", "float64", "numpy"),
        ("numpy", "float32", "numpy"),
        ("numba", "float32", "numba"),
    ):
        model = onfoot.create(config, seed, dtype, engine)
        noise = np.random.default_rng(seed)
        if lora:
            try:
                model.add_lora(**lora)
            except ValueError:  # a layer narrower than the rank
                lora = {}
        for parameter, p in model.params.items():
            value = made["float64"].params[parameter] if made else p + noise.normal(0, 0.1, p.shape).astype(np.float32)
            p[...] = np.asarray(value, np.float32)  # the same numbers on each
        made[name] = model
    if blocks and lora:
        for model in made.values():
            model.quantize(kind)
    recompute = bool(rng.random() < 0.3)
    for model in made.values():
        model.recompute = recompute
    shape = (int(rng.integers(1, 5)), int(rng.integers(2, 41)))
    tokens, targets = rng.integers(0, config.vocab_size, (2, *shape))
    targets[rng.random(shape) < 0.2] = -100
    targets[0, 0] = 0
    asked = {"tokens": tokens, "targets": targets, "dropout_seed": chosen(rng, None, 3)}
    if rng.random() < 0.35 and config.causal:
        asked["segments"] = np.sort(rng.integers(0, 4, shape), axis=1)
    words = f"{config}, lora {lora or None}, blocks {kind if made['numpy'].quantized else None}, batch {shape}, "
    words += f"packed {'segments' in asked}, dropout {asked['dropout_seed'] is not None}, recomputed {recompute}"
    return made, asked, words


def sensitivity(model: Model, asked: dict[str, Any], exact: dict[str, Any], rng: Rng) -> dict[str, float]:
    """How much each gradient changes when each parameter is off by a rounding of float32."""
    before = {name: p.copy() for name, p in model.params.items() if isinstance(p, np.ndarray)}
    for name, p in before.items():
        model.params[name][...] = p * (1 + rng.uniform(-1, 1, p.shape) * np.finfo(np.float32).eps)
    _, grads = model.loss_and_grads(**asked)
    for name, p in before.items():
        model.params[name][...] = p
    return {name: float(np.linalg.norm(grads[name] - right)) for name, right in exact.items()}


def attempt(seed: int, index: int) -> tuple[str, list[str], float]:
    """One configuration: in words, what is wrong with it, and the worst error of a gradient over its limit."""
    rng = np.random.default_rng([seed, index])
    models, asked, words = prepared(rng)
    threads = int(rng.integers(1, 4))
    before = pool._threads
    loss, exact = models["float64"].loss_and_grads(**asked)
    most = max((float(np.linalg.norm(g)) for g in exact.values()), default=0.0)
    moved = sensitivity(models["float64"], asked, exact, rng)
    close = KINK if "'relu'" in words else CLOSE
    wrong, worst = [], 0.0
    try:
        pool.set_threads(threads)
        for engine in ("numpy", "numba"):
            found, grads = models[engine].loss_and_grads(**asked)
            if not abs(found - loss) <= LOSS * abs(loss):
                wrong.append(f"{engine}: a loss of {found}, not {loss}")
            if grads.keys() != exact.keys():
                wrong.append(f"{engine}: gradients of other parameters")
                continue
            for name, right in exact.items():
                norm = max(float(np.linalg.norm(right)), TINY * most, 1e-12)
                error, limit = float(np.linalg.norm(grads[name] - right)) / norm, max(close, WORSE * moved[name] / norm)
                worst = max(worst, error / limit)
                if not error <= limit:
                    wrong.append(f"{engine}: the gradient of {name} is off by {error:.1e}, more than {limit:.1e}")
    finally:
        pool.set_threads(before)
    return f"{words}, threads {threads}", wrong, worst


def run(count: int, seed: int) -> Outcome:
    failures, worst = [], 0.0
    kinds: Counter[str] = Counter()
    for index in range(count):
        words, wrong, error = attempt(seed, index)
        kinds[words.partition("(")[0]] += 1
        worst = max(worst, error)
        failures += [f"seed {seed} index {index}, {line}; {words}" for line in wrong]
        if index % 100 == 99:
            print(f"  {index + 1:,} of {count:,}: {len(failures)} failures", flush=True)
    return Outcome({**kinds, "worst error of a gradient over its limit": round(worst, 3)}, failures)


if __name__ == "__main__":
    print(attempt(int(sys.argv[1]), int(sys.argv[2])))
