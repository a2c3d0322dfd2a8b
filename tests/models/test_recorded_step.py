"""A step that is recorded and replayed, against the formulas in float64 and against the step without a recording."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import onfoot
from onfoot.config import Config
from onfoot.models.model import Model
from onfoot.models.step import checked_batch, unrecorded_loss
from onfoot.ops.cross_entropy import IGNORE
from onfoot.quantized import KINDS

pytest.importorskip("numba")
CLOSE = 2e-6
CONFIG = onfoot.GPT2Config(n_layer=3, n_head=2, n_embd=16, n_positions=1024, vocab_size=37)
LLAMA = onfoot.LlamaConfig(
    vocab_size=37,
    hidden_size=32,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
FAMILIES: dict[str, Config] = {"gpt2": CONFIG, "llama": LLAMA}
CASES: list[tuple[int, int, dict[str, Any]]] = [  # sequences, tokens, fields
    (1, 1, {"n_head": 1, "n_embd": 3, "qk_head_dim": 1, "n_inner": 1}),
    (6, 3, {"n_head": 1, "n_embd": 7, "qk_head_dim": 5, "n_inner": 9}),
    (6, 33, {"n_head": 3, "n_embd": 15, "qk_head_dim": 2, "n_inner": 23}),  # rows that are no multiple of anything
    (6, 7, {"n_head": 1, "n_embd": 41, "qk_head_dim": 3}),
    (
        6,
        11,
        {"n_head": 3, "n_embd": 20, "head_dim": 7, "qk_head_dim": 4, "n_inner": 9},
    ),  # heads wider than the stream
    (6, 130, {}),  # more rows than a chunk, more keys than a block
    (20, 21, {"n_head": 4, "n_embd": 64, "n_inner": 100}),
    (6, 400, {"n_head": 1, "n_embd": 6, "qk_head_dim": 11}),  # deeper than one packed block on the way to the weights
    (6, 9, {"n_embd": 120, "n_inner": 900}),  # on the way through the MLP,
    (6, 9, {"n_embd": 390, "n_inner": 10, "n_layer": 1}),  # through all other layers,
    (6, 9, {"vocab_size": 401}),  # and through the head
    (1, 1023, {"n_embd": 18}),
    (9, 5, {}),
    (9, 234, {"n_embd": 128, "n_layer": 2}),  # two threads: of 5 sequences the norms are computed again, of 4 kept
]


def scattered(model: Model, seed: int = 1) -> Model:
    """The model with its parameters away from their first values."""
    rng, spread = np.random.default_rng(seed), min(0.1, 1 / np.sqrt(model.config.n_embd))  # scores are about 1
    for p in model.params.values():
        p += rng.normal(0, spread, p.shape).astype(np.float32)
    return model


def models(config: Config = CONFIG, **fields: Any) -> tuple[Model, Model]:
    """The same weights in float32 on the kernels and in float64 on the formulas."""
    ours = scattered(onfoot.create(replace(config, **fields), 0, engine="numba"))
    return ours, Model(ours.config, ours.params, "float64", "numpy")


def batches(vocabulary: int, sequences: int, n: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Tokens and targets, twice where every fifth token has no target, and twice where all have one."""
    rng, out = np.random.default_rng(2), []
    for ignored in (True, True, False, False):
        tokens, targets = (rng.integers(0, vocabulary, (sequences, n)) for _ in range(2))
        if ignored:
            targets.reshape(-1)[1::5] = IGNORE
        out.append((tokens, targets))
    return out


def replays(model: Model) -> list[int]:
    """For each recording, the number of lists of calls: one, or one per thread."""
    return [len(entry.replays) for entry in model._steps._kept.values() if entry.replays is not None]


def unrecorded(model: Model, tokens: Any, targets: Any = None, **given: Any) -> tuple[float, dict[str, Any]]:
    """The same step without a recording."""
    run = model.new_run(dropout_seed=given.get("dropout_seed"))
    batch = checked_batch(model, tokens, targets, given.get("divisor"), given.get("segments"))
    batch = batch._replace(dropout_seed=given.get("dropout_seed"))
    return unrecorded_loss(run, model.config, batch), run.gradients.made


