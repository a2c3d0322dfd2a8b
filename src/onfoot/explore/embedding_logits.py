"""The arrays and steps before and after the blocks: the embedding, and the logits with the loss.

Of a large vocabulary only some tokens are shown, as columns or rows: those of the text, the most probable next tokens,
and those with the largest gradients. Sums over the vocabulary run over all of it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from onfoot.explore.rms_arrays import rms_forward_terms, rms_norm
from onfoot.explore.step import Step
from onfoot.explore.study_context import OVER_TOKENS, StudyContext, norm_forward_terms
from onfoot.explore.tensors import FEATURE, POSITION, TOKEN, VOCABULARY
from onfoot.explore.terms import Factor, dot, product
from onfoot.models.params import HEAD, POSITION_TABLE, token_table
from onfoot.ops.cross_entropy import IGNORE, log_sum_exp
from onfoot.tables import Formula

MAX_ROWS = 4096  # of the token table; of a larger one, only the rows that matter for the text are shown
EXTRA_ROWS = 48  # with the largest gradients, shown in addition to the text's tokens and their top predictions
TOP = 5  # the most probable next tokens of each token
VOCAB = (TOKEN, VOCABULARY)


def shown_rows(m: StudyContext) -> np.ndarray | None:
    """The tokens of a large vocabulary to show: the text's, the most probable ones, and those of large gradients."""
    if m.config.vocab_size <= MAX_ROWS:
        return None
    predicted = m.trace.a["pred"][0]  # (T, V)
    best = np.unique(np.argpartition(-predicted, TOP, axis=1)[:, :TOP])
    extra = np.argsort(-_row_norms(m))[:EXTRA_ROWS]
    return np.unique(np.concatenate([m.tokens[0], best, extra]))


def _row_norms(m: StudyContext) -> np.ndarray:
    """The norm of each row of the token table's gradient, (V,); of frozen weights, of its part through the logits."""
    table = token_table(m.config)
    if table in m.trace.grads:
        return np.linalg.norm(m.trace.grads[table], axis=1)
    d12, a11 = m.trace.delta[12][0], m.trace.a[11][0]  # (T, V), (T, d)
    squares = (d12 * ((a11 @ a11.T) @ d12)).sum(axis=0)  # ‖a_11ᵗ Δ_12‖² of each column, without that product
    return np.sqrt(np.maximum(squares, 0))


class Vocabulary:
    """The shown part of the vocabulary, and how arrays are cut to it."""

    def __init__(self, m: StudyContext) -> None:
        self.m, self.rows = m, shown_rows(m)
        self.where: Any = slice(None) if self.rows is None else self.rows
        self.n = m.config.vocab_size if self.rows is None else len(self.rows)
        self.all = "" if self.rows is None else ", all"  # suffix of the ids of complete arrays
        self.note = ""
        if self.rows is not None:
            self.note = (
                f"{self.n} of {m.config.vocab_size:,} tokens: the text's, the most probable, the largest gradients"
            )

    def columns(self, id: str, symbol: str, value: np.ndarray, **more: Any) -> str:
        """Adds an array (T, V) with the shown columns."""
        about: dict[str, Any] = {"note": self.note, **more}
        about.setdefault("all_of_it", lambda: value)
        made = self.m.add(id, symbol, value[:, self.where], VOCAB, columns=self.rows, **about)
        if self.rows is not None and id in ("Δ_12",):
            self.m.add(f"{id}{self.all}", symbol, value, VOCAB, formula=Formula(""))
        return made

    def cut(self, pair: tuple[str, str], name: str) -> None:
        """Says of a parameter and its gradient which tokens' rows they have, and how to compute all rows."""
        m = self.m
        for id, make in zip(pair, (lambda: m.weight(name), lambda: m.grads[name]), strict=True):
            tensor = m.tensors[id]
            tensor.all_of_it = make
            if len(tensor.axes) == 2:
                tensor.rows = self.rows
            else:
                tensor.columns = self.rows

    def one_hot(self, ids: np.ndarray) -> np.ndarray:
        """One-hot rows (T, shown); a row of zeros for an ignored id."""
        shown = np.arange(self.n) if self.rows is None else self.rows
        return (np.where(ids == IGNORE, -1, ids)[:, None] == shown).astype(float)


