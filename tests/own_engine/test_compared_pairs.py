"""The comparison of the first batch names the pair, the gradient and the place that is wrong first."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import plain_pairs
import pytest
from own_models import GPT2, LLAMA, TOKENS, plain

import onfoot
from onfoot import ops
from onfoot.engine import OPS
from onfoot.models.compare_pairs import compare_pairs


def scaled(name: str, which: int, factor: float) -> dict[str, Any]:
    """A backward function with one gradient scaled."""
    right = getattr(plain_pairs, name)

    def backward(dy: Any, saved: Any) -> Any:
        grads = right(dy, saved)
        if not isinstance(grads, tuple):
            return grads * factor
        return tuple(g if i != which or g is None else g * factor for i, g in enumerate(grads))

    return {name: backward}


def compared(functions: Any, config: Any = GPT2, dtype: str = "float32", **settings: Any) -> Any:
    return compare_pairs(onfoot.create(config, 0, dtype, functions), TOKENS, **settings)


def test_right_pairs_agree_at_every_place_and_once_more_with_moved_weights() -> None:
    found = compared(plain_pairs)
    assert found.right and found.first is None and found.largest < 1e-12
    places = {(one.pair, one.place) for one in found.results}
    for b in range(GPT2.n_layer):
        block = f"transformer.h.{b}"
        expected = {("linear", f"{block}.{x}") for x in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")}
        expected |= {("layer_norm", f"{block}.ln_{i}") for i in (1, 2)}
        assert expected | {("attention", f"{block}.attn"), ("gelu_tanh", f"{block}.mlp.act")} <= places
    assert {("linear", "lm_head"), ("cross_entropy", "the loss"), ("embedding", "transformer.wpe.weight")} <= places
    assert {one.moved for one in found.results} == {False, True}
    assert str(found).startswith("6 of 6 pairs used by this model are yours (attention, cross_entropy, embedding,")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    ("name", "which", "words"),
    [
        ("linear_backward", 0, "lm_head: dx of your linear_backward"),
        ("linear_backward", 1, "lm_head: dweight of your linear_backward"),
        ("linear_backward", 2, "transformer.h.1.mlp.c_proj: dbias of your linear_backward"),  # the head has no bias
        ("layer_norm_backward", 2, "transformer.ln_f: dbias of your layer_norm_backward"),
        ("gelu_tanh_backward", 0, "transformer.h.1.mlp.act: dx of your gelu_tanh_backward"),
        ("attention_backward", 1, "transformer.h.1.attn: dk of your attention_backward"),
        ("cross_entropy_backward", 0, "the loss: dlogits of your cross_entropy_backward"),
        ("embedding_backward", 0, "transformer.wte.weight: dweight of your embedding_backward"),
    ],
)
def test_a_wrong_gradient_is_named_with_its_place_and_error(name: str, which: int, words: str, dtype: str) -> None:
    found = compared(plain(**scaled(name, which, 1.001)), dtype=dtype)
    assert str(found) == f"{words} is wrong: relative error 0.001"
    assert {f"{one.pair}_{one.half}" for one in found.wrong} == {name}
    assert {one.what for one in found.wrong} == {words.split(": ")[1].split()[0]}  # the other gradients are right


def test_a_mistake_that_initial_values_hide_is_found_with_moved_weights() -> None:
    """The weight of a norm outside the means changes nothing while all weights are 1."""

    def backward(dy: Any, saved: Any) -> Any:
        normed, rstd, weight = saved
        dx = (dy - dy.mean(-1, keepdims=True) - normed * (normed * dy).mean(-1, keepdims=True)) * rstd * weight
        return dx, *plain_pairs.layer_norm_backward(dy, saved)[1:]

    found = compared(plain(layer_norm_backward=backward))
    assert found.first is not None and found.first.moved and found.first.what == "dx"
    assert "away from their initial values" in str(found)


def test_two_wrong_pairs_are_both_named_the_first_of_the_pass_first() -> None:
    both = {**scaled("embedding_backward", 0, 2), **scaled("attention_backward", 2, 3)}
    found = compared(plain(**both))
    assert str(found).startswith("transformer.h.1.attn: dv of your attention_backward is wrong: relative error 2; also")
    assert str(found).endswith("also wrong: embedding_backward")


def test_below_a_gradient_of_0_the_others_are_still_judged() -> None:
    """The pass goes on with our gradient where the user's is wrong."""
    found = compared(plain(**scaled("linear_backward", 0, 0.0), **scaled("embedding_backward", 0, 2)))
    assert str(found).endswith("relative error 1; also wrong: embedding_backward")