def compare(
    ours: Model, truth: Model, tokens: np.ndarray, targets: Any = None, most: float = CLOSE, **given: Any
) -> None:
    """The loss and all gradients."""
    loss, grads = ours.loss_and_grads(tokens, targets, **given)
    exact, right = truth.loss_and_grads(tokens, targets, **given)
    assert abs(loss - exact) <= CLOSE * exact
    assert grads.keys() == right.keys()
    for name, grad in grads.items():
        assert grad.shape == right[name].shape and grad.dtype == np.float32
        size = max(np.linalg.norm(right[name]), 1e-3)  # of a gradient that all but vanishes, rounding is left
        assert np.linalg.norm(grad - right[name]) <= most * size, name
    for name in [name for name in grads if name.endswith("c_attn.bias")]:
        width = ours.config.n_head * ours.config.key_width
        assert not grads[name][width : 2 * width].any()  # the keys' is exactly 0, as everywhere


@pytest.mark.parametrize(("causal", "tied"), [(True, True), (False, False)])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_loss_and_every_gradient_are_those_of_the_formulas(
    case: tuple[int, int, dict[str, Any]], causal: bool, tied: bool, threads: int
) -> None:
    sequences, n, fields = case
    ours, truth = models(**fields, causal=causal, tie_word_embeddings=tied)
    for tokens, targets in batches(ours.config.vocab_size, sequences, n):
        compare(ours, truth, tokens, targets)
    own = threads if sequences > 1 else 1  # lists of calls: one, or one per thread
    assert replays(ours) == [own] * (1 if sequences * n == 1 else 2)  # two batches of one shape are one recording


@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_alone_is_that_of_the_formulas(family: str, threads: int) -> None:
    ours, truth = models(FAMILIES[family])
    for tokens, targets in batches(37, 6, 11):
        assert ours.loss(tokens, targets) == pytest.approx(truth.loss(tokens, targets), rel=CLOSE)
    assert replays(ours) == [1, 1]  # without a backward pass, all threads share every call


@pytest.mark.parametrize(
    "fields",
    [
        {"tie_word_embeddings": True},
        {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 54},
        {"num_attention_heads": 2, "hidden_size": 36, "intermediate_size": 31},
        {"attention_bias": True, "mlp_bias": True},
    ],
    ids=str,
)
def test_a_llamas_gradients_are_those_of_the_formulas(fields: dict[str, Any], threads: int) -> None:
    ours, truth = models(LLAMA, **fields)
    for tokens, targets in batches(37, 6, 13):
        compare(ours, truth, tokens, targets)
    assert replays(ours) == [threads, threads]


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_examples_have_positions_of_their_own_in_every_replay(family: str, threads: int) -> None:
    ours, truth = models(FAMILIES[family])
    rng = np.random.default_rng(3)
    for _ in range(3):
        segments = np.sort(rng.integers(0, 3, (6, 20)), axis=1)
        compare(ours, truth, rng.integers(0, 37, (6, 20)), segments=segments)
    assert 1 <= len(ours._steps) <= 3  # as many targets as examples end


def well_conditioned(ours: Model) -> Model:
    """The model with an embedding whose numbers are about 1.

    With small ones, a token's embedding and the output of a block can all but cancel, and the norm that follows
    magnifies every rounding tenfold.
    """
    rng = np.random.default_rng(7)
    for name in ours.params.keys() & {"transformer.wte.weight", "model.embed_tokens.weight"}:
        ours.params[name] += rng.normal(0, 1, ours.params[name].shape).astype(np.float32)
    return ours


