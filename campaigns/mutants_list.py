"""The mutants: hand-picked mistakes, each a few letters of one file. The lists are below, one per folder."""

from __future__ import annotations

from campaigns.mutants import Mutant


def of(file: str, tests: str, *changes: tuple[str, str] | tuple[str, str, str]) -> list[Mutant]:
    """Mutants of one file: (old, new) pairs, with the reason as a third where it is equivalent."""
    return [Mutant(file, c[0], c[1], tuple(tests.split()), c[2] if len(c) > 2 else "") for c in changes]


GENERATE = [
    *of(
        "generate/sampling.py", "generate",
        ("if not self.temperature >= 0:", "if not self.temperature > 0:"),
        ("self.top_k < 1:", "self.top_k < 0:"),
        ("not 0 < self.top_p <= 1:", "not 0 <= self.top_p <= 1:"),
        ("not 0 < self.top_p <= 1:", "not 0 < self.top_p < 1:"),
        ("not 0 <= self.min_p <= 1:", "not 0 < self.min_p <= 1:"),
        ("if not self.repetition_penalty > 0:", "if not self.repetition_penalty >= 0:"),
        ("out[ids] > 0, out[ids] / penalty, out[ids] * penalty", "out[ids] > 0, out[ids] * penalty, out[ids] / penalty"),
        ("out[ids] > 0, out[ids] / penalty, out[ids] * penalty", "out[ids] > 1, out[ids] / penalty, out[ids] * penalty"),
        ("out = logits.copy()", "out = logits"),
        ("logits.max()) / sampling.temperature", "logits.max()) * sampling.temperature"),
        ("sampling.top_k < scores.size:", "sampling.top_k < scores.size - 1:"),
        ("np.partition(scores, -sampling.top_k)[-sampling.top_k]", "np.partition(scores, -sampling.top_k)[-sampling.top_k + 1 or -1]"),
        ("np.where(scores < threshold, -np.inf, scores)", "np.where(scores <= threshold, -np.inf, scores)"),
        ("sampling.top_p < 1:", "sampling.top_p < 0.9:"),
        ("np.cumsum(p[order]) - p[order]", "np.cumsum(p[order])"),
        ("before >= sampling.top_p", "before > 1 - sampling.top_p"),
        ("p[p < sampling.min_p * p.max()] = 0", "p[p < sampling.min_p] = 0"),
        ("p[p < sampling.min_p * p.max()] = 0", "p[p <= sampling.min_p * p.max()] = 0"),
        ("return p / p.sum()\n\n\ndef next_token", "return p\n\n\ndef next_token"),
        ("if not np.isfinite(logits).all():", "if np.isnan(logits).all():"),
        ("if sampling.repetition_penalty != 1:", "if sampling.repetition_penalty > 1:"),
        ("if sampling.temperature == 0:\n        return int(np.argmax(logits))", "if sampling.temperature == 0:\n        return int(np.argmax(seen))"),
        ('rng.random(), side="right")', 'rng.random(), side="left")'),
        ("np.flatnonzero(p)[-1]))", "p.size - 1))"),
    ),
    *of(
        "generate/loop.py", "generate",
        ("if max_new_tokens < 1:", "if max_new_tokens < 0:"),
        ("if seed < 0:", "if seed < -1:"),
        ("if longest + max_new_tokens > limit and not slide:", "if longest + max_new_tokens > limit + 1 and not slide:"),
        ("if longest + max_new_tokens > limit and not slide:", "if longest + max_new_tokens >= limit and not slide:"),
        ("pad = longest - lengths", "pad = 0 * lengths"),
        ("np.random.default_rng([seed, row])", "np.random.default_rng([seed, 0])"),
        ("generators = [np.random.default_rng([seed, row]) for row in range(len(prompts))]", "generators = [np.random.default_rng([seed, 0])] * len(prompts)"),
        ("np.random.default_rng([seed, row])", "np.random.default_rng(seed + row)"),
        ("if end - origin > limit:", "if end - origin >= limit:"),
        ("origin = fresh = end - max(limit // 2, 1)", "origin = fresh = end - max(limit // 4, 1)"),
        ("origin = fresh = end - max(limit // 2, 1)", "origin = fresh = end - max(limit // 2, 0)"),
        ("np.maximum(pad - origin, 0), cache)", "pad, cache)"),
        ("np.maximum(pad - origin, 0), cache)", "np.maximum(pad, 0), cache)"),
        ("tokens[row, pad[row] : end], sampling, rng", "tokens[row, :end], sampling, rng"),
        ("tokens[row, pad[row] : end], sampling, rng", "tokens[row, max(pad[row], origin) : end], sampling, rng"),
        ("tokens[row, pad[row] : end], sampling, rng", "tokens[row, pad[row] : longest], sampling, rng"),
        ("np.maximum(index - pad[:, None], 0)", "np.broadcast_to(index, (b, t))"),
        ("None if not pad.any() else", "None if not pad.all() else"),
        ("cache.length += t\n", "cache.length += 1\n"),
        ("done[row] = token in stop_ids or (", "done[row] = token in stop_ids[:1] or ("),
        ("any(s in model.tokenizer.decode(new[row]) for s in stop)", "any(s in model.tokenizer.decode(new[row][-1:]) for s in stop)"),
        ("any(s in model.tokenizer.decode(new[row]) for s in stop)", "any(model.tokenizer.decode(new[row]).endswith(s) for s in stop)"),
        ("any(s in model.tokenizer.decode(new[row]) for s in stop)", "any(s in model.tokenizer.decode(new[row]) for s in stop[:1])"),
        ("        if all(done):\n            break", "        if any(done):\n            break"),
        ("[row[-1]] * (width - len(row))", "[0] * (width - len(row))"),
    ),
    *of(
        "generate/cache.py", "generate",
        ("end = self.length + k.shape[2]", "end = self.length + 1"),
        ("values[:, :, self.length : end] = v", "values[:, :, self.length : end] = k"),
        ("self.capacity, x.shape[3])", "self.capacity + 1, x.shape[3])"),
    ),
    *of(
        "generate/chat.py", "generate",
        ('"eos": tokenizer.end or ""', '"eos": tokenizer.begin or ""'),
        ('"bos": tokenizer.begin or ""', '"bos": ""'),
        ("if len(ids) == 1:", "if len(ids) >= 1:"),
        ("return (*model.config.end_ids, ids[0]), []", "return (ids[0],), []"),
        ("return model.config.end_ids, [text] if text else []", "return model.config.end_ids, []"),
        ("Path(model.source).is_dir():", "Path(model.source).exists():"),
    ),
]  # fmt: skip

MUTANTS: list[Mutant] = [*GENERATE]
