"""Whether a model is what the options say: a `Trainer` trains the model and the data that it is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from onfoot.models.adapters import match_layers
from onfoot.models.model import Model
from onfoot.own_engine import OwnEngine, is_own
from onfoot.quantized import QuantizedWeight, frozen_weight
from onfoot.train.options import FinetuneOptions, TrainingOptions, TrainOptions

LOAD = "onfoot.load(path, …)"
ADAPTER = "model.add_lora(…)"
MADE_BY = {"dtype": LOAD, "engine": LOAD, "quantized": LOAD, "full": "model.use_adapter(None)"}  # others: the adapter
FILES = ("model", "data")  # of `onfoot finetune`
EXAMPLES = ("epochs", "validation_data", "max_length", "on_long", "row_length", "template", "pack")


def changed(options: TrainingOptions, names: Sequence[str]) -> list[str]:
    """Those of the fields that differ from their default."""
    known = {f.name: f.default for f in fields(options)}
    return [n for n in names if n in known and getattr(options, n) != known[n] and getattr(options, n) != []]


def check_options(options: Any, model: Model, reads: bool) -> None:
    """Raises ValueError for options that a trainer cannot honour; with `reads`, it makes the source itself."""
    if options is None:
        return
    if not isinstance(options, TrainingOptions):
        raise ValueError(
            f"options must be onfoot.TrainingOptions or onfoot.FinetuneOptions, got {type(options).__name__}; "
            f"callbacks are the argument after it"
        )
    if reads and isinstance(options, TrainOptions):
        raise ValueError("TrainOptions are those of the command onfoot train; pass onfoot.TrainingOptions")
    found = changed(options, FILES) if reads else []
    if found:
        raise ValueError(
            f"{found[0]}={getattr(options, found[0])!r} is for the command onfoot finetune; a Trainer is given its "
            f"{found[0]}: Trainer(model, data, options)"
        )
    check_model(options, model)


def check_text(options: TrainingOptions) -> None:
    """Raises ValueError for an option that text does not have."""
    found = changed(options, EXAMPLES) if isinstance(options, FinetuneOptions) else []
    if found:
        raise ValueError(f"{found[0]}={getattr(options, found[0])!r} is for examples, and this data is text")


def check_model(options: TrainingOptions, model: Model) -> None:
    """Raises ValueError for an option that differs from its default, and from what the model is."""
    adapter = None if model.active_adapter is None else model.adapters[model.active_adapter]
    # an own engine is NumPy's formulas for what it does not have
    own = isinstance(model.engine, OwnEngine) and (is_own(options.engine) or options.engine == "numpy")
    is_now: dict[str, Any] = {
        "dtype": model.dtype,
        "engine": options.engine if own else model.engine.name,
        "quantized": any(isinstance(frozen_weight(p), QuantizedWeight) for p in model.params.values()),
        "full": adapter is None,
    }
    of_adapter = ("r", "alpha", "lora_dropout", "use_rslora", "targets")
    if adapter is None and not getattr(options, "full", False):
        is_now |= dict.fromkeys((*of_adapter, "lora_plus"))
    elif adapter is not None and isinstance(options, FinetuneOptions):
        one = next(iter(adapter.layers.values()))
        is_now |= {"r": one.r, "alpha": one.alpha, "lora_dropout": one.dropout, "use_rslora": one.use_rslora}
        same = set(match_layers(model, options.target_list)) == set(adapter.layers)
        is_now["targets"] = options.targets if same else ", ".join(adapter.layers)
    if adapter is not None and options.optimizer == "muon":
        raise ValueError(
            "optimizer='muon' is for the matrices of the blocks, which this model's LoRA layers leave frozen; choose "
            "adamw, or train all weights with model.use_adapter(None)"
        )
    for name in changed(options, list(is_now)):
        given, now = getattr(options, name), is_now[name]
        if given != now:
            has = "no adapter" if now is None else f"{name}={now!r}"
            raise ValueError(
                f"{name}={given!r}, but this model has {has}; a Trainer trains the model as it is: "
                f"{MADE_BY.get(name, ADAPTER)} makes another"
            )
