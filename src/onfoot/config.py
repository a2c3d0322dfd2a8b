"""Model configurations, with the field names of Hugging Face's config.json."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from onfoot.formats.files import shown
from onfoot.ops.activation import ACTIVATIONS

MAX_SIZE = 2**31 - 1
MAX_LAYERS = 10_000  # every layer adds named tensors
LARGEST_FLOAT = 1e38  # within float32
# RoPE scalings. "linear" divides all frequencies by the factor; "llama3" only the low ones, with a smooth transition;
# "dynamic" lowers them for sequences longer than max_position_embeddings, the more the longer.
SCALINGS = ("linear", "llama3", "dynamic")
LAYER_TYPES = ("full_attention", "sliding_attention")
# LLaMA and its relatives, with the biases that are not a choice.
FIXED_BIASES: dict[str, tuple[str, ...]] = {
    "llama": (),
    "mistral": ("attention_bias", "mlp_bias"),
    "qwen2": ("attention_bias", "mlp_bias"),
    "qwen3": ("mlp_bias",),
}
# What transformers assumes for fields that a config.json leaves out, where LLaMA's values differ.
_QWEN = {
    "vocab_size": 151936, "intermediate_size": 22016, "max_position_embeddings": 32768, "num_hidden_layers": 32,
    "num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28,
}  # fmt: skip
FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {
    "mistral": {
        "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096,
        "bos_token_id": 1, "eos_token_id": 2,
    },
    "qwen2": _QWEN,
    "qwen3": {**_QWEN, "head_dim": 128},
}  # fmt: skip


def _check_integers(config: Any, names: tuple[str, ...], optional: tuple[str, ...] = ()) -> None:
    """Raises ValueError unless each size is an integer from 1 to its limit."""
    for name in (*names, *optional):
        value = getattr(config, name)
        if value is None and name in optional:
            continue
        limit = MAX_LAYERS if name in ("n_layer", "num_hidden_layers") else MAX_SIZE
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be an integer >= 1, got {shown(value)}")
        if value > limit:
            raise ValueError(f"{name} must be <= {limit:,}, got {shown(value)}")


def _check_floats(config: Any, names: tuple[str, ...]) -> None:
    for name in names:
        value = getattr(config, name)
        # false for NaN; unlike math.isfinite, works for integers too large for a float
        finite = isinstance(value, int | float) and -LARGEST_FLOAT <= value <= LARGEST_FLOAT
        if isinstance(value, bool) or not finite:
            raise ValueError(f"{name} must be a finite number, got {shown(value)}")


def _check_flags(config: Any, names: tuple[str, ...]) -> None:
    for name in names:
        if not isinstance(getattr(config, name), bool):
            raise ValueError(f"{name} must be true or false, got {shown(getattr(config, name))}")


def _check_token_ids(config: Any) -> None:
    """Raises ValueError unless bos_token_id is an id or None, and eos_token_id an id, several ids or None."""
    if isinstance(config.eos_token_id, list):
        object.__setattr__(config, "eos_token_id", tuple(config.eos_token_id))
    eos_ids = config.eos_token_id if isinstance(config.eos_token_id, tuple) else (config.eos_token_id,)
    for name, value in (("bos_token_id", config.bos_token_id), *(("eos_token_id", value) for value in eos_ids)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or abs(value) > MAX_SIZE):
            raise ValueError(f"{name} must be a token id, got {shown(value)}")


def _as_tuple(ids: int | tuple[int, ...] | None) -> tuple[int, ...]:
    return ids if isinstance(ids, tuple) else () if ids is None else (ids,)


@dataclass(frozen=True)
class GPT2Config:
    """The configuration of a GPT-2 model, with the extensions of the paper.

    The first group of fields is Hugging Face's, the second the paper's. `head_dim` is d_h, the size of a head's values;
    `qk_head_dim` is d_ρ, the size of its queries and keys.
    """

    vocab_size: int = 50257  # number of tokens
    n_positions: int = 1024  # the context: the longest sequence
    n_embd: int = 768  # d, the width of the network
    n_layer: int = 12  # number of blocks
    n_head: int = 12  # attention heads per block
    n_inner: int | None = None  # MLP hidden size; 4 n_embd if None
    activation_function: str = "gelu_new"  # of the MLP; ACTIVATIONS has all
    layer_norm_epsilon: float = 1e-5  # ε of the layer norms
    initializer_range: float = 0.02  # standard deviation of new weights
    embd_pdrop: float = 0.0  # dropout is applied only in training, and only with a dropout seed
    attn_pdrop: float = 0.0  # of the attention weights
    resid_pdrop: float = 0.0  # of what a branch adds to its skip connection
    tie_word_embeddings: bool = True  # the logits use the token table
    bos_token_id: int | None = None  # begins a text
    eos_token_id: int | tuple[int, ...] | None = None  # ends a text

    lm_head_bias: bool = False  # a bias of the logits
    head_dim: int | None = None  # n_embd / n_head if None
    qk_head_dim: int | None = None  # head_dim if None
    causal: bool = True  # a token attends to itself and the tokens before it

    model_type = "gpt2"

    def __post_init__(self) -> None:
        _check_integers(
            self, ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head"), ("n_inner", "head_dim", "qk_head_dim")
        )
        if self.head_dim is None and self.n_embd % self.n_head:
            raise ValueError(
                f"n_embd={self.n_embd} is not divisible by n_head={self.n_head}; "
                f"change one of them, or set head_dim (the size of a head)"
            )
        if not isinstance(self.activation_function, str) or self.activation_function not in ACTIVATIONS:
            raise ValueError(
                f"unknown activation_function {shown(self.activation_function)}; choose from {', '.join(ACTIVATIONS)}"
            )
        _check_floats(self, ("embd_pdrop", "attn_pdrop", "resid_pdrop", "layer_norm_epsilon", "initializer_range"))
        _check_flags(self, ("tie_word_embeddings", "lm_head_bias", "causal"))
        _check_token_ids(self)
        for name in ("embd_pdrop", "attn_pdrop", "resid_pdrop"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be in [0, 1), got {getattr(self, name)}")
        if not self.layer_norm_epsilon > 0:
            raise ValueError(
                f"layer_norm_epsilon must be > 0, got {self.layer_norm_epsilon}: a constant row would divide by 0"
            )
        if self.tie_word_embeddings and self.lm_head_bias:
            raise ValueError("lm_head_bias=True requires tie_word_embeddings=False: tied logits have no bias")

    @property
    def value_width(self) -> int:
        """d_h, the size of one head's values."""
        return self.head_dim if self.head_dim is not None else self.n_embd // self.n_head

    @property
    def key_width(self) -> int:
        """d_ρ, the size of one head's queries and keys."""
        return self.qk_head_dim if self.qk_head_dim is not None else self.value_width

    @property
    def n_kv_head(self) -> int:
        """The number of key/value heads: one per query head."""
        return self.n_head

    @property
    def inner_width(self) -> int:
        """The MLP hidden size."""
        return self.n_inner if self.n_inner is not None else 4 * self.n_embd

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The ids of the end-of-text tokens."""
        return _as_tuple(self.eos_token_id)

    def to_dict(self) -> dict[str, Any]:
        """The fields as in config.json."""
        return {"model_type": self.model_type, **asdict(self)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> GPT2Config:
        """The configuration from a dict such as config.json; unknown fields are ignored."""
        known = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in known})


@dataclass(frozen=True)
class RopeScaling:
    """Scaling of the rotary frequencies for contexts longer than those of pretraining."""

    rope_type: str  # one of SCALINGS
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def __post_init__(self) -> None:
        if not isinstance(self.rope_type, str) or self.rope_type not in SCALINGS:
            raise ValueError(
                f"rope scaling {shown(self.rope_type)} is not supported; choose from {', '.join(SCALINGS)}"
            )
        _check_floats(self, ("factor", "low_freq_factor", "high_freq_factor"))
        _check_integers(self, ("original_max_position_embeddings",))
        if not self.factor >= 1:
            raise ValueError(f"rope scaling: factor must be >= 1, got {self.factor}")
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"rope scaling: low_freq_factor={self.low_freq_factor} must be above 0 and below "
                f"high_freq_factor={self.high_freq_factor}"
            )

    @classmethod
    def from_dict(cls, values: dict[str, Any] | None, max_position_embeddings: Any) -> RopeScaling | None:
        """The scaling from config.json's rope_scaling or rope_parameters; None if there is none."""
        if values is None:
            return None
        if not isinstance(values, dict):
            raise ValueError(f"rope scaling must be an object with a rope_type, got {shown(values)}")
        rope_type = values.get("rope_type", values.get("type", "default"))
        if values.get("partial_rotary_factor", 1) != 1:
            raise ValueError(f"partial_rotary_factor={shown(values['partial_rotary_factor'])} is not supported, only 1")
        if rope_type in ("default", None):
            return None
        known = {field.name for field in fields(cls)}
        given = {name: value for name, value in values.items() if name in known}
        if "factor" not in given and rope_type in SCALINGS:
            raise ValueError(f"rope scaling {shown(rope_type)} requires a factor")
        if rope_type == "llama3":
            given.setdefault("original_max_position_embeddings", max_position_embeddings)  # as in transformers
        return cls(**{"factor": 1.0, **given, "rope_type": rope_type})


