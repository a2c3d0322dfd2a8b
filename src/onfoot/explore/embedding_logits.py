"""The arrays and steps before and after the blocks: the embedding, and the logits with the loss."""

from __future__ import annotations

import numpy as np

from onfoot.explore.step import Step
from onfoot.explore.study_context import OVER_TOKENS, StudyContext, norm_forward_terms
from onfoot.explore.tensors import FEATURE, POSITION, TOKEN, VOCABULARY
from onfoot.explore.terms import Factor, dot, product
from onfoot.models.params import HEAD, POSITION_TABLE, TOKEN_TABLE
from onfoot.ops.cross_entropy import IGNORE, log_sum_exp
from onfoot.tables import Formula

MAX_ROWS = 4096  # of the token table; of a larger one, only the rows that matter for the text are shown
EXTRA_ROWS = 48  # shown in addition to the rows of the text's tokens


def shown_rows(m: StudyContext) -> np.ndarray | None:
    """The rows of a large token table to show: those of the text, and those with the largest gradients."""
    if m.config.vocab_size <= MAX_ROWS:
        return None
    norms = np.linalg.norm(m.trace.grads[TOKEN_TABLE], axis=1)
    return np.union1d(m.tokens[0], np.argsort(-norms)[:EXTRA_ROWS])


def one_hot(ids: np.ndarray, n: int) -> np.ndarray:
    """One-hot rows (T, n); a row of zeros for an ignored id."""
    out = np.zeros((len(ids), n))
    counts = np.flatnonzero(ids != IGNORE)
    out[counts, ids[counts]] = 1
    return out


def add_embedding(m: StudyContext) -> list[Step]:
    trace, config, ids = m.trace, m.config, m.tokens[0]
    table = m.params[TOKEN_TABLE]  # (V, d)
    over = "vocabulary"
    m.add("a_0", "a_0", ids, (TOKEN,))
    m.add("ohe", "ohe(a_0)", lambda: one_hot(ids, config.vocab_size), (TOKEN, VOCABULARY), formula=Formula(""))
    m.add("a_tok", "a_tok", trace.a["tok"][0], terms=(dot("ohe(a_0) w_tok", over, ("ohe", "rj"), ("w_tok", "jc")),))
    m.add("a_pos", "a_pos", trace.a["pos"], terms=(product("w_pos", ("w_pos", "rc")),))
    d0 = trace.delta[0][0]  # (T, V)
    m.add(
        "Δ_0",
        "Δ_0",
        d0,
        (TOKEN, VOCABULARY),
        (dot("Δ_1 w_tokᵗ", "features", ("Δ_1", "rj"), ("w_tok", "cj")),),
        measure=lambda probe: probe.activation(d0, {"a_tok": lambda direction: direction @ table}),
        differentiate=lambda autograd: autograd.activation("a_tok") @ table.T,
    )
    first = slice(0, len(ids))
    of_positions = (product("Δ_1", ("Δ_1", "rc")),)
    positions = m.parameter("", "w_pos", POSITION_TABLE, (POSITION, FEATURE), of_positions, (first, slice(None)))
    m.tensors["∂w_pos"].note = f"rows 0 to {len(ids) - 1} of {config.n_positions}; the gradient of the others is 0"
    tokens, parts = _token_table(m)
    return [
        Step("input", "Input", "a_0", "Δ_0", inside=["ohe"]),
        Step("tok", "Token embedding", "a_tok", "Δ_1", [tokens], parts),
        Step("pos", "Position embedding", "a_pos", "Δ_1", [positions]),
        Step("embedding", "Input embedding", "a_1", "Δ_1"),
    ]


def _token_table(m: StudyContext) -> tuple[tuple[str, str], list[str]]:
    """Adds w_tok and its gradient; for a tied table, also the two parts of the gradient. Returns their ids."""
    rows = shown_rows(m)
    where = slice(None) if rows is None else rows
    axes, name = (VOCABULARY, FEATURE), TOKEN_TABLE
    d12, a11, d1 = m.trace.delta[12][0], m.trace.a[11][0], m.trace.blocks[0].delta[1][0]
    hot, signal = "ohe", "Δ_12"
    if rows is not None:
        hot, signal = "ohe, rows", "Δ_12, rows"
        m.add(hot, "ohe(a_0)", lambda: one_hot(m.tokens[0], m.config.vocab_size)[:, rows], (TOKEN, VOCABULARY))
        m.add(signal, "Δ_12", lambda: d12[:, rows], (TOKEN, VOCABULARY), formula=Formula(""))
        m.tensors[hot].columns = m.tensors[signal].columns = rows
    looked_up = dot("ohe(a_0)ᵗ Δ_1", OVER_TOKENS, (hot, "jr"), ("Δ_1", "jc"))
    read_out = dot("(a_11ᵗ Δ_12)ᵗ", OVER_TOKENS, (signal, "jr"), ("a_11", "jc"))
    tied = m.config.tie_word_embeddings
    m.add("w_tok", "w_tok", m.params[name], axes, formula=Formula(""), parameter=name)
    gradient = m.add(
        "∂w_tok",
        "∂w_tok",
        lambda: m.trace.grads[name][where],
        axes,
        (looked_up, read_out) if tied else (looked_up,),
        parameter=name,
        measure=lambda probe: probe.parameter(m.trace.grads[name][where], name, where),
        differentiate=lambda autograd: autograd.parameter(name)[where],
    )
    m.tensors[gradient].rows = rows
    weight = "w_tok"
    if rows is not None:
        weight = m.add("w_tok, rows", "w_tok", lambda: m.params[name][rows], axes, formula=Formula(""))
        m.tensors[weight].rows = rows
        n = m.config.vocab_size
        m.tensors[gradient].note = f"{len(rows)} of {n:,} rows: those of the text and those with the largest gradients"
    parts = []
    if tied:
        pieces = {
            "embedding": (lambda: one_hot(m.tokens[0], m.config.vocab_size).T[where] @ d1, looked_up, "3"),
            "logits": (lambda: d12.T[where] @ a11, read_out, "TIE.1"),
        }
        for part, (make, term, equation) in pieces.items():
            symbol = f"∂w_tok, as {part}"
            formula = Formula(f"{symbol} = {term.label}", (equation,))
            parts.append(m.add(symbol, symbol, make, axes, (term,), formula))
            m.tensors[symbol].rows = rows
    return (weight, gradient), parts


