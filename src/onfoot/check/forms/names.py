"""What the names in people's code mean: arguments, gradients, sizes and options of a layer.

Names are compared without case and underscores: `dY`, `grad_output` and `g` may all be the upstream gradient, `W` and
`gamma` a weight. A name that may mean several arguments gets the one that no other name claims.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

UPSTREAM = "dout"
_UPSTREAM = """dout gradoutput gradout gradoutputs dy grady gy dl dldy dldout dlossdy dlossdout upstream upstreamgrad
    dupstream gradupstream do doutput outputgrad outgrad goutput gout dloss cotangent ct ybar outbar topgrad topdiff
    dnext gradient grad grads gradin g delta error err dz dh dlout dlogits douts dvalues dres dresult dvalue"""
_WEAK = "g delta error err dlogits dvalue dvalues grad grads gradient"
_SAVED = """saved cache ctx context residuals residual res state saves store stored tape memory intermediates
    activations acts savedtensors forwardcache fwdcache tocache aux"""
_OUTPUT = "out o y output outputs yhat result attnout"
UPSTREAM_NAMES, WEAK_UPSTREAM = frozenset(_UPSTREAM.split()), frozenset(_WEAK.split())
SAVED_NAMES, OUTPUT_NAMES = frozenset(_SAVED.split()), frozenset(_OUTPUT.split())

_INPUT = "x input inputs inp hiddenstates hidden h data src features tensor xs"
SYNONYMS: dict[str, str] = {
    "x": _INPUT,
    "a": f"{_INPUT} a",
    "weight": "weight weights w gamma scale kernel table emb embedding embeddings embed e wte wt g matrix w0",
    "bias": "bias b beta shift offset biases",
    "q": "q query queries",
    "k": "k key keys",
    "v": "v value values val",
    "query": "q query queries xq",
    "key": "k key keys xk",
    "value": "v value values xv",
    "ids": f"ids idx indices index tokens tokenids inputids indexes token {_INPUT}",
    "logits": "logits logit scores z x input inputs inp pred preds predictions y yhat o outputs",
    "targets": "targets target labels label y t ytrue classes gt ids idx target_ids",
    "gate": "gate g x1 a x gateout gateproj h1 gated",
    "up": "up u x2 b y x3 h2 upout upproj lorab",
    "down": "down a loraa wa downproj",
    "alpha": "alpha loraalpha",
    "positions": "positions pos position positionids t offsets",
    "keep": "keep mask dropmask dropoutmask keepmask",
    "param": "param params p w weight theta parameter x",
    "grad": "grad grads g dw gradient dparam dp",
    "m": "m expavg mean moment1 firstmoment mu",
    "step": "step t iteration timestep steps i",
}
STEMS = {
    "q": {"query", "queries"},
    "k": {"key", "keys"},
    "v": {"value", "values"},
    "o": {"out", "output"},
    "qkv": {"cattn", "in", "kqv", "attn"},
    "attn": {"cattn", "qkv", "attention", "in"},
    "ln1": {"norm1", "layernorm1", "norm"},
    "ln2": {"norm2", "layernorm2"},
    "fc": {"cfc", "fc1", "mlpfc", "1"},
}
OPTIONS: dict[str, str] = {
    "eps": "eps epsilon layernormeps normeps layernormepsilon varianceepsilon rmsnormeps",
    "causal": "causal iscausal",
    "n_head": "nhead nheads numheads heads h numattentionheads headcount",
    "theta": "theta base ropetheta ropebase",
    "lr": "lr learningrate eta stepsize alpha",
    "beta1": "beta1 b1",
    "beta2": "beta2 b2",
    "weight_decay": "weightdecay wd decay lmbda lambda",
    "reduction": "reduction",
}
WEIGHT_WORDS, BIAS_WORDS = ("weight", "w", "kernel", "gamma", "scale"), ("bias", "b", "beta")
NOISE = re.compile(r"(projection|proj|linear|layer|dense|weights|weight|bias|mlp|attention|attn)+$")


def normal(name: str) -> str:
    """The name without case and underscores."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def parts(name: str) -> tuple[str, str]:
    """The stem and the kind of a parameter: `w_q` and `q_proj.weight` are both ("q", "weight")."""
    *before, last = re.split(r"[._]", name.lower())
    stem = "".join(before)
    for words, kind in ((WEIGHT_WORDS, "weight"), (BIAS_WORDS, "bias")):
        if last in words:
            return _stem(stem), kind
        head, *rest = re.split(r"[._]", name.lower())
        if head in words and rest:
            return _stem("".join(rest)), kind
    found = re.fullmatch(r"(w|b)([a-z0-9]{1,5})", normal(name))
    return (_stem(found[2]), {"w": "weight", "b": "bias"}[found[1]]) if found else ("", "")


