"""Code as people hold it is checked directly: a right form passes, and the mistake in a wrong one is named."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import onfoot.check
from onfoot.check import LAYERS
from onfoot.check.known import check_layer
from onfoot.check.report import LayerReport
from onfoot.cli import app

HELD = Path(__file__).parent / "held"

# file, name -> layer, words of what was recognised, wrong name -> the mistake
MEAN = "dbias is B·n"
CONSTANT = "the mean held constant"
SCALE = "1/√d_k missing from the backward pass"
FORMS: dict[str, list[tuple[str, str, str, str, str]]] = {
    "numpy_code": [
        ("linear_dout_first", "linear", "arguments by name: dout, x, weight, bias", "linear_dout_first_wrong", MEAN),
        ("linear_no_bias", "linear", "grad_output = dout, inp = x, W = weight", "linear_no_bias_wrong", "wrong sign"),
        ("linear_other_order", "linear", "order dweight, dbias, dx", "linear_other_order_wrong", MEAN),
        ("linear_dict", "linear", "", "linear_dict_wrong", "dweight is 2 times too large"),
        ("linear_named_tuple", "linear", "dY = dout, W = weight, b = bias, X = x", "linear_named_tuple_wrong", MEAN),
        ("norm_backward", "layer_norm", "a pair, y, saved = norm_forward(…)", "bad_norm_backward", CONSTANT),
        ("norm_pair", "layer_norm", "a pair, y, saved = norm_forward(…)", "bad_norm_pair", CONSTANT),
        ("norm_with_vjp", "layer_norm", "returns (y, vjp_fn)", "bad_norm_with_vjp", CONSTANT),
        (
            "flash",
            "attention",
            "flash_backward(do, q, k, v, o, lse)",
            "bad_flash",
            "the sum missing from the gradient of",
        ),
        ("LinearWithWeights", "linear", "LinearWithWeights(weight, bias)", "LinearWithWeightsWrong", MEAN),
        (
            "LinearWithSizes",
            "linear",
            "inputs = x, W = weight, b = bias",
            "LinearWithSizesWrong",
            "dx is 2 times too large",
        ),
        ("LinearOfTheBook", "linear", "LinearOfTheBook(W, b)", "LinearOfTheBookWrong", MEAN),
        ("NormWithParameters", "layer_norm", "gamma = weight, beta = bias", "NormWithParametersWrong", CONSTANT),
        ("StaticLinear", "linear", "StaticLinear()", "StaticLinearWrong", MEAN),
        ("instance", "linear", "a class with __call__ and backward", "wrong_instance", "dx is 2 times too large"),
    ],
    "torch_code": [
        ("NormFunction", "layer_norm", "a torch.autograd.Function", "NormFunctionWrong", CONSTANT),
        ("LinearWithSetup", "linear", "w = weight, b = bias, inp = x", "LinearWithSetupWrong", MEAN),
        ("Norm", "layer_norm", "an nn.Module, Norm(dim)", "NormWrong", CONSTANT),
        (
            "WrappedLinear",
            "linear",
            "proj.weight is (out, in)",
            "TwiceLinear",
            "dx, dweight and dbias are 2 times too large",
        ),
        ("Head", "head", "query.weight = w_q", "HeadWrong", "no mask"),
        ("LoRALinear", "lora", "lora_A = down", "LoRALinearWrong", "α/r missing"),
        ("Block", "block", "an MLP 4 times as wide", "BlockWrong", "the skip connection around the MLP missing"),
        ("norm_function", "layer_norm", "differentiated by PyTorch's autograd", "norm_function_wrong", "eps = 0.001"),
        ("sdpa", "attention", "query = q, key = k, value = v", "sdpa_without_mask", "no mask"),
        ("loss", "softmax_cross_entropy", "autograd", "loss_of_sums", "a mean loss whose gradient is not divided"),
    ],
    "jax_code": [
        ("norm", "layer_norm", "a JAX custom_vjp function, differentiated by jax.vjp", "norm_wrong", CONSTANT),
        ("swiglu_with_vjp", "swiglu", "returns (y, vjp_fn)", "swiglu_with_vjp_wrong", "wrong sign"),
        ("embedding_backward", "embedding", "", "embedding_backward_wrong", "repeated ids lost"),
    ],
}
LAYOUTS = [
    ("attention_bthd", "attention", "(batch, tokens, heads, head_dim)", "attention_bthd_wrong", SCALE),
    ("attention_sequence", "attention", "one sequence at a time", "attention_sequence_wrong", SCALE),
    ("attention_single_head", "attention", "one head of one sequence", "attention_single_head_wrong", SCALE),
    ("norm_rows", "layer_norm", "rows (batch · tokens, features)", "norm_rows_wrong", CONSTANT),
    ("affine_backward", "linear", "rows (batch · tokens, features)", "affine_backward_wrong", MEAN),
    ("linear_out_in", "linear", "weights (out, in): weight", "linear_out_in_wrong", MEAN),
    ("loss_rows", "softmax_cross_entropy", "rows (batch · tokens", "loss_rows_wrong", "gradient is not divided"),
]
FORMS["numpy_code"] += LAYOUTS
EVERY = [(file, *case) for file, cases in FORMS.items() for case in cases]
ONE_SIZE = {"batch": 2, "tokens": 3, "width": 5}  # JAX compiles every shape anew


def held(file: str, name: str) -> Any:
    return getattr(importlib.import_module(f"held.{file}"), name)


def checked(file: str, name: str, layer: str, **options: Any) -> LayerReport:
    options = {"dtypes": "float64", **(ONE_SIZE if file == "jax_code" else {}), **options}
    return check_layer(LAYERS[layer], held(file, name), **options)


@pytest.mark.parametrize(("file", "name", "layer", "recognised", "wrong", "mistake"), EVERY, ids=[c[1] for c in EVERY])
def test_a_form_passes_if_right_and_its_mistake_is_named_if_wrong(
    file: str, name: str, layer: str, recognised: str, wrong: str, mistake: str
) -> None:
    report = checked(file, name, layer)
    assert report.passed, str(report)
    assert recognised in report.recognised and bool(recognised) == bool(report.recognised)
    bad = checked(file, wrong, layer)
    assert not bad.passed and mistake in bad.verdict
    assert bad.verdict.startswith("wrong: ")


ALSO_RIGHT = [
    ("numpy_code", "linear_meaningless", "linear", ""),
    ("numpy_code", "linear_dx_and_dict", "linear", ""),
    ("numpy_code", "linear_namespace", "linear", ""),
    ("torch_code", "Config", "layer_norm", "config with the sizes of the inputs"),
    ("torch_code", "OwnLinear", "linear", "w = weight, b = bias"),
    ("torch_code", "layer_norm_instance", "layer_norm", "width 6, its own"),
    ("torch_code", "linear_instance", "linear", "weight is (out, in), the transpose of the layer's"),
    ("torch_code", "block_instance", "block", "width 8, its own; an MLP 4 times as wide as its input"),
    ("torch_code", "embedding_instance", "embedding", "input = ids"),
    ("torch_code", "linear_out_in", "linear", "weights (out, in): weight"),
    ("torch_code", "sdpa_bthd", "attention", "(batch, tokens, heads, head_dim)"),
    ("jax_code", "gelu", "gelu", "differentiated by jax.vjp"),
    ("jax_code", "norm_bwd", "layer_norm", "a pair, y, saved = norm_fwd(…) and norm_bwd(saved, dy)"),
]


@pytest.mark.parametrize(("file", "name", "layer", "recognised"), ALSO_RIGHT, ids=[c[1] for c in ALSO_RIGHT])
def test_other_right_code_passes(file: str, name: str, layer: str, recognised: str) -> None:
    report = checked(file, name, layer)
    assert report.passed, str(report)
    assert recognised in report.recognised and bool(recognised) == bool(report.recognised)


def test_what_is_recognised_is_a_line_of_the_report_and_a_field_of_the_json() -> None:
    report = checked("numpy_code", "attention_bthd", "attention")
    assert "\n  recognised: arrays (batch, tokens, heads, head_dim)\n" in str(report)
    assert report.to_dict()["recognised"] == "arrays (batch, tokens, heads, head_dim)"
    assert "recognised" not in str(checked("numpy_code", "linear_meaningless", "linear"))


def test_a_module_with_both_functions_is_a_pair() -> None:
    from types import ModuleType

    module = ModuleType("mine")
    module.layer_norm_forward, module.layer_norm_backward = held("numpy_code", "norm_pair")  # type: ignore[attr-defined]
    assert onfoot.check.layer_norm(module, dtypes="float64")
    with pytest.raises(ValueError, match="mine has no gelu_backward, with or without gelu_forward; it defines"):
        del module.layer_norm_forward
        onfoot.check.gelu(module)


def test_onfoots_own_pairs_are_taken_as_they_are() -> None:
    from onfoot import ops

    assert onfoot.check.rms_norm((ops.rms_norm_forward, ops.rms_norm_backward), dtypes="float64", eps=1e-6)
    assert onfoot.check.attention(ops.attention_backward, dtypes="float64")


# No layout makes a wrong function right


def test_a_bias_summed_over_the_batch_only_does_not_pass_as_a_function_of_rows() -> None:
    report = checked("numpy_code", "bias_summed_over_the_batch_only", "linear")
    assert not report.passed and "dbias has shape" in str(report)
    assert "everything would be right in another layout: give layout='rows' if it is meant" in " ".join(
        str(report).split()
    )
    assert checked("numpy_code", "bias_summed_over_the_batch_only", "linear", layout="rows").passed


def test_a_norm_over_the_wrong_axis_does_not_pass_as_a_function_of_rows() -> None:
    assert checked("numpy_code", "norm_over_the_wrong_axis", "layer_norm").wrong == ["dx", "dweight"]


def test_ids_in_one_list_are_rows_and_not_sequences() -> None:
    """Both run; sequence by sequence, the ids that are lost between sequences would seem right."""

    def backward(ids, weight, dout):
        assert ids.ndim == 1
        dweight = np.zeros_like(weight)
        for i, row in zip(ids, dout, strict=True):
            dweight[i] = row
        return dweight

    for seed in range(3):
        report = check_layer(LAYERS["embedding"], backward, dtypes="float64", seed=seed)
        assert report.recognised == "rows (batch · tokens, features)"
        assert report.verdict == "wrong: dweight; repeated ids lost"


def test_gradients_of_one_shape_are_not_reordered() -> None:
    assert "dk is returned in place of dq" in checked("numpy_code", "swapped", "attention").verdict


@pytest.mark.parametrize("name", ["attention_bthd", "attention_bthd_wrong", "attention_bthd_without_mask"])
def test_a_layout_can_be_chosen_and_refused(name: str) -> None:
    recognised = checked("numpy_code", name, "attention")
    assert checked("numpy_code", name, "attention", layout="bthd").verdict == recognised.verdict
    assert checked("numpy_code", name, "attention", layout="contract").wrong == ["dq", "dk", "dv"]


# Precisions


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bits_are_judged_by_their_own_rounding(dtype: str) -> None:
    assert checked("torch_code", "half", "attention", dtypes=(dtype,)).passed
    assert checked("torch_code", "NormFunction", "layer_norm", dtypes=(dtype,)).passed
    bad = checked("torch_code", "half_wrong", "attention", dtypes=(dtype,))
    assert bad.wrong == ["dq", "dk"] and SCALE in bad.verdict
    assert {o.dtype for o in bad.outcomes} == {dtype}
    assert CONSTANT in checked("torch_code", "NormFunctionWrong", "layer_norm", dtypes=(dtype,)).verdict


def test_bfloat16_tensors_reach_the_function() -> None:
    import torch

    seen = set()

    def backward(x, dout):
        seen.add(x.dtype)
        x = x.detach().requires_grad_()
        return torch.autograd.grad(torch.nn.functional.gelu(x, approximate="tanh"), x, dout)[0]

    assert onfoot.check.gelu(backward, dtypes=("bfloat16",))
    assert seen == {torch.bfloat16}


def test_a_loss_of_digits_in_16_bits_is_not_named_a_mistake() -> None:
    import torch

    def backward(x, dout):
        if x.dtype == torch.float16:
            dout = dout * (1 + 0.3 * torch.sin(7 * x))
        x = x.detach().requires_grad_()
        return torch.autograd.grad(torch.nn.functional.gelu(x, approximate="tanh"), x, dout)[0]

    report = onfoot.check.gelu(backward, dtypes=("float16",), arrays="torch")
    assert report.wrong == ["dx"] and not (report.diagnosis and report.diagnosis.findings)
    assert "right in float64: in float16 it loses more digits than rounding explains" in " ".join(str(report).split())


def test_the_nearest_numbers_of_bfloat16_are_torchs() -> None:
    import torch

    from onfoot.check.narrow import rounded

    x = np.random.default_rng(0).standard_normal(5000) * 10.0 ** np.arange(-10, 10).repeat(250)
    x[:4] = [np.inf, -np.inf, 0.0, -0.0]
    wanted = torch.from_numpy(x).float().to(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(rounded(x.astype(np.float32), "bfloat16"), wanted)


# What cannot be checked, and what goes wrong

REFUSED = {
    "Nothing": "Nothing is a class without a forward and a backward method, and neither an nn.Module nor",
    "lonely_backward": "lonely_backward(dy, cache) needs what its forward pass saved; pass the pair (forward, back",
}
FAILING = {
    "NeedsMore": "form: NeedsMore(weight, bias, schedule): schedule is neither an input nor a size of the layer",
    "Silent": "form: no gradient was found: Silent.backward returns None, and no attribute is called dx, dweight",
    "other_sizes": "raises: it raises ValueError: width must be 64 (numpy_code.py, line ",
    "Raises": "raises: it raises RuntimeError: not today (numpy_code.py, line ",
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_object_without_a_form_is_refused_with_what_was_tried(name: str) -> None:
    with pytest.raises(ValueError, match=re.escape(REFUSED[name])):
        checked("numpy_code", name, "linear")


@pytest.mark.parametrize("name", FAILING)
def test_an_object_that_cannot_be_called_has_a_report_that_says_why(name: str) -> None:
    report = checked("numpy_code", name, "linear")
    assert not report.passed and FAILING[name] in " ".join(str(report).split())


def test_a_bias_that_is_not_taken_is_0_and_one_that_is_forgotten_is_named() -> None:
    report = checked("numpy_code", "head_without_biases", "head")
    assert report.passed and "without b_q, b_k, b_v, which it does not have: taken as 0" in report.warnings
    assert "1/√d_k missing" in checked("numpy_code", "head_without_biases_wrong", "head").verdict
    forgotten = checked("numpy_code", "head_that_ignores_its_biases", "head")
    assert not forgotten.passed and "taken as 0" not in " ".join(forgotten.warnings)


def test_a_module_with_other_parameters_is_named_with_them() -> None:
    report = checked("torch_code", "extra_parameter", "layer_norm")
    assert "has parameters that are no inputs of the layer, by name or by shape: " in " ".join(str(report).split())


def test_an_nn_module_takes_tensors_only() -> None:
    with pytest.raises(ValueError, match=r"arrays='numpy', but an nn\.Module, Norm takes torch arrays"):
        checked("torch_code", "Norm", "layer_norm", arrays="numpy")


# In a process of its own, from the command line


def run(target: str, layer: str, *options: str) -> Any:
    return CliRunner().invoke(app, ["check", f"{HELD}/{target}", "--layer", layer, "--dtype", "float64", *options])


ISOLATED = [
    ("numpy_code.py:linear_dout_first", "numpy_code.py:linear_dout_first_wrong", "linear", MEAN),
    ("numpy_code.py:norm_backward", "numpy_code.py:bad_norm_pair", "layer_norm", CONSTANT),
    ("numpy_code.py:LinearWithSizes", "numpy_code.py:LinearWithSizesWrong", "linear", "dx is 2 times too large"),
    ("numpy_code.py:attention_bthd", "numpy_code.py:attention_bthd_wrong", "attention", SCALE),
    ("numpy_code.py:norm_rows", "numpy_code.py:norm_rows_wrong", "layer_norm", CONSTANT),
    ("torch_code.py:NormFunction", "torch_code.py:NormFunctionWrong", "layer_norm", CONSTANT),
    ("torch_code.py:HeadWithoutBiases", "torch_code.py:HeadWithoutBiasesWrong", "head", "no mask"),
    ("jax_code.py:norm", "jax_code.py:norm_wrong", "layer_norm", CONSTANT),
]


MORE = ("linear_dout_first", "LinearWithSizes", "norm_rows", "NormFunction")  # much like another one


@pytest.mark.parametrize(
    ("right", "wrong", "layer", "mistake"),
    [pytest.param(*c, id=c[0], marks=pytest.mark.slow if c[0].endswith(MORE) else []) for c in ISOLATED],
)
def test_forms_and_layouts_in_a_process_of_their_own(right: str, wrong: str, layer: str, mistake: str) -> None:
    small = ["--batch", "2", "--tokens", "3", "--width", "5"] if "jax" in right else []
    result = run(right, layer, *small)
    assert result.exit_code == 0 and "recognised: " in result.stdout, result.output
    result = run(wrong, layer, *small)
    assert result.exit_code == 1 and mistake in result.stdout and "✗ wrong: " in result.stdout


def test_bfloat16_from_the_command_line() -> None:
    target = f"{HELD}/torch_code.py:half_wrong"
    result = CliRunner().invoke(app, ["check", target, "--layer", "attention", "--dtype", "bfloat16"])
    assert result.exit_code == 1 and SCALE in result.stdout and "bfloat16" in result.stdout


DYING = {
    "Crash": ("crash: its process died of SIG", "(numpy_code.py, line "),
    "Hang": ("timeout: it did not return within 1 seconds", "(numpy_code.py, line "),
    "Exit": ("exit: it ended the process with status 0", "called with x (7, 2, 3), weight (3, 6)"),
    "Raises": ("raises: it raises RuntimeError: not today", "(numpy_code.py, line "),
    "NeedsMore": ("form: NeedsMore(weight, bias, schedule)", "construct an instance yourself"),
}


@pytest.mark.parametrize("name", DYING)
def test_whatever_a_class_does_there_is_a_report(name: str) -> None:
    result = run(f"numpy_code.py:{name}", "linear", *(["--timeout", "1"] if name == "Hang" else []))
    text = " ".join(result.stdout.split())
    assert result.exit_code == 1, result.output
    assert [words for words in DYING[name] if words not in text] == []


def test_what_a_class_prints_goes_to_the_standard_error() -> None:
    result = run("numpy_code.py:Loud", "linear", "--json")
    assert result.exit_code == 0 and result.stdout.startswith("{") and "a line of its own" in result.stderr


def test_a_class_without_a_form_ends_with_status_2() -> None:
    result = run("numpy_code.py:Nothing", "linear")
    assert result.exit_code == 2 and result.stdout == "" and "Nothing is a class without a forward" in result.stderr


def test_the_class_of_a_file_is_found_by_the_name_of_the_layer(tmp_path: Path) -> None:
    code = "class Helper:\n    def forward(self, x): ...\n\nclass GELU:\n    def forward(self, x): self.x = x\n"
    code += "    def backward(self, dout): return dout * 0\n"
    (tmp_path / "mine.py").write_text(code)
    result = CliRunner().invoke(app, ["check", f"{tmp_path}/mine.py", "--layer", "gelu"])
    assert result.exit_code == 1 and "mine.py:GELU" in result.stdout and "✗ wrong: dx" in result.stdout