def add_logits(m: StudyContext) -> list[Step]:
    trace, config, targets = m.trace, m.config, m.targets[0]
    over_v, scores = "vocabulary", trace.a[12][0]  # (T, V)
    vocab = (TOKEN, VOCABULARY)
    head = "w_tok" if config.tie_word_embeddings else "w_11"
    symbol = "w_tokᵗ" if config.tie_word_embeddings else "w_11"
    norm, inside = m.norm("", 10, "transformer.ln_f", f"{config.n_layer - 1}.a_10", "Δ_11")
    m.add("a_11", "a_11", trace.a[11][0], terms=norm_forward_terms("", 10))
    through = dot("Δ_12 w_tok" if config.tie_word_embeddings else "Δ_12 w_11ᵗ", over_v, ("Δ_12", "rj"), (head, "jc"))
    m.delta("Δ_11", "Δ_11", trace.delta[11][0], "a_11", (through,))
    bias = (product("~b_11", ("b_11", "c")),) if config.lm_head_bias else ()
    read = dot(f"a_11 {symbol}", "features", ("a_11", "rj"), (head, "cj"))
    m.add("a_12", "a_12", scores, vocab, (read, *bias))

    lse, picked = log_sum_exp(scores), scores[np.arange(len(targets)), np.where(targets == IGNORE, 0, targets)]
    counts = targets != IGNORE
    m.add("e", "exp(a_12 − max)", lambda: np.exp(scores - scores.max(axis=-1, keepdims=True)), vocab)
    m.add("Σe", "Σ exp(a_12 − max)", lambda: m.tensors.value("e").sum(axis=-1), (TOKEN,))
    share = product("exp(a_12 − max) / Σ", ("e", "rc"), Factor("Σe", "r", -1))
    m.add("y_pred", "y_pred", trace.a["pred"][0], vocab, (share,))
    m.add("log Σ exp a_12", "log Σ exp a_12", np.where(counts, lse, 0), (TOKEN,))
    m.add("a_12[target]", "a_12 at the target", np.where(counts, picked, 0), (TOKEN,))
    gaps = (
        product("log Σ exp a_12", ("log Σ exp a_12", "c")),
        product("a_12 at the target", ("a_12[target]", "c"), sign=-1),
    )
    m.add("ℓ", "ℓ", lambda: np.where(counts, lse - picked, 0), (TOKEN,), gaps)
    m.add(
        "y_gt",
        "y_gt",
        lambda: one_hot(targets, config.vocab_size),
        vocab,
        formula=Formula("y_gt = the token after each, as one-hot rows"),
    )
    m.add("n", "n", np.array(m.divisor), (), formula=Formula("n = the number of targets"))
    m.add("counts", "has a target", counts.astype(float), (TOKEN,))
    by_n = Factor("n", "", -1)
    m.delta(
        "Δ_12",
        "Δ_12",
        trace.delta[12][0],
        "a_12",
        (
            product("y_pred / n", ("y_pred", "rc"), ("counts", "r"), by_n),
            product("y_gt / n", ("y_gt", "rc"), by_n, sign=-1),
        ),
        vocab,
        note="the last token has no target, so its row is exactly 0",
    )
    parameters = []
    if not config.tie_word_embeddings:
        # the file holds wᵗ: (vocabulary, width)
        of_weight = dot("a_11ᵗ Δ_12", OVER_TOKENS, ("Δ_12", "jr"), ("a_11", "jc"))
        parameters.append(m.parameter("", "w_11", f"{HEAD}.weight", (VOCABULARY, FEATURE), (of_weight,)))
    if config.lm_head_bias:
        of_bias = dot("Σ_tokens Δ_12", OVER_TOKENS, ("Δ_12", "jc"))
        parameters.append(m.parameter("", "b_11", f"{HEAD}.bias", (VOCABULARY,), (of_bias,)))
    return [
        Step("11", "LayerNorm final", "a_11", "Δ_11", norm, inside),
        Step("12", "FC logits", "a_12", "Δ_12", parameters, ["y_gt"]),
        Step("softmax", "Softmax", "y_pred"),
        Step("loss", "Loss", "ℓ"),
    ]
