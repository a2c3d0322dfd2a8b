"""LoRA on a model, against PEFT on the same GPT-2."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

import onfoot
from onfoot.models.model import Model
from onfoot.models.params import shapes
from oracles import assert_close, directional_difference, scrambled

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # PEFT's, about tied heads and layouts
CONFIG = onfoot.GPT2Config(vocab_size=29, n_positions=16, n_embd=12, n_layer=2, n_head=3)
TOKENS = np.random.default_rng(0).integers(0, 29, (2, 9))
EVERYWHERE = ["c_attn", "c_proj", "c_fc", "lm_head"]
PARTS = ["c_attn.q", "c_attn.k", "c_attn.v", "c_proj", "c_fc", "lm_head"]


def base(dtype: str = "float64", config: onfoot.GPT2Config = CONFIG, engine: str = "numpy") -> Model:
    return Model(config, scrambled(onfoot.create(config).params, 0), dtype, engine)


def away_from_start(model: Model, seed: int = 1) -> Model:
    """Adapter weights that are not at their initial values: B is not 0."""
    rng = np.random.default_rng(seed)
    for name in sorted(model.trainable):
        model.params[name] = model.engine.floats(rng.normal(0, 0.3, tuple(model.params[name].shape)), model.dtype)
    return model


def with_peft(model: Model, folder: Path, **settings: Any) -> Any:
    """The same base in transformers, under the same LoRA by PEFT, with the same weights."""
    model.use_adapter(None)
    model.save(folder)
    model.use_adapter("default")
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    theirs = get_peft_model(theirs, LoraConfig(task_type="CAUSAL_LM", fan_in_fan_out=True, **settings)).to(
        torch.float64
    )
    state = {f"base_model.model.{name}": torch.tensor(np.asarray(model.params[name])) for name in model.trainable}
    missing = theirs.load_state_dict(state, strict=False)
    assert not missing.unexpected_keys
    return theirs.eval()


def loss_and_grads(theirs: Any) -> tuple[float, dict[str, np.ndarray]]:
    tokens = torch.tensor(TOKENS)
    logits = theirs(tokens).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    grads = {name: p.grad.numpy() for name, p in theirs.named_parameters() if p.grad is not None}
    return loss.item(), {name.removeprefix("base_model.model."): g for name, g in grads.items()}


@pytest.mark.parametrize("engine", ["numpy", "torch"])
@pytest.mark.parametrize("use_rslora", [False, True])
@pytest.mark.parametrize("targets", [EVERYWHERE, ["c_attn"], ["c_fc"], ["c_proj"], ["lm_head"]], ids=str)
def test_loss_and_every_adapter_gradient_equal_pefts(
    tmp_path: Path, targets: list[str], use_rslora: bool, engine: str
) -> None:
    model = base(engine=engine)
    model.add_lora(r=3, alpha=5, targets=targets, use_rslora=use_rslora)
    away_from_start(model)
    theirs = with_peft(model, tmp_path, r=3, lora_alpha=5, target_modules=targets, use_rslora=use_rslora)
    expected_loss, expected = loss_and_grads(theirs)
    loss, grads = model.loss_and_grads(TOKENS)
    assert loss == pytest.approx(expected_loss, rel=1e-12)
    assert set(grads) == set(expected) == model.trainable
    for name, grad in grads.items():
        assert_close(np.asarray(grad), expected[name], 1e-10, name)


@pytest.mark.parametrize("targets", [EVERYWHERE, PARTS], ids=str)
def test_gradients_agree_with_a_finite_difference_with_dropout_on(targets: list[str]) -> None:
    model = base()
    model.add_lora(r=2, alpha=3, targets=targets, dropout=0.3)
    away_from_start(model)
    _, grads = model.loss_and_grads(TOKENS, dropout_seed=3)
    names = sorted(grads)
    start = [model.params[n] for n in names]
    rng = np.random.default_rng(2)
    directions = [rng.normal(size=p.shape) for p in start]

    def loss(*values: np.ndarray) -> Any:
        model.params.update(zip(names, values, strict=True))
        return model.loss_and_grads(TOKENS, dropout_seed=3)[0]

    slope = directional_difference(loss, start, directions, 1.0, 1e-4)
    by_hand = sum(float((grads[n] * d).sum()) for n, d in zip(names, directions, strict=True))
    assert slope == pytest.approx(by_hand, rel=1e-7)


def test_at_the_start_nothing_changes_and_the_error_signal_passes_the_frozen_layers() -> None:
    model = base()
    before = model.logits(TOKENS)
    model.add_lora(r=2, alpha=4, targets=EVERYWHERE)
    assert (model.logits(TOKENS) == before).all()  # u = 0
    _, grads = model.loss_and_grads(TOKENS)
    for name, grad in grads.items():
        assert np.any(grad) == ("lora_B" in name)  # ∂d = 0 because u = 0; ∂u is not
    trace = model.trace(TOKENS)
    for block in trace.blocks:  # Δ below every adapted layer: the frozen path carries it
        for i in range(1, 11):
            assert np.linalg.norm(block.delta[i]) > 1e-6
    assert np.linalg.norm(trace.delta[11]) > 1e-6


@pytest.mark.parametrize(
    ("targets", "reached"),
    [
        (["lm_head"], 0),
        (["transformer.h.1.mlp.c_proj"], 4),
        (["transformer.h.1.attn.c_attn"], 4),
        (["transformer.h.0.mlp.c_proj", "lm_head"], 8),
    ],
    ids=str,
)
def test_nothing_is_computed_below_the_lowest_block_that_trains(targets: list[str], reached: int) -> None:
    model = base()
    model.add_lora(r=1, alpha=1, targets=targets)
    away_from_start(model)
    calls: list[str] = []

    def counted(name: str) -> Any:
        def backward(dy: Any, saved: Any) -> Any:
            calls.append(name)
            return table[name](dy, saved)

        return backward

    table = model.engine.table
    model.engine.table = {**table, **{n: counted(n) for n in table if n.endswith("_backward")}}
    _, grads = model.loss_and_grads(TOKENS)
    assert set(grads) == model.trainable
    linears = [c for c in calls if c in ("frozen_linear_backward", "lora_linear_backward")]
    assert len(linears) == 1 + reached  # the head, and those of the blocks down to the lowest that trains
    assert "linear_backward" not in calls and "embedding_backward" not in calls


def test_parts_of_c_attn_are_a_whole_companion_in_blocks(tmp_path: Path) -> None:
    model = base()
    model.add_lora(r=2, alpha=3, targets=PARTS)
    away_from_start(model)
    logits = model.logits(TOKENS)
    model.save_adapter(tmp_path / "adapter")
    again = base()
    again.load_adapter(tmp_path / "adapter")
    assert again.adapters["default"].layers["transformer.h.0.attn.c_attn"].r == 6
    assert_close(again.logits(TOKENS), logits, 1e-12)
    model.use_adapter(None)
    model.save(tmp_path / "base")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float64)
    theirs = PeftModel.from_pretrained(theirs, tmp_path / "adapter").to(torch.float64)
    assert_close(theirs(torch.tensor(TOKENS)).logits.detach().numpy(), logits, 1e-10)


def live_count(preset: str, targets: list[str]) -> int:
    """The numbers in the arrays that an adapter of rank 16 adds to a model of this size."""
    config = onfoot.preset(preset)
    model = Model(config, {name: np.zeros(shape, np.float32) for name, shape in shapes(config).items()}, "float32")
    model.add_lora(r=16, alpha=16, targets=targets)
    return sum(array.size for name, array in model.params.items() if ".lora_" in name)


class Layers(torch.nn.Module):
    """The layers of GPT-2 small with queries, keys and values apart, for PEFT to count."""

    def __init__(self, n_blocks: int, d: int = 768, n_vocab: int = 50_257) -> None:
        super().__init__()
        widths = [(d, d)] * 4 + [(d, 4 * d), (4 * d, d)]
        self.layers = torch.nn.ModuleList([torch.nn.Linear(*both) for both in widths * n_blocks])
        self.logits = torch.nn.Linear(d, n_vocab)


@pytest.mark.parametrize(
    ("preset", "targets", "printed"),
    [("paper", ["lm_head"], 816_400), ("paper", PARTS[:-1], 221_184), ("paper-12", PARTS, 3_470_608)],
    ids=["the logits", "a block", "twelve blocks and the logits"],
)
def test_the_papers_parameter_counts_are_those_of_the_arrays_and_of_peft(
    preset: str, targets: list[str], printed: int
) -> None:
    assert live_count(preset, targets) == printed
    with torch.device("meta"):
        theirs = Layers(n_blocks=0 if targets == ["lm_head"] else onfoot.preset(preset).n_layer)
        chosen = [name for name, _ in theirs.named_modules() if name.startswith("layers.")]
        chosen += ["logits"] if "lm_head" in targets else []
        theirs = get_peft_model(theirs, LoraConfig(r=16, target_modules=chosen))
    assert sum(p.numel() for p in theirs.parameters() if p.requires_grad) == printed


@pytest.mark.parametrize("targets", [["c_attn", "c_proj", "c_fc"], EVERYWHERE], ids=str)
@pytest.mark.parametrize("use_rslora", [False, True])
def test_an_adapter_of_ours_gives_the_same_logits_in_peft(tmp_path: Path, targets: list[str], use_rslora: bool) -> None:
    model = base("float32")
    model.save(tmp_path / "base")
    model.add_lora(r=4, alpha=8, targets=targets, use_rslora=use_rslora)
    away_from_start(model)
    model.save_adapter(tmp_path / "adapter")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    theirs = PeftModel.from_pretrained(theirs, tmp_path / "adapter")
    logits = theirs(torch.tensor(TOKENS)).logits.detach().numpy()
    assert np.abs(logits - model.logits(TOKENS)).max() <= 1e-4


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["c_attn", "c_proj", "c_fc"]},
        {"target_modules": EVERYWHERE, "use_rslora": True},
        {"target_modules": ["c_attn", "c_fc"], "rank_pattern": {"c_fc": 5}, "alpha_pattern": {"h.0.mlp.c_fc": 7}},
        {"target_modules": ["c_proj"], "layers_to_transform": [1]},
    ],
    ids=str,
)
def test_an_adapter_of_pefts_gives_the_same_logits_here(tmp_path: Path, settings: dict[str, Any]) -> None:
    model = base("float32")
    model.save(tmp_path / "base")
    theirs = get_peft_model(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base"),
        LoraConfig(r=4, lora_alpha=6, task_type="CAUSAL_LM", fan_in_fan_out=True, **settings),
    )
    torch.manual_seed(0)
    with torch.no_grad():
        for name, p in theirs.named_parameters():
            if "lora_" in name:
                p.normal_(0, 0.3)
    theirs.save_pretrained(tmp_path / "adapter")
    expected = theirs.eval()(torch.tensor(TOKENS)).logits.detach().numpy()
    model.load_adapter(tmp_path / "adapter")
    assert np.abs(model.logits(TOKENS) - expected).max() <= 1e-4
    assert np.abs(model.logits(TOKENS) - base("float32").logits(TOKENS)).max() > 1e-2


@pytest.mark.parametrize("targets", [EVERYWHERE, PARTS], ids=str)
@pytest.mark.parametrize("tied", [True, False])
def test_merged_equals_unmerged_and_can_be_taken_back(tmp_path: Path, targets: list[str], tied: bool) -> None:
    config = replace(CONFIG, tie_word_embeddings=tied)
    model = base(config=config)
    plain = model.logits(TOKENS)
    model.add_lora(r=3, alpha=4, targets=targets)
    away_from_start(model)
    logits = model.logits(TOKENS)
    model.merge_adapter()
    assert_close(model.logits(TOKENS), logits, 1e-12)
    model.save(tmp_path)
    assert_close(onfoot.load(tmp_path, dtype="float64").logits(TOKENS), logits, 1e-12)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert_close(theirs(torch.tensor(TOKENS)).logits.detach().numpy(), logits, 1e-10)
    model.unmerge_adapter()
    assert model.config == config
    assert_close(model.logits(TOKENS), logits, 1e-12)
    model.use_adapter(None)
    assert_close(model.logits(TOKENS), plain, 1e-12)


def test_several_adapters_stand_on_one_base_and_are_switched() -> None:
    model = base()
    plain = model.logits(TOKENS)
    outputs = {}
    for i, name in enumerate(("one", "two")):
        model.add_lora(r=2, alpha=2, targets=["c_attn"] if i else ["c_fc", "lm_head"], name=name)
        away_from_start(model, seed=i)
        outputs[name] = model.logits(TOKENS)
    for name in ("one", "two", "one"):
        model.use_adapter(name)
        assert (model.logits(TOKENS) == outputs[name]).all()
        assert all(f".{name}." in parameter for parameter in model.trainable)
    model.use_adapter(None)
    assert (model.logits(TOKENS) == plain).all()
    assert not any("lora" in name for name in model.trainable)


def test_training_an_adapter_leaves_the_base_untouched() -> None:
    model = base("float32")
    before = {name: value.copy() for name, value in model.params.items()}
    model.add_lora(r=2, alpha=4, targets=["c_attn", "c_proj", "c_fc"])
    optimizer = onfoot.AdamW(model, lr=1e-2)
    assert set(optimizer.m) == model.trainable
    losses = [model.train_step(optimizer, TOKENS) for _ in range(30)]
    assert losses[-1] < losses[0] - 0.1
    assert all((model.params[name] == value).all() for name, value in before.items())


def test_an_adapters_folder_brings_its_base_along(tmp_path: Path) -> None:
    base("float32").save(tmp_path / "base")
    model = onfoot.load(tmp_path / "base")
    model.add_lora(r=2, alpha=4)
    away_from_start(model)
    model.save_adapter(tmp_path / "adapter")
    assert (onfoot.load(tmp_path / "adapter").logits(TOKENS) == model.logits(TOKENS)).all()


def edited(folder: Path, **changes: Any) -> Path:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_dora": True}, "use_dora=True is not supported"),
        ({"modules_to_save": ["wte"]}, r"modules_to_save=\['wte'\] is not supported"),
        ({"bias": "all"}, "bias='all' is not supported"),
        ({"peft_type": "IA3"}, "peft_type 'IA3' is not supported"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa' is not supported"),
        ({"layer_replication": [[0, 2]]}, "layer_replication="),
        ({"some_new_option": 3}, "some_new_option=3 is not supported"),
        ({"r": None}, "r must be an integer from 1 to .*, got None"),
        ({"rank_pattern": {"(": 3}}, r"rank_pattern: pattern '\(' is not a valid regular expression"),
        ({"r": 7}, r"lora_A.weight has shape \(4, 12\); this model and rank 7 expect \(7, 12\)"),
    ],
    ids=str,
)
def test_options_that_are_not_known_are_refused_by_name(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    model = base("float32")
    model.add_lora(r=4, alpha=8)
    model.save_adapter(tmp_path)
    with pytest.raises(ValueError, match=message):
        base("float32").load_adapter(edited(tmp_path, **changes))


def test_an_adapter_of_another_base_is_refused_with_the_tensor_named(tmp_path: Path) -> None:
    model = base("float32")
    model.add_lora(r=4, alpha=8)
    model.save_adapter(tmp_path)
    wider = onfoot.create(onfoot.GPT2Config(vocab_size=29, n_positions=16, n_embd=24, n_layer=2, n_head=3))
    with pytest.raises(ValueError, match=r"transformer\.h\.0\.attn\.c_attn\.lora_A\.weight has shape \(4, 12\)"):
        wider.load_adapter(tmp_path)
    shallow = onfoot.create(onfoot.GPT2Config(vocab_size=29, n_positions=16, n_embd=12, n_layer=1, n_head=3))
    with pytest.raises(ValueError, match=r"LoRA layer for transformer\.h\.1\.\S+, which the model does not have"):
        shallow.load_adapter(tmp_path)
    assert not wider.adapters and not any("lora" in name for name in wider.params)  # nothing was changed
    with pytest.raises(ValueError, match=r"it has no adapter_config\.json"):
        model.load_adapter(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"r": 0}, r"r must be in 1 ... 12 for transformer\.h\.0\.attn\.c_attn \(12 × 36\), got 0"),
        ({"r": 13}, r"r must be in 1 ... 12 for .*, got 13"),
        ({"targets": ["q_proj"]}, "no layer matches 'q_proj'; choose from c_attn"),
        ({"targets": []}, "targets must be a list of layer names"),
        ({"targets": "c_attn"}, "targets must be a list of layer names"),
        ({"targets": ["c_attn", "c_attn.q"]}, "cannot both have a LoRA layer"),
        ({"dropout": 1.0}, r"dropout must be in \[0, 1\), got 1.0"),
        ({"r": 2, "alpha": float("nan")}, "alpha must be a finite number > 0, got nan"),
        ({"r": 2, "alpha": 0}, "alpha must be a finite number > 0, got 0"),
        ({"r": 2, "alpha": "16"}, "alpha must be a finite number > 0, got '16'"),
        ({"name": "a.b", "r": 2}, "must not be empty or contain a dot"),
    ],
    ids=str,
)
def test_bad_lora_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    model = base("float32")
    with pytest.raises(ValueError, match=message):
        model.add_lora(**settings)
    assert not model.adapters and model.trainable == set(model.params)


def test_what_would_lose_an_adapter_is_refused(tmp_path: Path) -> None:
    model = base("float32")
    with pytest.raises(ValueError, match="nothing to merge"):
        model.merge_adapter()
    with pytest.raises(ValueError, match="no adapter is merged"):
        model.unmerge_adapter()
    with pytest.raises(ValueError, match="no adapter None to save"):
        model.save_adapter(tmp_path)
    model.add_lora(r=2, alpha=2)
    with pytest.raises(ValueError, match="already has an adapter 'default'"):
        model.add_lora(r=2, alpha=2)
    with pytest.raises(ValueError, match="'default' is not in the weights"):
        model.save(tmp_path)
    with pytest.raises(ValueError, match="no adapter 'other'; available: default"):
        model.use_adapter("other")
    model.merge_adapter()
    with pytest.raises(ValueError, match="merged into the weights"):
        model.use_adapter("default")
    with pytest.raises(ValueError, match="merged into the weights"):
        model.add_lora(r=2, alpha=2, name="second")
    assert set(model.adapters) == {"default"} and not any(".second." in name for name in model.params)


def test_an_adapter_in_its_bases_own_folder_does_not_hide_the_base(tmp_path: Path) -> None:
    base("float32").save(tmp_path)
    model = onfoot.load(tmp_path)
    model.add_lora(r=2, alpha=2)
    away_from_start(model)
    model.save_adapter(tmp_path)
    again = onfoot.load(tmp_path)
    assert again.active_adapter is None
    again.load_adapter(tmp_path)
    assert (again.logits(TOKENS) == model.logits(TOKENS)).all()


def test_an_adapter_finds_its_base_from_another_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    base("float32").save("base")
    model = onfoot.load("base")
    model.add_lora(r=2, alpha=2)
    away_from_start(model)
    model.save_adapter("adapter")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert (onfoot.load("../adapter").logits(TOKENS) == model.logits(TOKENS)).all()
