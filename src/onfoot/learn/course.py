"""The exercises in their order: what each asks for, which layer of the checker judges it, what it builds on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onfoot.check.layer import Layer
from onfoot.check.layers import LAYERS
from onfoot.learn.layers import OWN_LAYERS

COURSE = Path(__file__).parent / "course"
SOLUTIONS = COURSE / "solutions"
LEVELS = 3  # of hints


@dataclass(frozen=True, eq=False)
class Part:
    """One function to write, and how it is judged."""

    function: str  # "linear_backward"
    adapter: str  # the entry of `adapters.ADAPTERS` that calls it
    layer_name: str  # of the checker, or of `learn.layers`
    options: Mapping[str, Any] = field(default_factory=dict)  # of the layer
    strict: bool = False  # whether the cases beyond the layer's contract count
    axes: int | None = None  # of its first argument, those of its own: any number may come before; None: no other
    by_name: bool = False  # whether it returns its gradients in a dict
    called_with: str = ""  # arguments that tell two parts with the same function apart

    @property
    def title(self) -> str:
        """The function, and how it is called if that is not the only way."""
        return f"{self.function} with {self.called_with}" if self.called_with else self.function

    @property
    def layer(self) -> Layer:
        """What `onfoot check` knows about it: its forward, its gradients and its mistakes."""
        return OWN_LAYERS[self.layer_name] if self.layer_name in OWN_LAYERS else LAYERS[self.layer_name]


@dataclass(frozen=True, eq=False)
class Exercise:
    """One exercise: a file to complete, a page to read, three hints, and a solution."""

    number: int
    name: str
    title: str
    parts: tuple[Part, ...]
    pages: tuple[str, ...]  # the pages of docs/equations with the derivation, or sections and equations of them
    pairs: tuple[str, ...] = ()  # the pairs of an engine that the solved file provides
    needs: tuple[int, ...] = ()  # the exercises whose files it imports

    @property
    def stem(self) -> str:
        """The name of its files without their suffix, such as e01_linear."""
        return f"e{self.number:02}_{self.name}"

    @property
    def file(self) -> str:
        """The Python file to complete."""
        return f"{self.stem}.py"

    @property
    def derivation(self) -> str:
        """The command that shows the derivation."""
        return f"onfoot learn derivation {self.number}"

    @property
    def functions(self) -> list[str]:
        """The functions to write."""
        return list(dict.fromkeys(part.function for part in self.parts))

    @property
    def files(self) -> tuple[str, str]:
        """What a learner gets: the file to complete, and the page."""
        return self.file, f"{self.stem}.md"

    def hint(self, level: int) -> str:
        """The hint of that level, 1 to 3."""
        text = (COURSE / f"{self.stem}.hints.md").read_text(encoding="utf-8")
        _, *hints = text.split("\n## ")
        return hints[level - 1].partition("\n")[2].strip()


# The exercises of the course, in its order.
EXERCISES: tuple[Exercise, ...] = (
    Exercise(
        1,
        "linear",
        "a product and a bias",
        (Part("linear_backward", "linear", "linear", axes=1),),
        ("linear.md",),
        ("linear",),
    ),
    Exercise(
        2,
        "activation",
        "ReLU and GELU",
        (
            Part("relu_backward", "relu", "relu", strict=True, axes=1),
            Part("gelu_tanh_backward", "gelu_tanh", "gelu", axes=1),
        ),
        ("activation.md",),
        ("relu", "gelu_tanh"),
    ),
    Exercise(
        3,
        "cross_entropy",
        "softmax and cross-entropy",
        (
            Part("softmax_gradient", "softmax", "softmax", axes=1),
            Part("cross_entropy_backward", "cross_entropy", "loss_with_ignored", strict=True, axes=1),
        ),
        ("README.md#the-softmax", "cross_entropy.md"),
        ("cross_entropy",),
    ),
    Exercise(
        4,
        "embedding",
        "the embedding, and tokens that repeat",
        (Part("embedding_backward", "embedding", "embedding", axes=0),),
        ("embedding.md",),
        ("embedding",),
    ),
    Exercise(
        5,
        "layer_norm",
        "layer norm",
        (Part("layer_norm_backward", "layer_norm", "layer_norm", axes=1),),
        ("layer_norm.md",),
        ("layer_norm",),
    ),
    Exercise(
        6,
        "one_head",
        "one attention head",
        (Part("one_head_backward", "one_head", "attention", {"causal": False}, strict=True, axes=2),),
        ("attention.md",),
        needs=(3,),
    ),
    Exercise(
        7,
        "attention",
        "the mask",
        (
            Part("attention_backward", "attention", "masked_attention", strict=True, axes=2),
            Part(
                "attention_backward",
                "unmasked",
                "masked_attention",
                {"causal": False},
                axes=2,
                called_with="causal=False",
            ),
        ),
        ("attention.md",),
        ("attention",),
        needs=(3, 6),
    ),
    Exercise(
        8,
        "multi_head",
        "several heads",
        (Part("self_attention_backward", "self_attention", "self_attention"),),
        ("attention_head.md",),
        needs=(1, 7),
    ),
    Exercise(
        9,
        "block",
        "a block with skip connections",
        (Part("block_backward", "block", "gpt2_block", by_name=True),),
        ("network.md",),
        needs=(1, 2, 5, 8),
    ),
    Exercise(
        10,
        "tied",
        "the tied head",
        (Part("tied_backward", "tied", "tied_embedding"),),
        ("network.md",),
        needs=(1, 4),
    ),
    Exercise(
        11,
        "gpt2",
        "the whole GPT-2",
        (Part("gpt2_backward", "gpt2", "gpt2", by_name=True),),
        ("network.md",),
        needs=(1, 3, 4, 5, 9),
    ),
    Exercise(
        12,
        "lora",
        "LoRA",
        (
            Part("lora_backward", "lora", "lora", axes=1),
            Part("lora_linear_backward", "lora_linear", "lora", axes=1),
        ),
        ("lora.md",),
        ("lora", "lora_linear"),
        needs=(1,),
    ),
    Exercise(
        13,
        "kv_cache",
        "the KV cache",
        (Part("cached_attention", "kv_cache", "kv_cache"),),
        ("attention.md",),
        needs=(1, 7, 8),
    ),
    Exercise(
        14,
        "rms_norm",
        "RMS norm",
        (Part("rms_norm_backward", "rms_norm", "rms_norm", axes=1),),
        ("rms_norm.md",),
        ("rms_norm",),
    ),
    Exercise(
        15,
        "rope",
        "rotary positions",
        (Part("rope_backward", "rope", "rope", axes=2),),
        ("rope.md",),
        ("rope",),
    ),
    Exercise(
        16,
        "swiglu",
        "SwiGLU",
        (Part("swiglu_backward", "swiglu", "swiglu", axes=1),),
        ("swiglu.md",),
        ("swiglu",),
    ),
    Exercise(
        17,
        "grouped_query",
        "grouped queries",
        (Part("grouped_query_backward", "grouped_query", "grouped_query"),),
        ("grouped_query.md",),
        ("grouped_query",),
        needs=(7,),
    ),
    Exercise(
        18,
        "adamw",
        "AdamW",
        (Part("adamw_update", "adamw", "adamw"),),
        ("optimizer.md",),
    ),
    Exercise(
        19,
        "tangents",
        "tangents, the derivative forwards",
        (
            Part("linear_tangent", "linear_tangent", "linear_tangent", axes=1),
            Part("softmax_tangent", "softmax_tangent", "softmax_tangent", axes=1),
            Part("layer_norm_tangent", "layer_norm_tangent", "layer_norm_tangent", axes=1),
        ),
        (
            "README.md#second-order",
            "linear.md#eq-fc-5",
            "attention.md#eq-att-4",
            "layer_norm.md#eq-ln-1",
            "layer_norm.md#eq-ln-2",
            "layer_norm.md#eq-ln-3",
        ),
        needs=(1,),
    ),
)


def foundations(exercise: Exercise) -> list[Exercise]:
    """The exercises that it is built from, directly or through others, in the order of the course."""
    found: set[int] = set()
    open_ones = [*exercise.needs]
    while open_ones:
        number = open_ones.pop()
        if number not in found:
            found.add(number)
            open_ones += get_exercise(number).needs
    return [get_exercise(number) for number in sorted(found)]


def find_exercise(name: str) -> Exercise:
    """The exercise of that number, name (`linear`) or file; raises a ValueError that says which there are."""
    chosen = name.removesuffix(".py").removesuffix(".md")
    if chosen.lstrip("-").isdecimal():
        return get_exercise(int(chosen))
    for exercise in EXERCISES:
        if chosen in (exercise.name, exercise.stem):
            return exercise
    raise ValueError(
        f"there is no exercise {name!r}; give a number from 1 to {EXERCISES[-1].number}, or one of "
        f"{', '.join(one.name for one in EXERCISES)}"
    )


def get_exercise(number: int) -> Exercise:
    """The exercise of that number; raises a ValueError that says which there are."""
    for exercise in EXERCISES:
        if exercise.number == number:
            return exercise
    raise ValueError(f"there is no exercise {number}; they are numbered 1 to {EXERCISES[-1].number}")
