"""What if: the promise is gradient × change, the truth is the loss with the changed value put in."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import onfoot
from onfoot.explore import exercises
from onfoot.explore.copies import copy_of
from onfoot.explore.knockouts import knockouts
from onfoot.explore.mistakes import possible, rows_of
from onfoot.explore.study import Study
from onfoot.explore.walk import small_model
from onfoot.explore.wrong_backward import backward_of
from onfoot.models.model import Model

TOKENS = np.array([[3, 1, 4, 1, 5]])
PLAIN = onfoot.GPT2Config(n_layer=2, n_head=2, n_embd=8, n_positions=9, vocab_size=11)


@pytest.fixture(scope="module")
def plain() -> Study:
    return Study(small_model(PLAIN, 0), TOKENS)


def torch_loss(model: Model, change: Any = None, knocked: str = "") -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The network in plain PyTorch, with a change or a knock-out: written from the paper's table, not from our code.

    `change` is called with each activation's name and value, and returns the value to go on with.
    """
    p = {name: torch.tensor(np.array(value)) for name, value in model.params.items()}
    seen: dict[str, torch.Tensor] = {}

    def see(name: str, x: torch.Tensor) -> torch.Tensor:
        x = x if change is None else change(name, x)
        seen[name] = x if x.requires_grad else x.requires_grad_()
        seen[name].retain_grad()
        return seen[name]

    def norm(x: torch.Tensor, layer: str) -> torch.Tensor:
        return torch.nn.functional.layer_norm(x, (8,), p[f"{layer}.weight"], p[f"{layer}.bias"], 1e-5)

    x = see("a_1", p["transformer.wte.weight"][TOKENS[0]] + p["transformer.wpe.weight"][: TOKENS.shape[1]])
    for b in range(2):
        name = f"transformer.h.{b}"
        a2 = see(f"{b}.a_2", norm(x, f"{name}.ln_1"))
        q, k, v = (a2 @ p[f"{name}.attn.c_attn.weight"] + p[f"{name}.attn.c_attn.bias"]).split(8, dim=-1)
        outputs = []
        for h in range(2):
            part = slice(4 * h, 4 * h + 4)
            root = 1.0 if knocked == f"{b} scale 1/√d" else 2.0
            scores = see(f"{b}.{h}", q[:, part] @ k[:, part].T / root)
            masked = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
            outputs.append(torch.softmax(masked, -1) @ v[:, part] * (knocked != f"{b} head {h + 1}"))
        a3 = see(f"{b}.a_3", torch.cat(outputs, -1))
        a4 = see(f"{b}.a_4", a3 @ p[f"{name}.attn.c_proj.weight"] + p[f"{name}.attn.c_proj.bias"])
        a4 = a4 * (knocked != f"{b} attention branch")
        a5 = see(f"{b}.a_5", a4 + x * (knocked != f"{b} skip 1"))
        a6 = see(f"{b}.a_6", norm(a5, f"{name}.ln_2"))
        a7 = see(f"{b}.a_7", a6 @ p[f"{name}.mlp.c_fc.weight"] + p[f"{name}.mlp.c_fc.bias"])
        a8 = see(f"{b}.a_8", torch.nn.functional.gelu(a7, approximate="tanh"))
        a9 = see(f"{b}.a_9", a8 @ p[f"{name}.mlp.c_proj.weight"] + p[f"{name}.mlp.c_proj.bias"])
        a9 = a9 * (knocked != f"{b} MLP branch")
        x = see(f"{b}.a_10", a9 + a5 * (knocked != f"{b} skip 2"))
    a12 = see("a_12", see("a_11", norm(x, "transformer.ln_f")) @ p["transformer.wte.weight"].T)
    return torch.nn.functional.cross_entropy(a12[:-1], torch.tensor(TOKENS[0, 1:])), seen


def adding(name: str, at: tuple[int, int], by: float) -> Any:
    def change(noted: str, x: torch.Tensor) -> torch.Tensor:
        if noted != name:
            return x
        x = x.clone()
        x[at] = x[at] + by
        return x

    return change


@pytest.mark.parametrize("name", ["transformer.h.1.mlp.c_fc.weight", "transformer.ln_f.bias", "transformer.wte.weight"])
def test_a_weight_is_changed_in_a_fresh_model(plain: Study, name: str) -> None:
    _, grads = plain.model.loss_and_grads(TOKENS)
    row, column = (3, 5) if grads[name].ndim == 2 else (0, 5)
    at = (row, column) if grads[name].ndim == 2 else (column,)
    found = plain.what_if("weight", name, row, column, 0.25)
    assert found["gradient"] == float(grads[name][at]) and found["value"] == float(plain.model.params[name][at])
    for one in found["sizes"] + found["curve"]:
        assert one["promised"] == float(grads[name][at]) * one["change"]  # exactly
        fresh = copy_of(plain.model)
        fresh.params[name][at] += one["change"]
        assert one["true"] == fresh.loss(TOKENS) - plain.loss
    assert [one["change"] for one in found["sizes"]] == [0.25 * size for size in (0.001, 0.01, 0.1, 1, 10)]


