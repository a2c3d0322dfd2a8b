"""Linear layers, LoRA and embeddings, written with loops and einsum."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from planted.registry import plant, plant_change

Array = np.ndarray
LEARNING_RATE = 0.037


def linear(x: Array, weight: Array, dout: Array) -> tuple[Array, Array, Array]:
    """Right, by einsum."""
    return np.einsum("bto,io->bti", dout, weight), np.einsum("bti,bto->io", x, dout), np.einsum("bto->o", dout)


@plant("linear", "dx without the transpose of the weight")
def no_transpose(x, weight, bias, dout):
    _, dweight, dbias = linear(x, weight, dout)
    return np.dot(dout, weight), dweight, dbias


@plant("linear", "the weight left out of dx")
def handed_on(x, weight, bias, dout):
    _, dweight, dbias = linear(x, weight, dout)
    return dout, dweight, dbias


@plant("linear", "update before propagation")
def early_update(x, weight, bias, dout):
    _, dweight, dbias = linear(x, weight, dout)
    weight = weight - LEARNING_RATE * dweight
    return linear(x, weight, dout)[0], dweight, dbias


@plant("linear", "dweight transposed")
def swapped(x, weight, bias, dout):
    dx, dweight, dbias = linear(x, weight, dout)
    return dx, dweight.T, dbias


@plant("linear", "dweight of a single sequence")
def one_weight(x, weight, bias, dout):
    dx, _, dbias = linear(x, weight, dout)
    for one, d in zip(x, dout, strict=True):
        dweight = one.T @ d
    return dx, dweight, dbias


@plant("linear", "dweight not summed over the batch")
def many_weights(x, weight, bias, dout):
    dx, _, dbias = linear(x, weight, dout)
    return dx, np.stack([one.T @ d for one, d in zip(x, dout, strict=True)]), dbias


@plant("linear", "dbias summed over features")
def wrong_axis(x, weight, bias, dout):
    dx, dweight, _ = linear(x, weight, dout)
    return dx, dweight, dout.sum(axis=2).ravel()


@plant("linear", "dbias not summed over all tokens")
def batch_axis(x, weight, bias, dout):
    dx, dweight, _ = linear(x, weight, dout)
    return dx, dweight, sum(dout[b] for b in range(len(dout)))


@plant("linear", "dbias of a single sequence")
def one_bias(x, weight, bias, dout):
    dx, dweight, _ = linear(x, weight, dout)
    return dx, dweight, dout[-1].sum(axis=0)


# LoRA


def lora(
    x: torch.Tensor,
    weight: torch.Tensor,
    down: torch.Tensor,
    up: torch.Tensor,
    alpha: float,
    dout: torch.Tensor,
    **changes: Any,
) -> tuple[torch.Tensor, ...]:
    scale = changes.get("scale", lambda a, r: a / r)(alpha, down.shape[1])
    in_up = changes.get("in_up", lambda s: s)(scale)
    product = down @ up
    dx = changes.get("frozen", 1) * dout @ weight.T + changes.get("in_dx", scale) * (dout @ product.T)
    ddown = changes.get("in_ddown", scale) * torch.einsum("bti,bto,ro->ir", x, dout, up)
    dup = in_up * torch.einsum("bti,ir,bto->ro", x, down, dout)
    return dx, ddown.T if changes.get("transposed") else ddown, dup


def lora_with(name: str, /, **changes: Any) -> None:
    plant_change("lora", name, lora, **changes)


lora_with("the frozen path missing from dx", frozen=0)
lora_with("the adapter's path missing from dx", in_dx=0)
lora_with("α in place of α/r", scale=lambda a, r: a)
lora_with("α/√r in place of α/r", scale=lambda a, r: a * r**-0.5)
lora_with("α/r missing everywhere", scale=lambda a, r: 1)
lora_with("r/α in place of α/r", scale=lambda a, r: r / a)
lora_with("α/r missing from dx and ddown", in_dx=1, in_ddown=1)
lora_with("α/r missing from dx", in_dx=1)
lora_with("α/r missing from ddown", in_ddown=1)
lora_with("α/r missing from dup", in_up=lambda s: 1)
lora_with("α/r twice in dup", in_up=lambda s: s * s)
lora_with("ddown transposed", transposed=True)


# embeddings


def scatter(ids: Array, rows: Array, n: int) -> Array:
    out = np.zeros((n, rows.shape[-1]))
    for i, row in zip(ids.ravel(), rows.reshape(-1, rows.shape[-1]), strict=True):
        out[i] += row
    return out


@plant("embedding", "repeated ids lost")
def last_wins(ids, weight, dout):
    dweight = np.zeros_like(weight)
    for i, row in zip(ids.ravel(), dout.reshape(-1, weight.shape[1]), strict=True):
        dweight[i] = row
    return dweight


@plant("embedding", "repeated ids averaged")
def averaged(ids, weight, dout):
    flat = dout.reshape(-1, weight.shape[1])
    dweight = np.zeros_like(weight)
    for i in set(ids.ravel().tolist()):
        dweight[i] = flat[ids.ravel() == i].mean(axis=0)
    return dweight


@plant("embedding", "only the last sequence")
def last_sequence(ids, weight, dout):
    for one, d in zip(ids, dout, strict=True):
        dweight = scatter(one, d, len(weight))
    return dweight


@plant("embedding", "one table per sequence")
def tables(ids, weight, dout):
    return torch.stack([torch.eye(len(weight), dtype=dout.dtype)[i].T @ d for i, d in zip(ids, dout, strict=True)])


@plant("embedding", "ids counted from 1")
def from_one(ids, weight, dout):
    return np.roll(scatter(ids, dout, len(weight)), -1, axis=0)


@plant("tied_embedding", "only the gradient through the embedding")
def embedding_path(ids, weight, dout):
    return scatter(ids, dout @ weight, len(weight))


@plant("tied_embedding", "only the gradient through the logits")
def logits_path(ids, weight, dout):
    return np.einsum("btv,btc->vc", dout, weight[ids])


@plant("tied_embedding", "the embedding's rows overwrite those of the logits")
def overwritten(ids, weight, dout):
    dweight, through = np.einsum("btv,btc->vc", dout, weight[ids]), scatter(ids, dout @ weight, len(weight))
    dweight[np.unique(ids)] = through[np.unique(ids)]
    return dweight


@plant("tied_embedding", "the logits' gradient reshaped in place of transposed")
def reshaped_head(ids, weight, dout):
    head = np.einsum("btc,btv->cv", weight[ids], dout)
    return scatter(ids, dout @ weight, len(weight)) + head.reshape(weight.shape)