def with_companions(ours: Model, **options: Any) -> tuple[Model, Model]:
    """LoRA layers with an effect, on the same weights in both dtypes."""
    ours.add_lora(r=3, **options)
    rng = np.random.default_rng(4)
    for name in sorted(ours.trainable):
        ours.params[name] += rng.normal(0, 0.1, ours.params[name].shape).astype(np.float32)
    truth = onfoot.create(ours.config, 0, "float64", "numpy")
    truth.add_lora(r=3, **options)
    for name, p in ours.params.items():
        truth.params[name] = np.asarray(p)
    return ours, truth


@pytest.mark.parametrize("targets", [None, ["lm_head"]], ids=["blocks", "head"])
@pytest.mark.parametrize("family", FAMILIES)
def test_companions_beside_frozen_layers(family: str, targets: list[str] | None, threads: int) -> None:
    ours, truth = with_companions(well_conditioned(models(FAMILIES[family])[0]), targets=targets)
    for tokens, wanted in batches(37, 6, 11):
        compare(ours, truth, tokens, wanted)
    assert set(replays(ours)) == {threads}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_companions_beside_layers_in_blocks(family: str, kind: str, threads: int) -> None:
    ours, _ = models(CONFIG, n_embd=64) if family == "gpt2" else models(LLAMA, intermediate_size=96)
    ours.quantize(kind)
    ours, truth = with_companions(ours)
    for tokens, targets in batches(37, 6, 11):
        compare(ours, truth, tokens, targets, most=4e-6)
    assert set(replays(ours)) == {threads}


PARTS = ["c_attn.q", "c_attn.v"]
KINDS_OF_STEP: dict[str, Callable[[], tuple[Model, dict[str, Any]]]] = {
    "gpt2": lambda: (models()[0], {}),
    "gpt2 with an own head": lambda: (models(tie_word_embeddings=False, lm_head_bias=True)[0], {}),
    "gpt2 with ReLU": lambda: (models(activation_function="relu")[0], {}),
    "gpt2 with GELU": lambda: (models(activation_function="gelu")[0], {}),
    "gpt2, packed": lambda: (models()[0], {"segments": np.repeat([[0, 1], [0, 0], [1, 2], [5, 5]], 5, axis=1)}),
    "gpt2, computed again": lambda: (again(models()[0]), {}),
    "gpt2, dropped": lambda: (models(attn_pdrop=0.2, embd_pdrop=0.2, resid_pdrop=0.2)[0], {"dropout_seed": 5}),
    "gpt2, LoRA layers": lambda: (with_companions(models()[0])[0], {}),
    "gpt2, LoRA layers dropped": lambda: (with_companions(models()[0], dropout=0.2)[0], {"dropout_seed": 5}),
    "gpt2, LoRA layers of parts": lambda: (with_companions(models()[0], targets=PARTS)[0], {}),
    "gpt2, another divisor": lambda: (models()[0], {"divisor": 1000.0}),
    "llama": lambda: (models(LLAMA)[0], {}),
    "llama, packed": lambda: (models(LLAMA)[0], {"segments": np.repeat([[0, 1], [0, 0], [1, 2], [5, 5]], 5, axis=1)}),
    "llama, computed again": lambda: (again(models(LLAMA)[0]), {}),
    "llama, dropped": lambda: (models(LLAMA, attention_dropout=0.2)[0], {"dropout_seed": 5}),
    "llama, LoRA layers dropped": lambda: (with_companions(models(LLAMA)[0], dropout=0.2)[0], {"dropout_seed": 5}),
}
NOT_RECORDED = {"gpt2, LoRA layers of parts"}  # NumPy computes these


def again(model: Model) -> Model:
    model.recompute = True
    return model


@pytest.mark.parametrize("kind", KINDS_OF_STEP)
def test_on_one_thread_a_replay_has_the_bits_of_the_calls(kind: str, on_threads: Callable[[int], None]) -> None:
    on_threads(1)
    model, given = KINDS_OF_STEP[kind]()
    for tokens, targets in batches(37, 4, 10):
        loss, grads = model.loss_and_grads(tokens, targets, **given)
        right, expected = unrecorded(model, tokens, targets, **given)
        assert loss == right and grads.keys() == expected.keys()
        assert all((grads[name] == expected[name]).all() for name in grads)
    assert len(model._steps) == (0 if kind in NOT_RECORDED else 2)