@dataclass(frozen=True)
class LlamaConfig:
    """The configuration of a LLaMA or SmolLM2 model, or of one of its relatives, named by `model_type`.

    "mistral" is the same network with a sliding window. "qwen2" has biases on queries, keys and values only, "qwen3" an
    RMS norm of each head's queries and keys; both may have a sliding window in some layers.
    """

    vocab_size: int = 32000  # number of tokens
    hidden_size: int = 4096  # d, the width of the network
    intermediate_size: int = 11008  # MLP hidden size
    num_hidden_layers: int = 32  # number of blocks
    num_attention_heads: int = 32  # query heads per block
    num_key_value_heads: int | None = None  # num_attention_heads if None, else a divisor of it
    head_dim: int | None = None  # hidden_size / num_attention_heads if None
    max_position_embeddings: int = 2048  # the context: the longest sequence
    rms_norm_eps: float = 1e-6  # ε of the RMS norms
    initializer_range: float = 0.02  # standard deviation of new weights
    rope_theta: float = 10000.0  # the base of the rotary frequencies
    rope_scaling: RopeScaling | None = None  # or a dict as in config.json
    attention_bias: bool = False  # on queries, keys, values and the output projection
    mlp_bias: bool = False  # on the three layers of the MLP
    sliding_window: int | None = None  # a token attends to itself and the tokens before it, so many in all
    layer_types: tuple[str, ...] | None = None  # which layers have the sliding window; all if None
    attention_dropout: float = 0.0  # of the attention weights, in training only
    tie_word_embeddings: bool = False  # the logits use the token table
    bos_token_id: int | None = None  # begins a text
    eos_token_id: int | tuple[int, ...] | None = None  # some models have several
    model_type: str = "llama"  # llama, mistral, qwen2 or qwen3

    causal = True
    activation_function = "swiglu"

    def __post_init__(self) -> None:
        if not isinstance(self.rope_scaling, RopeScaling):
            scaling = RopeScaling.from_dict(self.rope_scaling, self.max_position_embeddings)
            object.__setattr__(self, "rope_scaling", scaling)
        _check_integers(
            self,
            ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
             "max_position_embeddings"),
            ("num_key_value_heads", "head_dim", "sliding_window"),
        )  # fmt: skip
        _check_floats(self, ("rms_norm_eps", "initializer_range", "rope_theta", "attention_dropout"))
        _check_flags(self, ("attention_bias", "mlp_bias", "tie_word_embeddings"))
        _check_token_ids(self)
        if not isinstance(self.model_type, str) or self.model_type not in FIXED_BIASES:
            raise ValueError(
                f"model_type {shown(self.model_type)} is not supported; choose from {', '.join(FIXED_BIASES)}"
            )
        fixed = FIXED_BIASES[self.model_type]
        if any(getattr(self, name) for name in fixed):
            raise ValueError(f"model_type {self.model_type!r} has fixed biases: leave {' and '.join(fixed)} False")
        self._check_window()
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} is not divisible by num_attention_heads={self.num_attention_heads}; "
                f"change one of them, or set head_dim (the size of a head)"
            )
        if self.key_width % 2:
            raise ValueError(f"a head size of {self.key_width} is odd: RoPE rotates pairs of features")
        if self.num_attention_heads % self.n_kv_head:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} is not divisible by "
                f"num_key_value_heads={self.num_key_value_heads}: query heads share key/value heads in equal groups"
            )
        if not 0 <= self.attention_dropout < 1:
            raise ValueError(f"attention_dropout must be in [0, 1), got {self.attention_dropout}")
        for name in ("rms_norm_eps", "rope_theta"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be > 0, got {getattr(self, name)}")
        if self.rope_scaling is not None and self.rope_scaling.rope_type == "dynamic":
            if self.key_width == 2:
                raise ValueError("rope scaling 'dynamic' needs a head size of at least 4, got 2")
            scaling = replace(self.rope_scaling, original_max_position_embeddings=self.max_position_embeddings)
            object.__setattr__(self, "rope_scaling", scaling)

    def _check_window(self) -> None:
        """Raises ValueError unless the sliding window and its layers fit together."""
        if self.model_type == "llama" and self.sliding_window is not None:
            raise ValueError("model_type 'llama' has no sliding window; choose model_type 'mistral'")
        if self.layer_types is None:
            return
        kinds = self.layer_types
        if not isinstance(kinds, list | tuple) or not all(
            isinstance(kind, str) and kind in LAYER_TYPES for kind in kinds
        ):
            raise ValueError(f"layer_types {shown(kinds)} are not supported, only {' and '.join(LAYER_TYPES)}")
        object.__setattr__(self, "layer_types", tuple(kinds))
        if len(kinds) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types must have one entry per layer; got {len(kinds)}, but "
                f"num_hidden_layers={self.num_hidden_layers}"
            )
        if "sliding_attention" in kinds and self.sliding_window is None:
            raise ValueError("layer_types has sliding_attention, but sliding_window is not set")
        if len(set(kinds)) == 1:  # all layers are alike
            object.__setattr__(self, "layer_types", None)
            object.__setattr__(self, "sliding_window", self.sliding_window if kinds[0] == "sliding_attention" else None)

    def window(self, layer: int) -> int | None:
        """The size of a layer's sliding window; None: its tokens attend to all tokens before them."""
        full = self.layer_types is not None and self.layer_types[layer] == "full_attention"
        return None if full else self.sliding_window

    @property
    def qk_norm(self) -> bool:
        """Whether queries and keys have an RMS norm."""
        return self.model_type == "qwen3"

    # The same sizes under the names common to all model families.

    @property
    def n_positions(self) -> int:
        """The longest sequence; dynamic RoPE scaling stretches that of pretraining by its factor."""
        if self.rope_scaling is not None and self.rope_scaling.rope_type == "dynamic":
            return int(self.max_position_embeddings * self.rope_scaling.factor)
        return self.max_position_embeddings

    @property
    def n_embd(self) -> int:
        """The width of the network."""
        return self.hidden_size

    @property
    def n_layer(self) -> int:
        """The number of blocks."""
        return self.num_hidden_layers

    @property
    def n_head(self) -> int:
        """The number of query heads."""
        return self.num_attention_heads

    @property
    def n_kv_head(self) -> int:
        """The number of key/value heads; n_head / n_kv_head query heads share one."""
        return self.num_key_value_heads if self.num_key_value_heads is not None else self.num_attention_heads

    @property
    def value_width(self) -> int:
        """The size of one head's values."""
        return self.head_dim if self.head_dim is not None else self.hidden_size // self.num_attention_heads

    @property
    def key_width(self) -> int:
        """The size of one head's queries and keys."""
        return self.value_width

    @property
    def inner_width(self) -> int:
        """The MLP hidden size."""
        return self.intermediate_size

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The ids of the end-of-text tokens."""
        return _as_tuple(self.eos_token_id)

    def to_dict(self) -> dict[str, Any]:
        """The fields as in config.json."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> LlamaConfig:
        """The configuration from a dict such as config.json; unknown fields are ignored."""
        known = {field.name for field in fields(cls)}
        model_type = values.get("model_type")
        defaults = FAMILY_DEFAULTS.get(model_type, {}) if isinstance(model_type, str) else {}
        given = {name: value for name, value in (defaults | values).items() if name in known}
        if model_type in ("qwen2", "qwen3"):
            given |= _qwen_window({**defaults, **values})
        else:
            given.pop("layer_types", None)  # all layers are alike
        if model_type == "llama":
            given.pop("sliding_window", None)  # ignored, as in transformers
        rope = values.get("rope_parameters")  # transformers 5: rope_theta and rope_scaling in one field
        if rope is not None:
            if not isinstance(rope, dict):
                raise ValueError(f"rope_parameters must be an object, got {shown(rope)}")
            given["rope_theta"] = rope.get("rope_theta", given.get("rope_theta", cls.rope_theta))
            given["rope_scaling"] = rope
        return cls(**given)