def one_hot(ids: np.ndarray, n: int) -> np.ndarray:
    """One-hot rows (T, n); a row of zeros for an ignored id."""
    out = np.zeros((len(ids), n))
    counts = np.flatnonzero(ids != IGNORE)
    out[counts, ids[counts]] = 1
    return out


def add_embedding(m: StudyContext) -> list[Step]:
    vocabulary = m.vocabulary = Vocabulary(m)
    trace, config, ids = m.trace, m.config, m.tokens[0]
    name, where = token_table(config), vocabulary.where
    m.add("a_0", "a_0", ids, (TOKEN,))
    shown: dict[str, Any] = {"formula": Formula(""), "columns": vocabulary.rows}
    m.add("ohe", "ohe(a_0)", vocabulary.one_hot(ids), VOCAB, all_of_it=lambda: one_hot(ids, config.vocab_size), **shown)
    looked_up = dot("ohe(a_0) w_tok", "vocabulary", ("ohe", "rj"), ("w_tok", "jc"))
    m.add("a_tok", "a_tok", trace.a["tok"][0], terms=(looked_up,))
    shape = (m.n_tokens, vocabulary.n)

    def d0(where: Any) -> np.ndarray:
        if 0 in trace.delta:
            return trace.delta[0][0][:, where]
        return trace.blocks[0].delta[1][0] @ m.weight(name, where).T  # eq EMB.1

    m.add(
        "Δ_0",
        "Δ_0",
        lambda: d0(where),
        VOCAB,
        (dot("Δ_1 w_tokᵗ", "features", ("Δ_1", "rj"), ("w_tok", "cj")),),
        measure=lambda probe: probe.activation(
            m.tensors.value("Δ_0"), {"a_tok": lambda direction: direction @ m.weight(name, where)}
        ),
        differentiate=lambda autograd: autograd.activation("a_tok") @ m.weight(name, where).T,
        known_shape=shape,
        columns=vocabulary.rows,
        all_of_it=lambda: d0(slice(None)),
        note=vocabulary.note,
    )
    tokens, parts = _token_table(m)
    steps = [
        Step("input", "Input", "a_0", "Δ_0", inside=["ohe"]),
        Step("tok", "Token embedding", "a_tok", "Δ_1", [tokens], parts),
    ]
    if "pos" in trace.a:
        steps.append(_positions(m))
    return [*steps, Step("embedding", "Input embedding", "a_1", "Δ_1")]


def _positions(m: StudyContext) -> Step:
    """Adds GPT-2's table of positions: its first rows, one for each token."""
    m.add("a_pos", "a_pos", m.trace.a["pos"], terms=(product("w_pos", ("w_pos", "rc")),))
    where, terms = (slice(0, m.n_tokens), slice(None)), (product("Δ_1", ("Δ_1", "rc")),)
    positions = m.parameter("", "w_pos", POSITION_TABLE, (POSITION, FEATURE), terms, where)
    note = f"rows 0 to {m.n_tokens - 1} of {m.config.n_positions}; the gradient of the others is 0"
    m.tensors["∂w_pos"].note = note
    return Step("pos", "Position embedding", "a_pos", "Δ_1", [positions])