@pytest.mark.parametrize("kind", KINDS_OF_STEP)
def test_on_several_threads_a_replay_is_as_close_as_sums_can_be(kind: str, threads: int) -> None:
    model, given = KINDS_OF_STEP[kind]()
    for tokens, targets in batches(37, 4, 10):
        loss, grads = model.loss_and_grads(tokens, targets, **given)
        right, expected = unrecorded(model, tokens, targets, **given)
        most = max(np.linalg.norm(g) for g in expected.values())
        assert loss == pytest.approx(right, rel=1e-6) and grads.keys() == expected.keys()
        for name, grad in grads.items():
            assert np.linalg.norm(grad - expected[name]) <= 1e-5 * max(np.linalg.norm(expected[name]), 1e-3 * most), (
                name
            )


@pytest.mark.parametrize("family", FAMILIES)
def test_each_dropout_seed_has_its_own_pattern_in_one_recording(family: str, threads: int) -> None:
    model, _ = with_companions(models(FAMILIES[family])[0], dropout=0.3)
    tokens = np.random.default_rng(0).integers(0, 37, (6, 9))
    losses = [model.loss_and_grads(tokens, dropout_seed=seed)[0] for seed in (1, 2, 1)]
    assert losses[0] == losses[2] != losses[1]
    assert losses[1] == pytest.approx(unrecorded(model, tokens, dropout_seed=2)[0], rel=1e-6)
    assert replays(model) == [threads]
    model.loss_and_grads(tokens)
    assert len(model._steps) == 2  # nothing dropped is another step


@pytest.mark.parametrize("n", [4, 10])
def test_threads_are_never_without_a_sequence(n: int, on_threads: Callable[[int], None]) -> None:
    on_threads(n)
    ours, truth = models()
    for sequences, own in ((n, n), (n - 1, 1), (2 * n, n), (n + 1, 1)):
        compare(ours, truth, *batches(37, sequences, 5)[0])
        assert replays(ours)[-1] == own


def test_the_same_bits_twice(threads: int) -> None:
    ours, _ = models(n_head=3, n_embd=24)
    tokens = np.random.default_rng(0).integers(0, 11, (6, 50))
    (loss, grads), (again, twice) = ours.loss_and_grads(tokens), ours.loss_and_grads(tokens)
    assert loss == again and all((grads[name] == twice[name]).all() for name in grads)
    assert replays(ours) == [threads]


def test_gradients_outlive_the_next_pass(threads: int) -> None:
    ours, _ = models()
    tokens = np.random.default_rng(0).integers(0, 11, (6, 9))
    _, grads = ours.loss_and_grads(tokens)
    before = {name: grad.copy() for name, grad in grads.items()}
    ours.loss_and_grads(tokens[::-1])
    assert all((grads[name] == before[name]).all() for name in grads)
    assert replays(ours) == [threads]


@pytest.mark.parametrize("sequences", [6, 1])  # lists of each thread's own, and one of all
def test_each_gradient_is_handed_over_once_from_the_last_to_the_first(sequences: int, threads: int) -> None:
    ours, _ = models(n_embd=128)  # enough for more than one handing over
    tokens = np.random.default_rng(0).integers(0, 11, (sequences, 9))
    heard: list[tuple[str, Any]] = []
    loss, left = ours.loss_and_grads(
        tokens,
        on_gradient=lambda name, grad: heard.append((name, grad)),
        on_loss=lambda value: heard.append(("loss", value)),
    )
    again, grads = ours.loss_and_grads(tokens)
    assert loss == again and not left
    (first, value), *taken = heard
    assert (first, value) == ("loss", loss)
    names = [name for name, _ in taken]
    assert names == [*grads] and sorted(names) == sorted(ours.trainable)
    layers = [name.rpartition(".")[0] for name in names]
    wte, wpe, *others = dict.fromkeys(name.rpartition(".")[0] for name in ours.params)
    assert [*dict.fromkeys(layers)] == [*reversed(others), wte, wpe]
    assert all((grad == grads[name]).all() for name, grad in taken)
    assert replays(ours) == [threads if sequences == 6 else 1]