def test_a_wrong_forward_comes_before_any_gradient() -> None:
    def forward(x: Any) -> Any:
        y, saved = plain_pairs.gelu_tanh_forward(x)
        return 1.01 * y, saved

    found = compared(plain(gelu_tanh_forward=forward, **scaled("linear_backward", 0, 2)))
    assert str(found).startswith("transformer.h.0.mlp.act: y of your gelu_tanh_forward is wrong: relative error 0.01")


def test_functions_that_fail_are_named_and_the_others_still_judged() -> None:
    wrong = {"gelu_tanh_backward": lambda dy, saved: None, **scaled("embedding_backward", 0, 2)}
    found = compared(plain(**wrong))
    assert found.first.unwritten and not found.wrong[-1].unwritten
    assert str(found).startswith("transformer.h.1.mlp.act: your gelu_tanh_backward returns None; it must return dx;")
    assert str(found).endswith("; also wrong: embedding_backward")


def test_an_argument_that_is_changed_in_place_is_found() -> None:
    def forward(x: Any, weight: Any, bias: Any, eps: float = 1e-5) -> Any:
        out = plain_pairs.layer_norm_forward(x.copy(), weight, bias, eps)
        x -= x.mean(-1, keepdims=True)
        return out

    def backward(dy: Any, saved: Any) -> Any:
        out = plain_pairs.gelu_tanh_backward(dy, saved)
        dy *= 2
        return out

    found = compared(plain(layer_norm_forward=forward))
    assert "transformer.h.0.ln_1: your layer_norm_forward changes its argument x in place" in str(found)
    assert "your gelu_tanh_backward changes its argument dy in place" in str(
        compared(plain(gelu_tanh_backward=backward))
    )


def test_a_function_that_rounds_to_float32_is_still_right() -> None:
    def backward(dy: Any, saved: Any) -> Any:
        return tuple(None if g is None else g.astype(np.float32) for g in plain_pairs.linear_backward(dy, saved))

    found = compared(plain(linear_backward=backward))
    assert found.right and found.largest > 1e-9


def test_lora_layers_and_other_families_are_compared_too() -> None:
    model = onfoot.create(GPT2, engine=plain(**scaled("linear_backward", 0, 2)))
    model.add_lora(r=2)
    assert str(compare_pairs(model, TOKENS)).startswith(
        "lm_head: dx of your linear_backward is wrong: relative error 1"
    )
    ours = {"rope": (OPS["rope_forward"], lambda dy, saved: dy)}
    assert str(compared(ours, LLAMA)).startswith("block 1: dx of your rope_backward is wrong")
    assert compared({"linear": (plain_pairs.linear_forward, plain_pairs.linear_backward)}, LLAMA).right


def test_dropout_and_packed_examples_are_those_of_the_step() -> None:
    segments = np.repeat([[0] * 5 + [1] * 7], 3, axis=0)
    calls = []

    def forward(q: Any, k: Any, v: Any, causal: bool, start: Any, keep: Any) -> Any:
        calls.append((start is not None, keep is not None))
        return ops.attention_forward(q, k, v, causal, start, keep)

    pairs = {"attention": (forward, lambda dy, saved: ops.attention_backward(dy, saved))}
    config = replace(GPT2, attn_pdrop=0.5)
    assert compared(pairs, config, segments=segments, dropout_seed=3).right
    assert set(calls) == {(True, True)}


def test_engines_of_ours_have_nothing_to_compare() -> None:
    found = compare_pairs(onfoot.create(GPT2, engine="numpy"), TOKENS)
    assert found.right and found.results == [] and found.counted == "0 of 6 pairs used by this model are yours"
