"""Model configurations: sizes and choices, with the field names of Hugging Face's config.json."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from onfoot.ops.activation import ACTIVATIONS


@dataclass(frozen=True)
class GPT2Config:
    """The GPT-2 family, and what the paper allows beyond it.

    The fields of the first group are Hugging Face's; those of the second are the paper's further choices. `head_dim` is
    d_h, the width of a head's values; `qk_head_dim` is d_ρ, the width of its queries and keys.
    """

    vocab_size: int = 50257
    n_positions: int = 1024
    n_embd: int = 768
    n_layer: int = 12
    n_head: int = 12
    n_inner: int | None = None  # the width between expand and contract; 4 n_embd if None
    activation_function: str = "gelu_new"
    layer_norm_epsilon: float = 1e-5
    initializer_range: float = 0.02
    embd_pdrop: float = 0.0  # dropout acts only in training, and only where a seed is given for it
    attn_pdrop: float = 0.0
    resid_pdrop: float = 0.0
    tie_word_embeddings: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | None = None

    lm_head_bias: bool = False
    head_dim: int | None = None  # n_embd / n_head if None
    qk_head_dim: int | None = None  # head_dim if None
    causal: bool = True

    model_type = "gpt2"

    def __post_init__(self) -> None:
        for name in ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "n_inner", "head_dim", "qk_head_dim"):
            value = getattr(self, name)
            if value is None and name in ("n_inner", "head_dim", "qk_head_dim"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r}: a whole number of at least 1 is needed")
        if self.head_dim is None and self.n_embd % self.n_head:
            raise ValueError(
                f"n_embd={self.n_embd} is not divisible by n_head={self.n_head}; "
                f"change one of them, or give head_dim (the width of a head) explicitly"
            )
        if self.activation_function not in ACTIVATIONS:
            raise ValueError(
                f"unknown activation_function {self.activation_function!r}; known are {', '.join(ACTIVATIONS)}"
            )
        for name in ("embd_pdrop", "attn_pdrop", "resid_pdrop"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} is not in [0, 1)")
        if not self.layer_norm_epsilon > 0:
            raise ValueError(
                f"layer_norm_epsilon={self.layer_norm_epsilon} must be above 0: a constant row would divide by 0"
            )
        if self.tie_word_embeddings and self.lm_head_bias:
            raise ValueError("lm_head_bias=True needs tie_word_embeddings=False: tied logits have no bias")

    @property
    def value_width(self) -> int:
        """d_h, the width of one head's values."""
        return self.head_dim if self.head_dim is not None else self.n_embd // self.n_head

    @property
    def key_width(self) -> int:
        """d_ρ, the width of one head's queries and keys."""
        return self.qk_head_dim if self.qk_head_dim is not None else self.value_width

    @property
    def inner_width(self) -> int:
        """The width between expand and contract."""
        return self.n_inner if self.n_inner is not None else 4 * self.n_embd

    def to_dict(self) -> dict[str, Any]:
        return {"model_type": self.model_type, **asdict(self)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> GPT2Config:
        """The configuration in a dict such as config.json holds; fields that are not ours are left aside."""
        known = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in known})


PRESETS: dict[str, GPT2Config] = {
    "gpt2": GPT2Config(),
    "gpt2-medium": GPT2Config(n_embd=1024, n_layer=24, n_head=16),
    "gpt2-large": GPT2Config(n_embd=1280, n_layer=36, n_head=20),
    "gpt2-xl": GPT2Config(n_embd=1600, n_layer=48, n_head=25),
    "paper": GPT2Config(n_layer=1, tie_word_embeddings=False, lm_head_bias=True),  # Table 2: one block
    "paper-12": GPT2Config(n_layer=12, tie_word_embeddings=False, lm_head_bias=True),
}


def preset(name: str, **changes: Any) -> GPT2Config:
    """A configuration by name, with changes: `preset("gpt2", n_layer=2)`."""
    if name not in PRESETS:
        raise ValueError(f"unknown preset {name!r}; known are {', '.join(PRESETS)}")
    return replace(PRESETS[name], **changes)