@pytest.mark.parametrize("sequences", [6, 1])
def test_what_is_raised_on_hearing_the_loss_ends_the_step_and_not_the_recording(sequences: int, threads: int) -> None:
    ours, _ = models()
    tokens = np.random.default_rng(0).integers(0, 11, (sequences, 9))
    right, taken = ours.loss_and_grads(tokens)[0], []

    def refuse(loss: float) -> None:
        raise FloatingPointError(f"{loss}")

    with pytest.raises(FloatingPointError, match=str(right)):
        ours.loss_and_grads(tokens, on_gradient=lambda name, grad: taken.append(name), on_loss=refuse)
    assert taken == [] and ours.loss_and_grads(tokens)[0] == right and len(ours._steps) == 1


def test_where_nothing_counts_every_gradient_is_zero(threads: int) -> None:
    ours, _ = models()
    tokens = np.zeros((6, 9), np.int64)
    loss, grads = ours.loss_and_grads(tokens, np.full_like(tokens, IGNORE), divisor=1)
    assert loss == 0 and not any(grad.any() for grad in grads.values())
    assert replays(ours) == [threads]


def test_targets_and_tokens_of_every_replay_are_looked_at(threads: int) -> None:
    """A recording reads them at their addresses, and could not notice a change."""
    ours, _ = models()
    tokens = np.zeros((6, 9), np.int64)
    ours.loss_and_grads(tokens, tokens)
    for wrong in (-1, 37, 10**6):
        with pytest.raises(ValueError, match=str(wrong)):
            ours.loss_and_grads(tokens, tokens + wrong)
        with pytest.raises(ValueError, match=str(wrong)):
            ours.loss_and_grads(tokens + wrong, tokens)
    with pytest.raises(ValueError, match=r"\(9, 6\)"):
        ours.loss_and_grads(tokens, tokens.T)
    assert replays(ours) == [threads]


def test_who_replays_what(on_threads: Callable[[int], None]) -> None:
    """One list per thread if their work is balanced and the model is small; otherwise one list for all."""
    on_threads(2)

    def lists(model: Model, sequences: int = 4, n: int = 9) -> int:
        model.loss_and_grads(np.zeros((sequences, n), np.int64))
        return replays(model)[-1]

    small = onfoot.GPT2Config(n_layer=1, n_head=2, n_embd=32, n_positions=9, vocab_size=11)
    assert lists(onfoot.create(small)) == 2
    assert lists(onfoot.create(small), 1) == 1 == lists(onfoot.create(small), 3)  # a thread would wait for the other
    assert lists(onfoot.create(small), 9) == 2
    for other in ({"n_embd": 512, "n_inner": 2049}, {"vocab_size": 40_000}):  # over a million numbers in a table
        assert lists(onfoot.create(replace(small, **other))) == 1
    assert lists(onfoot.create(replace(small, n_embd=128, n_layer=43))) == 1  # two threads' gradients: 68 MB
    long = onfoot.create(replace(small, vocab_size=20_000, n_positions=512))
    assert lists(long, 2, 512) == 2 and lists(long, 4, 512) == 1  # 164 MB of logits