def test_the_study_keeps_its_weights(plain: Study) -> None:
    before = {name: value.copy() for name, value in plain.model.params.items()}
    plain.what_if("weight", "transformer.wpe.weight", 1, 1, 3.0)
    assert all((plain.model.params[name] == value).all() for name, value in before.items())


@pytest.mark.parametrize("kind", ["activation", "score"])
def test_activations_and_scores_are_changed_inside_the_network(plain: Study, kind: str) -> None:
    """Against autograd's gradient, and against the same network in PyTorch with the value put in."""
    loss, seen = torch_loss(plain.model)
    loss.backward()
    names = [one["name"] for one in plain.what_if_choices["choices"][kind]]
    assert len(names) == (21 if kind == "activation" else 4)
    for i, name in enumerate(names):
        row, column = (3, i % 8) if kind == "activation" else (3, i % 4)
        found = plain.what_if(kind, name, row, column, 0.5)
        gradient = seen[name].grad
        assert gradient is not None
        assert found["gradient"] == pytest.approx(float(gradient[row, column]), rel=1e-9, abs=1e-13), name
        assert found["value"] == pytest.approx(seen[name][row, column].item(), rel=1e-9, abs=1e-12), name
        for one in found["sizes"]:
            true = (torch_loss(plain.model, adding(name, (row, column), one["change"]))[0] - loss).item()
            assert one["true"] == pytest.approx(true, rel=1e-8, abs=1e-13), name
            assert one["promised"] == found["gradient"] * one["change"]


def test_first_order_holds_for_small_changes_and_breaks_down_for_large_ones(plain: Study) -> None:
    found = plain.what_if("activation", "a_12", 2, 1, 1.0)["sizes"]
    errors = [abs(one["true"] - one["promised"]) / abs(one["promised"]) for one in found]
    assert errors[0] < 1e-2 and errors[-1] > 0.3
    assert errors[1] / errors[0] == pytest.approx(10, rel=0.1)  # the error of first order grows with the change


def test_every_knock_out_is_the_network_without_that_part(plain: Study) -> None:
    found = knockouts(plain.context, range(2))
    assert len(found["rows"]) == 2 * (2 + 2 + 2 + 1)
    loss, _ = torch_loss(plain.model)
    for row in found["rows"]:
        without, _ = torch_loss(plain.model, knocked=f"{row['block']} {row['name']}")
        assert row["true"] == pytest.approx((without - loss).item(), rel=1e-9, abs=1e-13), row["name"]
        assert abs(row["true"]) > 1e-7, row["name"]