def _qwen_window(values: dict[str, Any]) -> dict[str, Any]:
    """The sliding window of a Qwen model: its fields count only with use_sliding_window."""
    used = values.get("use_sliding_window", False)
    if not isinstance(used, bool):
        raise ValueError(f"use_sliding_window must be true or false, got {shown(used)}")
    if not used:
        return {"sliding_window": None}
    first, layers, kinds = values["max_window_layers"], values["num_hidden_layers"], values.get("layer_types")
    if kinds is None and type(first) is int and type(layers) is int and layers <= MAX_LAYERS:
        kinds = [LAYER_TYPES[i >= first] for i in range(layers)]
    return {"layer_types": kinds}


Config = GPT2Config | LlamaConfig

# The sizes of GPT-2 by name, as `onfoot table --preset gpt2` takes them.
PRESETS: dict[str, GPT2Config] = {
    "gpt2": GPT2Config(),
    "gpt2-medium": GPT2Config(n_embd=1024, n_layer=24, n_head=16),
    "gpt2-large": GPT2Config(n_embd=1280, n_layer=36, n_head=20),
    "gpt2-xl": GPT2Config(n_embd=1600, n_layer=48, n_head=25),
    "paper": GPT2Config(n_layer=1, tie_word_embeddings=False, lm_head_bias=True),  # Table 2: one block
    "paper-12": GPT2Config(n_layer=12, tie_word_embeddings=False, lm_head_bias=True),
}


def preset(name: str, **changes: Any) -> GPT2Config:
    """The configuration of that name, with changed fields: `preset("gpt2", n_layer=2)`."""
    if name not in PRESETS:
        raise ValueError(f"unknown preset {name!r}; choose from {', '.join(PRESETS)}")
    return replace(PRESETS[name], **changes)