def _stem(text: str) -> str:
    text = normal(text)
    short = NOISE.sub("", text) or text
    short = re.sub(r"^(w|to|c)(?=.)", "", short)
    return short or text


def means(name: str, argument: str) -> bool:
    """Whether a name may stand for that argument."""
    plain = normal(name)
    if plain == normal(argument) or plain in SYNONYMS.get(argument, "").split():
        return True
    stem, kind = parts(argument)
    found, of = parts(name)
    return bool(stem) and bool(found) and kind == of and (found == stem or found in STEMS.get(stem, ()))


def means_upstream(name: str) -> bool:
    return normal(name) in UPSTREAM_NAMES


def option_named(name: str, options: Iterable[str]) -> str | None:
    """The option that a name stands for."""
    for option in options:
        if name == option or normal(name) in OPTIONS.get(option, normal(option)).split():
            return option
    return None


@dataclass
class Matching:
    """Which argument or option each name stands for, and the names that stand for neither."""

    arguments: dict[str, str] = field(default_factory=dict)  # name -> argument of the layer
    options: dict[str, str] = field(default_factory=dict)  # name -> option of the layer
    unknown: list[str] = field(default_factory=list)

    @property
    def sentence(self) -> str:
        """The names that differ from the layer's, as a part of a sentence."""
        return ", ".join(
            name if name == argument else f"{name} = {argument}" for name, argument in self.arguments.items()
        )


def match(names: Sequence[str], arguments: Sequence[str], options: Iterable[str] = ()) -> Matching:
    """Assigns arguments to names: exact names first, then names that can mean only one of what is left."""
    found = Matching()
    left = list(arguments)

    def claim(name: str, argument: str) -> None:
        found.arguments[name] = argument
        left.remove(argument)

    waiting = list(names)
    for name in names:
        exact = next((a for a in left if normal(a) == normal(name)), None)
        if exact is not None:
            claim(name, exact)
            waiting.remove(name)
    for name in list(waiting):
        if UPSTREAM in left and normal(name) in UPSTREAM_NAMES - WEAK_UPSTREAM:
            claim(name, UPSTREAM)
            waiting.remove(name)
    progress = True
    while progress and waiting:
        progress = False
        for name in list(waiting):
            possible = [a for a in left if (means_upstream(name) if a == UPSTREAM else means(name, a))]
            rivals = [a for a in possible if not any(_can(n, a) for n in waiting if n != name)]
            if len(possible) == 1 or len(rivals) == 1:
                claim(name, (possible if len(possible) == 1 else rivals)[0])
                waiting.remove(name)
                progress = True
            elif not possible and (option := option_named(name, options)) is not None:
                found.options[name] = option
                waiting.remove(name)
                progress = True
    for name in waiting:
        first = next((a for a in left if _can(name, a)), None)
        if first is not None:
            claim(name, first)
        else:
            found.unknown.append(name)
    found.arguments = {name: found.arguments[name] for name in names if name in found.arguments}
    return found