def test_a_step_that_differs_in_what_it_does_is_recorded_anew(threads: int) -> None:
    ours, truth = models(n_positions=64)
    tokens = np.random.default_rng(0).integers(0, 37, (6, 9))

    def recorded(**given: Any) -> int:
        compare(ours, truth, tokens, **given)
        compare(ours, truth, tokens[::-1], **given)
        return len(ours._steps)

    assert recorded() == 1
    assert recorded(divisor=7.0) == 1  # filled in before each replay
    assert recorded(segments=np.zeros((6, 9), np.int64)) == 2
    for model in (ours, truth):
        model.trainable.remove("transformer.h.1.ln_2.bias")
    assert recorded() == 3
    for model in (ours, truth):
        model.recompute = True
    assert recorded() == 4
    for model in (ours, truth):
        model.recompute = False
        model.trainable.add("transformer.h.1.ln_2.bias")
    assert recorded() == 4  # the first is still known


def test_only_so_many_recordings_are_kept(on_threads: Callable[[int], None]) -> None:
    on_threads(1)
    ours, truth = models(n_layer=1)
    for n in [*range(1, 25), 1]:
        compare(ours, truth, *batches(37, 1, n)[2])
    assert len(ours._steps) == 16


def test_new_values_in_the_same_arrays_are_seen_by_a_replay_and_new_arrays_recorded(threads: int) -> None:
    ours, truth = models()
    tokens = np.random.default_rng(0).integers(0, 37, (6, 9))
    compare(ours, truth, tokens)
    first = next(iter(ours._steps._kept.values()))
    for name, p in ours.params.items():
        p *= np.float32(1.25)
        truth.params[name][...] = p
    compare(ours, truth, tokens)
    assert [*ours._steps._kept.values()] == [first]
    ours.params["transformer.h.1.mlp.c_fc.weight"] = -ours.params["transformer.h.1.mlp.c_fc.weight"]
    truth.params["transformer.h.1.mlp.c_fc.weight"] *= -1
    compare(ours, truth, tokens)
    assert len(ours._steps) == 1 and next(iter(ours._steps._kept.values())) is not first
    values = {name: 0.75 * p for name, p in ours.params.items()}
    ours.params = values
    truth.params = values
    compare(ours, truth, tokens)


def test_adapters_that_come_and_go_are_seen(threads: int) -> None:
    ours, truth = models()
    tokens = np.random.default_rng(0).integers(0, 37, (6, 9))
    compare(ours, truth, tokens)
    rng = np.random.default_rng(5)
    for adapter in ("one", "other"):
        for model in (ours, truth):
            model.add_lora(r=2, name=adapter)
        for name in sorted(ours.trainable):
            ours.params[name] += rng.normal(0, 0.1, ours.params[name].shape).astype(np.float32)
            truth.params[name][...] = ours.params[name]
    for adapter in ("other", "one", "other", None, "one"):
        for model in (ours, truth):
            model.use_adapter(adapter)
        compare(ours, truth, tokens, most=1e-5)
    for change in (Model.merge_adapter, Model.unmerge_adapter):
        for model in (ours, truth):
            change(model)
        assert ours.loss(tokens) == pytest.approx(truth.loss(tokens), rel=CLOSE)


def test_a_copy_has_its_own_parameters_and_its_own_recordings(threads: int) -> None:
    ours, truth = models()
    tokens = np.random.default_rng(0).integers(0, 37, (6, 9))
    compare(ours, truth, tokens)
    other = copy.deepcopy(ours)
    assert len(other._steps) == 0 and len(ours._steps) == 1
    for p in ours.params.values():
        p *= 0
    compare(other, truth, tokens)
    assert replays(other) == [threads]


def test_what_is_not_on_kernels_is_not_recorded() -> None:
    ours, truth = models()
    tokens = np.random.default_rng(0).integers(0, 37, (4, 9))
    double = Model(CONFIG, ours.params, "float64", "numba")
    loss, grads = double.loss_and_grads(tokens)
    right, expected = truth.loss_and_grads(tokens)
    assert loss == pytest.approx(right, rel=1e-12) and grads.keys() == expected.keys()
    assert len(double._steps) == 0 and truth._steps is None
    ours.trace(tokens)
    assert len(ours._steps) == 0
