"""Kernels as people write them, in tiles, right but for sizes that their author did not try; each is found."""

from __future__ import annotations

import numpy as np
import pytest

import onfoot.check
from onfoot.check.case_sizes import LARGE
from onfoot.check.report import LayerReport

TILES = (16, 32, 64, 128)


def layer_norm(x, weight, bias, dout, tile=32, wrong=False):
    """Sums over features in tiles; wrong: the variance of a second tile is about that tile's own mean."""
    d = x.shape[-1]
    mean = sum(x[..., i : i + tile].sum(-1, keepdims=True) for i in range(0, d, tile)) / d
    square = 0.0
    for i in range(0, d, tile):
        part = x[..., i : i + tile]
        about = part.mean(-1, keepdims=True) if wrong and i else mean
        square = square + ((part - about) ** 2).sum(-1, keepdims=True)
    rstd = (square / d + 1e-5) ** -0.5
    z, g = (x - mean) * rstd, dout * weight
    dx = rstd * (g - g.mean(-1, keepdims=True) - z * (g * z).mean(-1, keepdims=True))
    return dx, (dout * z).sum((0, 1)), dout.sum((0, 1))


def rms_norm(x, weight, dout, tile=32, wrong=False):
    """dweight from tiles of tokens; wrong: the last tile overwrites the others."""
    r = ((x * x).mean(-1, keepdims=True) + 1e-6) ** -0.5
    z, g = x * r, dout * weight
    dweight = np.zeros_like(weight)
    for i in range(0, x.shape[1], tile):
        part = (dout * z)[:, i : i + tile].sum((0, 1))
        dweight = part if wrong else dweight + part
    return r * (g - z * (g * z).mean(-1, keepdims=True)), dweight


def linear(x, weight, bias, dout, tile=32, wrong=False):
    """A product in tiles of its inner axis; wrong: whole tiles only, unless there is none."""
    rows, gradients = x.reshape(-1, x.shape[-1]), dout.reshape(-1, dout.shape[-1])
    n = dout.shape[-1]
    end = n - n % tile if wrong and n >= tile else n
    dx = sum(gradients[:, i : min(i + tile, end)] @ weight[:, i : min(i + tile, end)].T for i in range(0, end, tile))
    return np.reshape(dx, x.shape), rows.T @ gradients, gradients.sum(0)


def softmax_cross_entropy(logits, targets, dout, tile=32, wrong=False):
    """A running maximum over tiles of the vocabulary; wrong: the sum is not rescaled when the maximum grows."""
    top, total = np.full((*targets.shape, 1), -np.inf), np.zeros((*targets.shape, 1))
    for i in range(0, logits.shape[-1], tile):
        part = logits[..., i : i + tile]
        new = np.maximum(top, part.max(-1, keepdims=True))
        total = total * (1.0 if wrong and i else np.exp(top - new)) + np.exp(part - new).sum(-1, keepdims=True)
        top = new
    p = np.exp(logits - top) / total
    b, t = np.indices(targets.shape)
    p[b, t, targets] -= 1
    return p * (dout / targets.size)


def rope(x, positions, dout, tile=32, wrong=False):
    """Cosines from a table; wrong: it has no row for later positions, and its last row is taken for them."""
    half = x.shape[-1] // 2
    at = np.minimum(positions, tile - 1) if wrong else positions
    angle = at[:, None] * 10000.0 ** (-np.arange(half) / half)
    first, second = dout[..., :half], dout[..., half:]
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([first * cos + second * sin, second * cos - first * sin], -1)


def swiglu(gate, up, dout, tile=32, wrong=False):
    """Vectors of so many numbers of the flat array; wrong: the numbers behind the last whole vector are left at 0."""
    n = gate.size
    end = n - n % tile if wrong and n >= tile else n
    flat = [np.ravel(x)[:end] for x in (gate, up, dout)]
    s = 1 / (1 + np.exp(-flat[0]))
    dgate, dup = np.zeros(n), np.zeros(n)
    dgate[:end] = flat[2] * flat[1] * s * (1 + flat[0] * (1 - s))
    dup[:end] = flat[2] * flat[0] * s
    return dgate.reshape(gate.shape), dup.reshape(gate.shape)


def gelu(x, dout, tile=32, wrong=False):
    """One row per block of threads; wrong: a row that is wider than the block starts again at its first column."""
    d = x.shape[-1]
    c = np.sqrt(2 / np.pi)
    tanh = np.tanh(c * (x + 0.044715 * x**3))
    slope = 0.5 * (1 + tanh) + 0.5 * x * (1 - tanh**2) * c * (1 + 3 * 0.044715 * x**2)
    return dout * (slope[..., np.arange(d) % tile] if wrong else slope)


def embedding(ids, weight, dout, tile=32, wrong=False):
    """Rows added in tiles of the table; wrong: ids are taken modulo the tile if the table is larger."""
    dweight = np.zeros_like(weight)
    np.add.at(dweight, ids % tile if wrong else ids, dout)
    return dweight


def ids_in_eight_bits(ids, weight, dout, tile=128, wrong=False):
    dweight = np.zeros_like(weight)
    np.add.at(dweight, ids.astype(np.int8) if wrong else ids, dout)
    return dweight


def attention(q, k, v, dout, tile=32, wrong=False):
    """Tiles of keys; wrong: those after the first are not masked within their own tile's diagonal."""
    n, d = q.shape[-2:]
    hidden = np.triu(np.ones((n, n), bool), 1)
    if wrong:
        rows, columns = np.indices((n, n)) // tile
        hidden &= (rows != columns) | (rows == 0)
    scores = np.where(hidden, -np.inf, q @ k.swapaxes(-1, -2) / np.sqrt(d))
    e = np.exp(scores - scores.max(-1, keepdims=True))
    rho = e / e.sum(-1, keepdims=True)
    drho = dout @ v.swapaxes(-1, -2)
    ds = rho * (drho - (rho * drho).sum(-1, keepdims=True)) / np.sqrt(d)
    return ds @ k, ds.swapaxes(-1, -2) @ q, rho.swapaxes(-1, -2) @ dout


KERNELS = {
    "attention": attention,
    "layer_norm": layer_norm,
    "rms_norm": rms_norm,
    "linear": linear,
    "softmax_cross_entropy": softmax_cross_entropy,
    "rope": rope,
    "swiglu": swiglu,
    "gelu": gelu,
    "embedding": embedding,
}


def checked(layer: str, kernel, tile: int, wrong: bool) -> LayerReport:
    check = getattr(onfoot.check, layer)
    return check(lambda *x: kernel(*x, tile=tile, wrong=wrong), dtypes="float64", arrays="numpy")


@pytest.fixture(autouse=True)
def no_diagnosis(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a mistake is found does not depend on its name, which takes longer."""
    monkeypatch.setattr("onfoot.check.known.explain", lambda report, magnitudes: None)


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("layer", KERNELS)
def test_a_kernel_that_is_wrong_from_its_second_tile_on_is_found(layer: str, tile: int) -> None:
    assert checked(layer, KERNELS[layer], tile, wrong=False).passed
    report = checked(layer, KERNELS[layer], tile, wrong=True)
    assert not report.passed
    assert {o.case.name for o in report.failed} & {*LARGE}


def test_ids_that_overflow_eight_bits_are_found() -> None:
    assert checked("embedding", ids_in_eight_bits, 128, wrong=False).passed
    assert not checked("embedding", ids_in_eight_bits, 128, wrong=True).passed