def _can(name: str, argument: str) -> bool:
    return means_upstream(name) if argument == UPSTREAM else means(name, argument)


def gradient_named(key: str, gradients: Sequence[str]) -> str | None:
    """The gradient that a key stands for: `dX`, `grad_x`, `x_grad`, `d_x` and `x` are all dx."""
    for gradient in gradients:
        if key == gradient or normal(key) == normal(gradient):
            return gradient
    for rest in _without_gradient_words(key):
        possible = [g for g in gradients if means(rest, g.removeprefix("d"))]
        if len(possible) == 1:
            return possible[0]
    return None


def _without_gradient_words(key: str) -> list[str]:
    patterns = (
        r"(?:d_?l_?d_?|dloss_?d_?)(.+)",
        r"(?:gradients?_|grads?_|g_|d_|delta_)(.+)",
        r"(.+)_(?:gradients?|grads?|g|bar)",
        r"(?:grad|d)(.+)",
        r"(.+)grad",
        r"g([A-Z].*)",
        r"(.+)",
    )
    found = (re.fullmatch(pattern, key, re.IGNORECASE if "A-Z" not in pattern else 0) for pattern in patterns)
    return [one[1] for one in found if one]


# Sizes of a constructor: name -> (argument, axis) in the order of preference, or a constant
_WIDTH = (
    "dim dmodel hiddensize normalizedshape features nembd embeddim width size channels c ndim d nfeatures numfeatures "
    "hidden hiddendim embdim embedsize modeldim dimension nstate n shape hsize featuresize inputsize inputdim"
)
_IN = "infeatures inputdim nin din fanin inputsize indim inchannels insize ninputs inputfeatures nx inputs idim"
_OUT = (
    "outfeatures outputdim nout dout fanout outputsize outdim outchannels outsize noutputs outputfeatures nf units odim"
)
_VOCABULARY = "vocabsize nvocab numembeddings vocab v numtokens vocabularysize numwords ntoken"
_HEAD_DIM = "headdim headsize dk dhead dkey headwidth"
_TOKENS = "blocksize maxlen maxseqlen contextlength nctx npositions seqlen maxlength t maxpositionembeddings tokens"
_INNER = "dff dimfeedforward intermediatesize ninner mlpdim ffdim innerdim dinner hiddenfeatures"
_RATES = "dropout p droprate dropoutp pdrop attnpdrop residpdrop embdpdrop dropoutrate attndropout"


def size_named(name: str, inputs: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """The number that a constructor's parameter of that name stands for, given the inputs; None if unknown."""
    plain = normal(name)
    shapes = {key: tuple(x.shape) for key, x in inputs.items() if getattr(x, "ndim", 0)}
    first = next((shape for shape in shapes.values() if len(shape) >= 3), next(iter(shapes.values()), ()))
    option = option_named(name, options)
    if option is not None:
        return options[option]
    weight = next((s for n, s in shapes.items() if parts(n)[1] == "weight" and len(s) == 2), ())
    if plain in _RATES.split():
        return 0.0
    if plain in ("r", "rank", "lorarank") and "down" in shapes:
        return shapes["down"][1]
    if plain in _VOCABULARY.split() and len(weight) == 2:
        return weight[0]
    if plain in ("embeddingdim", "embeddim", "embdim") and "ids" in shapes and len(weight) == 2:
        return weight[1]
    if plain in _IN.split() and len(weight) == 2:
        return weight[0]
    if plain in _OUT.split() and len(weight) == 2:
        return weight[1]
    if plain in _INNER.split() and "fc_weight" in shapes:
        return shapes["fc_weight"][1]
    if plain in _HEAD_DIM.split():
        wide = next((shapes[n] for n in ("q", "w_q", "x") if n in shapes), first)
        return wide[-1]
    if plain in _TOKENS.split() and len(first) >= 2:
        return first[-2]
    if plain in _WIDTH.split() and first:
        return first[-1]
    return None