def _token_table(m: StudyContext) -> tuple[tuple[str, str], list[str]]:
    """Adds w_tok and its gradient; for a tied table, also the two parts of the gradient. Returns their ids."""
    vocabulary, name = m.vocabulary, token_table(m.config)
    rows, where = vocabulary.rows, vocabulary.where
    axes = (VOCABULARY, FEATURE)
    d12, a11, d1 = m.trace.delta[12][0], m.trace.a[11][0], m.trace.blocks[0].delta[1][0]
    looked_up = dot("ohe(a_0)ᵗ Δ_1", OVER_TOKENS, ("ohe", "jr"), ("Δ_1", "jc"))
    read_out = dot("(a_11ᵗ Δ_12)ᵗ", OVER_TOKENS, ("Δ_12", "jr"), ("a_11", "jc"))
    tied = m.config.tie_word_embeddings
    pair = m.parameter("", "w_tok", name, axes, (looked_up, read_out) if tied else (looked_up,), where)
    vocabulary.cut(pair, name)
    m.tensors[pair[1]].note = vocabulary.note
    add_all(m, "w_tok", name)
    parts = []
    if tied:
        pieces = {
            "embedding": (lambda: vocabulary.one_hot(m.tokens[0]).T @ d1, looked_up, "3"),
            "logits": (lambda: d12.T[where] @ a11, read_out, "TIE.1"),
        }
        for part, (make, term, equation) in pieces.items():
            symbol = f"∂w_tok, as {part}"
            formula = Formula(f"{symbol} = {term.label}", (equation,))
            shape = (vocabulary.n, m.config.n_embd)
            parts.append(m.add(symbol, symbol, make, axes, (term,), formula, known_shape=shape, rows=rows))
        m.tensors[parts[1]].all_of_it = lambda: d12.T @ a11
    return pair, parts


def add_all(m: StudyContext, symbol: str, name: str) -> None:
    """Adds the complete table (V, d) for sums over the vocabulary, if only some of its rows are shown."""
    if m.vocabulary.rows is not None:
        m.add(
            f"{symbol}{m.vocabulary.all}",
            symbol,
            lambda: m.weight(name),
            (VOCABULARY, FEATURE),
            formula=Formula(""),
            known_shape=tuple(m.params[name].shape),
            transient=True,
        )