def test_what_a_knock_out_promises_is_its_first_order(plain: Study) -> None:
    """Gradients of the loss in the strength of each part, by differences in PyTorch of a part that is scaled."""
    rows = {(row["block"], row["name"]): row["promised"] for row in knockouts(plain.context, range(2))["rows"]}

    def slope(change: Any) -> float:
        eps = 1e-5
        up, down = (torch_loss(plain.model, change(sign * eps))[0].item() for sign in (1, -1))
        return (up - down) / (2 * eps)

    def scaled(name: str, columns: slice = slice(None)) -> Any:
        def at(eps: float) -> Any:
            def change(noted: str, x: torch.Tensor) -> torch.Tensor:
                if noted != name:
                    return x
                factor = torch.ones(x.shape[-1], dtype=x.dtype)
                factor[columns] += eps
                return x * factor

            return change

        return at

    assert rows[1, "head 2"] == pytest.approx(-slope(scaled("1.a_3", slice(4, 8))), rel=1e-5)
    assert rows[0, "MLP branch"] == pytest.approx(-slope(scaled("0.a_9")), rel=1e-5)
    both_heads = slope(scaled("0.0")) + slope(scaled("0.1"))
    assert rows[0, "scale 1/√d"] == pytest.approx((2 - 1) * both_heads, rel=1e-5)
    skip = slope(scaled("0.a_5")) - slope(scaled("0.a_4"))  # a_5 = a_1 + a_4
    assert rows[0, "skip 1"] == pytest.approx(-skip, rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("weight", "transformer.ln_f.bias", 1, 0, 0.1), "row must be between 0 and 0, got 1"),
        (("weight", "transformer.ln_f.bias", 0, 8, 0.1), "column must be between 0 and 7, got 8"),
        (("score", "0.0", 1, 2, 0.1), "token 1 cannot attend to token 2"),
        (("activation", "0.a_5", 0, 0, 0.0), "the change must not be 0"),
        (("activation", "0.a_5", 0, 0, math.nan), "the change must not be 0"),
        (("weight", "transformer.ln_f.bias", 0, 0, 2e6), "at most 1e\\+06 in size"),
        (("gradient", "0.a_5", 0, 0, 0.1), "kind must be weight, activation or score"),
    ],
)
def test_what_cannot_be_changed_is_refused(plain: Study, arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plain.what_if(*arguments)


def test_unknown_names_are_refused(plain: Study) -> None:
    for kind, name in (("weight", "w"), ("activation", "0.a_99"), ("score", "0.2")):
        with pytest.raises(KeyError, match="unknown"):
            plain.what_if(kind, name, 0, 0, 0.1)


# --- exercises ---


def test_the_answer_to_a_sign_is_the_true_change_of_the_loss(plain: Study) -> None:
    asked = [plain.exercise("sign", number) for number in range(9)]
    assert [one["what"] for one in asked] == ["logit", "weight", "score"] * 3
    assert {one["answer"]["true"] > 0 for one in asked} == {True, False}
    for one in asked:
        target = one["target"]
        again = plain.what_if(target["kind"], target["name"], target["row"], target["column"], one["change"])
        assert one["answer"]["true"] == again["sizes"][3]["true"] and abs(one["answer"]["true"]) > 1e-6
        assert (one["answer"]["true"] > 0) == (one["answer"]["gradient"] > 0)
    assert asked[4] == plain.exercise("sign", 4)


def test_the_hints_of_a_sign_lead_to_it(plain: Study) -> None:
    """A logit's sign follows from the target, a score's from ∂ρ and its mean, a weight's mostly from its terms."""
    for number in range(12):
        one = plain.exercise("sign", number)
        rises, hints = one["answer"]["gradient"] > 0, one["hints"]
        if one["what"] == "logit":
            assert rises == (hints[0]["chosen"] != hints[0]["target"])
        elif one["what"] == "score":
            gradient = hints[0]["rho"] * (hints[0]["drho"] - hints[0]["mean"])
            assert gradient == pytest.approx(one["answer"]["gradient"], rel=1e-9)
        else:
            parts = sum(hint["a"] * hint["delta"] for hint in hints)
            rest = one["answer"]["gradient"] - parts
            assert len(hints) == 3 and abs(rest) < 2 * min(abs(hint["a"] * hint["delta"]) for hint in hints) + 1e-12


def test_a_hidden_mistake_is_in_one_place(plain: Study) -> None:
    by_name = {mistake.name: mistake for mistake in possible(plain.context)}
    found = [plain.exercise("mistake", number) for number in range(8)]
    assert len({one["name"] for one in found}) > 3
    for one in found:
        rows, first = one["rows"], one["answer"]
        assert rows[first]["wrong"] and not any(row["wrong"] for row in rows[:first])
        assert one["explains"] and one["fix"] and one["layer"]
        backward = backward_of(plain.context, by_name[one["name"]], one["block"])
        norms = [float(np.linalg.norm(value)) for _, value, _ in rows_of(plain.context, backward, {})]
        assert sorted(norms) == sorted(row["norm"] for row in rows)
    in_first = [one for one in found if one["block"] == 0]  # the last block's gradients come first, and are right
    later = [row for one in in_first for row in one["rows"] if row["block"] == 1 and row["name"] != "Δ_10"]
    assert later and not any(row["wrong"] for row in later)


def test_a_mistake_planted_in_no_block_changes_nothing(plain: Study) -> None:
    mistake = next(one for one in possible(plain.context) if one.layer == "layer_norm")
    right = backward_of(plain.context, mistake, 99)
    assert all(np.allclose(right.grads[name], value, atol=1e-12) for name, value in plain.context.trace.grads.items())
    wrong = backward_of(plain.context, mistake, None)
    assert any(not np.allclose(wrong.grads[name], right.grads[name]) for name in right.grads)


def test_exercises_that_do_not_exist_are_refused(plain: Study) -> None:
    with pytest.raises(ValueError, match="kind must be sign or mistake"):
        plain.exercise("riddle", 0)
    with pytest.raises(ValueError, match="number must be between 0 and 999, got 1000"):
        plain.exercise("sign", 1000)


def test_an_exported_page_has_the_first_exercises(plain: Study) -> None:
    parts = plain._exercises()
    assert list(parts) == [f"exercise {kind} {n}" for kind in ("sign", "mistake") for n in range(exercises.EXPORTED)]