def add_logits(m: StudyContext) -> list[Step]:
    trace, config, targets, vocabulary = m.trace, m.config, m.targets[0], m.vocabulary
    scores, tied = trace.a[12][0], config.tie_word_embeddings  # (T, V)
    symbol = "w_tokᵗ" if tied else "w_11"
    m.add("a_11", "a_11", trace.a[11][0], terms=_final_terms(m))
    all_of = vocabulary.all
    through = dot(
        "Δ_12 w_tok" if tied else "Δ_12 w_11ᵗ",
        "vocabulary",
        (f"Δ_12{all_of}", "rj"),
        (f"{'w_tok' if tied else 'w_11'}{all_of}", "jc"),
    )
    m.delta("Δ_11", "Δ_11", trace.delta[11][0], "a_11", (through,))
    norm, inside = _final_norm(m)
    has_bias = getattr(config, "lm_head_bias", False)
    bias = (product("~b_11", ("b_11", "c")),) if has_bias else ()
    read = dot(f"a_11 {symbol}", "features", ("a_11", "rj"), ("w_tok" if tied else "w_11", "cj"))
    vocabulary.columns("a_12", "a_12", scores, terms=(read, *bias))

    lse, picked = log_sum_exp(scores), scores[np.arange(len(targets)), np.where(targets == IGNORE, 0, targets)]
    counts = targets != IGNORE
    exponentials = np.exp(scores - scores.max(axis=-1, keepdims=True))
    vocabulary.columns(
        "e", "exp(a_12 − max)", exponentials, all_of_it=lambda: np.exp(scores - scores.max(-1, keepdims=True))
    )
    m.add("Σe", "Σ exp(a_12 − max)", exponentials.sum(axis=-1), (TOKEN,))
    share = product("exp(a_12 − max) / Σ", ("e", "rc"), Factor("Σe", "r", -1))
    vocabulary.columns("y_pred", "y_pred", trace.a["pred"][0], terms=(share,))
    m.add("log Σ exp a_12", "log Σ exp a_12", np.where(counts, lse, 0), (TOKEN,))
    m.add("a_12[target]", "a_12 at the target", np.where(counts, picked, 0), (TOKEN,))
    gaps = (
        product("log Σ exp a_12", ("log Σ exp a_12", "c")),
        product("a_12 at the target", ("a_12[target]", "c"), sign=-1),
    )
    m.add("ℓ", "ℓ", np.where(counts, lse - picked, 0), (TOKEN,), gaps)
    formula = Formula("y_gt = the token after each, as one-hot rows")
    shown: dict[str, Any] = {"formula": formula, "columns": vocabulary.rows}
    shown["all_of_it"] = lambda: one_hot(targets, config.vocab_size)
    m.add("y_gt", "y_gt", vocabulary.one_hot(targets), VOCAB, **shown)
    m.add("n", "n", np.array(m.divisor), (), formula=Formula("n = the number of targets"))
    m.add("counts", "has target", counts.astype(float), (TOKEN,))
    _add_last_delta(m)
    parameters = []
    if not tied:
        # the file holds wᵗ: (vocabulary, width)
        of_weight, name = dot("a_11ᵗ Δ_12", OVER_TOKENS, ("Δ_12", "jr"), ("a_11", "jc")), f"{HEAD}.weight"
        parameters.append(m.parameter("", "w_11", name, (VOCABULARY, FEATURE), (of_weight,), vocabulary.where))
        vocabulary.cut(parameters[-1], name)
        add_all(m, "w_11", name)
    if has_bias:
        of_bias = dot("Σ_tokens Δ_12", OVER_TOKENS, ("Δ_12", "jc"))
        parameters.append(m.parameter("", "b_11", f"{HEAD}.bias", (VOCABULARY,), (of_bias,), vocabulary.where))
        vocabulary.cut(parameters[-1], f"{HEAD}.bias")
    title = "RMS norm final" if m.family == "llama" else "LayerNorm final"
    return [
        Step("11", title, "a_11", "Δ_11", norm, inside),
        Step("12", "FC logits", "a_12", "Δ_12", parameters, ["y_gt"]),
        Step("softmax", "Softmax", "y_pred"),
        Step("loss", "Loss", "ℓ"),
    ]


def _final_terms(m: StudyContext) -> tuple[Any, ...]:
    return rms_forward_terms("", "10") if m.family == "llama" else norm_forward_terms("", 10)


def _final_norm(m: StudyContext) -> tuple[list[tuple[str, str]], list[str]]:
    """Adds the norm before the logits."""
    x = f"{m.config.n_layer - 1}.a_10"
    if m.family == "llama":
        return rms_norm(m, "", "10", "model.norm", x, "Δ_11")
    return m.norm("", 10, "transformer.ln_f", x, "Δ_11")


def _add_last_delta(m: StudyContext) -> None:
    """Adds Δ_12, where the backward pass begins. It is checked by perturbing the shown logits."""
    value, where = m.trace.delta[12][0], m.vocabulary.where
    by_n = Factor("n", "", -1)
    note = "the last token has no target, so its row is exactly 0"

    def spread(direction: np.ndarray) -> np.ndarray:
        out = np.zeros_like(value)
        out[:, where] = direction
        return out

    m.vocabulary.columns(
        "Δ_12",
        "Δ_12",
        value,
        terms=(
            product("y_pred / n", ("y_pred", "rc"), ("counts", "r"), by_n),
            product("y_gt / n", ("y_gt", "rc"), by_n, sign=-1),
        ),
        note=f"{m.vocabulary.note}; {note}" if m.vocabulary.note else note,
        measure=lambda probe: probe.activation(value[:, where], {"a_12": spread}),
        differentiate=lambda autograd: autograd.activation("a_12")[:, where],
    )
