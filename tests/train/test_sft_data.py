"""Fine-tuning data: only completions are targets, packing changes no gradient, and nothing is dropped silently."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

import onfoot
from onfoot.data.packing import Rows, first_fit_decreasing
from onfoot.data.sft import SftSource, load_source
from onfoot.data.sft_examples import (
    INSTRUCTION,
    Example,
    encode,
    encode_chat,
    fit,
    read_examples,
    read_parts,
    split_examples,
)
from onfoot.formats.chat import CHATML, ChatTemplate, Part, chat_prompt, chat_prompt_ids
from onfoot.formats.tokenizer import Tokenizer, byte_tokenizer, char_tokenizer
from onfoot.ops.cross_entropy import IGNORE
from onfoot.train.loop import Trainer
from onfoot.train.options import TrainingOptions

TOKENIZER = byte_tokenizer()
END = TOKENIZER.eos_id
PLAIN = ChatTemplate()
LLAMA = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ '<<SYS>>' + m.content + '<</SYS>>' }}"
    "{% elif m.role == 'user' %}{{ '[INST] ' + m.content | trim + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + ' ' + eos_token }}{% endif %}"
    "{% endfor %}"
)
# Answers of earlier turns lose what they thought: such a template does not only append.
REWRITING = (
    "{% for m in messages %}{{ m.role }}:"
    "{{ m.content if loop.last or m.role != 'assistant' else m.content.split('</think>')[-1] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
DIALOGUE = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "1"},
    {"role": "user", "content": "Two?"},
    {"role": "assistant", "content": "2"},
]


@cache
def tiny_model(**sizes: int) -> onfoot.Model:
    config = onfoot.GPT2Config(n_layer=2, n_head=2, n_embd=8, n_positions=64, vocab_size=TOKENIZER.size, **sizes)
    model = onfoot.create(config, seed=1, dtype="float64", engine="numpy")
    rng = np.random.default_rng(0)
    for value in model.params.values():
        value += rng.normal(0, 0.1, value.shape)  # away from the initial values, where biases are 0
    return model


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def example(prompt: str, completion: str) -> Example:
    return encode([Part(prompt, False), Part(completion, True)], TOKENIZER, "here")


def numbered(lengths: list[int]) -> list[Example]:
    """Examples of these lengths; the last id of number i is 1000 + i and its only target."""
    return [
        Example(np.array([*range(1, n + 1), 1000 + i]), np.array([False] * n + [True]), str(i))
        for i, n in enumerate(lengths)
    ]


def folder_with(path: Path, template: Any, **config: Any) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, **config}), encoding="utf-8")
    return path


# what is learnt


def test_targets_are_the_next_ids_of_the_completion_and_its_end_and_nothing_else() -> None:
    made = example("ab", "cd")
    a, b, c, d = TOKENIZER.encode("abcd")
    assert made.tokens.tolist() == [a, b, c, d]
    assert made.targets.tolist() == [IGNORE, c, d, END]
    assert made.prompt.tolist() == [a, b] and made.n_targets == 3


def test_the_loss_is_that_of_the_completions_tokens_alone() -> None:
    made, model = example("question", "yes"), tiny_model()
    row = Rows([made], 64, seed=0).batch([0])
    logits = model.logits(row.tokens)[0]  # (T, V)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    said = [*TOKENIZER.encode("yes"), END]
    expected = -np.mean([log_p[len("question") - 1 + i, token] for i, token in enumerate(said)])
    assert model.loss(*row[:2], segments=row.segments) == pytest.approx(expected, rel=1e-12)


@settings(max_examples=15)
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 9)), min_size=1, max_size=7), st.integers(0, 99))
def test_a_packed_batch_has_the_gradient_of_its_examples_one_by_one(sizes: list[tuple[int, int]], seed: int) -> None:
    rng, model = np.random.default_rng(seed), tiny_model()
    letters = np.array(list("abcdefgh"))
    examples = [example("".join(rng.choice(letters, p)), "".join(rng.choice(letters, c))) for p, c in sizes]
    divisor = sum(e.n_targets for e in examples)
    loss, expected = 0.0, {name: np.zeros_like(p) for name, p in model.params.items()}
    for e in examples:
        part, grads = model.loss_and_grads(e.tokens[None], e.targets[None], divisor=divisor)
        loss += part
        for name, grad in grads.items():
            expected[name] += grad
    size = max(np.abs(g).max() for g in expected.values())
    for pack in (True, False):
        rows = Rows(examples, 32, seed, pack)
        tokens, targets, segments = rows.batch(range(len(rows)))
        packed_loss, grads = model.loss_and_grads(tokens, targets, divisor=divisor, segments=segments)
        assert packed_loss == pytest.approx(loss, rel=1e-12)
        for name, grad in grads.items():
            np.testing.assert_allclose(grad, expected[name], rtol=1e-12, atol=1e-12 * size, err_msg=name)


def test_without_segments_the_packed_gradient_would_differ() -> None:
    model, rows = tiny_model(), Rows([example("abc", "de"), example("fg", "h")], 32, seed=0)
    tokens, targets, segments = rows.batch([0])
    apart = model.loss_and_grads(tokens, targets, segments=segments)[1]["transformer.wte.weight"]
    mixed = model.loss_and_grads(tokens, targets)[1]["transformer.wte.weight"]
    assert np.abs(apart - mixed).max() > 1e-3 * np.abs(apart).max()


def test_a_prompt_has_the_same_ids_as_in_generation_even_where_a_token_would_span_both() -> None:
    from onfoot.formats.tokenizer import bpe_tokenizer

    bpe = bpe_tokenizer(iter(["abab abab abab"] * 50), 270)
    assert len(bpe.encode("ab")) == 1 and len(bpe.encode("abab")) == 1
    made = encode([Part("ab", False), Part("ab", True)], bpe, "here")
    assert made.ids.tolist() == [*bpe.encode("ab"), *bpe.encode("ab"), bpe.eos_id]


def test_an_example_without_a_prompt_begins_with_the_end_token_as_generation_does() -> None:
    made = example("", "ab")
    assert made.tokens.tolist() == [END, *TOKENIZER.encode("ab")]
    assert made.targets.tolist() == [*TOKENIZER.encode("ab"), END]
    assert made.prompt.tolist() == [END]


def test_a_completion_that_ends_with_the_end_token_gets_no_second_one() -> None:
    assert example("a", "b<|endoftext|>").ids.tolist() == example("a", "b").ids.tolist()


def test_a_tokenizer_without_an_end_token_adds_none() -> None:
    tokenizer = Tokenizer(TOKENIZER.backend, eos=None)
    made = encode([Part("a", False), Part("bc", True)], tokenizer, "here")
    assert made.ids.tolist() == TOKENIZER.encode("abc")
    with pytest.raises(ValueError, match="no targets"):
        encode([Part("", False), Part("b", True)], tokenizer, "here")


def test_each_line_is_recognised_by_its_fields(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.jsonl",
        {"prompt": "p", "completion": "c", "id": 7, "input": 5},
        {"instruction": "Add {x}.", "output": "3"},
        {"instruction": "Add.", "input": "1 2", "output": "3"},
        {"instruction": "Add.", "input": "", "output": "3", "text": "Add. 3"},
    )
    chats = write(tmp_path / "b.jsonl", {"messages": DIALOGUE[1:3], "prompt": "One?"})
    path.write_text(path.read_text(encoding="utf-8").replace("\n", "\n\n"), encoding="utf-8")  # blank lines are passed
    examples = read_examples([path, chats], TOKENIZER, PLAIN)
    assert [TOKENIZER.decode(e.prompt) for e in examples] == [
        "p",
        "Instruction:\nAdd {x}.\n\nAnswer:\n",
        "Instruction:\nAdd.\n\nInput:\n1 2\n\nAnswer:\n",
        INSTRUCTION.format(instruction="Add."),
        "<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\n",
    ]
    assert [TOKENIZER.decode(e.ids[e.learn]) for e in examples] == ["c", "3", "3", "3", "1<|im_end|>\n"]
    assert [e.where for e in examples] == [*(f"{path}, line {n}" for n in (1, 3, 5, 7)), f"{chats}, line 1"]


# conversations


def test_chatml_learns_every_turn_of_the_assistant_with_its_end() -> None:
    made = encode_chat(read_parts({"messages": DIALOGUE}, PLAIN), TOKENIZER, "here")
    pieces = [
        ("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\n", False),
        ("1<|im_end|>\n", True),
        ("<|im_start|>user\nTwo?<|im_end|>\n<|im_start|>assistant\n", False),
        ("2<|im_end|>\n", True),
    ]
    learn = [flag for text, flag in pieces for _ in TOKENIZER.encode(text)]
    assert made.ids.tolist() == [*TOKENIZER.encode("".join(text for text, _ in pieces)), END]
    assert made.learn.tolist() == [*learn, True]
    said = [i for text, flag in pieces if flag for i in TOKENIZER.encode(text)]
    assert made.targets[made.targets != IGNORE].tolist() == [*said, END]


def test_a_template_of_its_own_marks_turns_by_its_own_tokens(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    tokenizer = Tokenizer(tokenizer.backend, eos="</s>")
    folder = folder_with(tmp_path, LLAMA, bos_token={"content": "<s>"}, eos_token="</s>")
    template = ChatTemplate.find(folder)
    assert template.parts(DIALOGUE) == [
        Part("<s><<SYS>>Be brief.<</SYS>>[INST] One? [/INST]", False),
        Part(" 1 </s>", True),
        Part("[INST] Two? [/INST]", False),
        Part(" 2 </s>", True),
    ]
    made = encode_chat(template.parts(DIALOGUE), tokenizer, "here")
    assert made.ids[0] == tokenizer.backend.token_to_id("<s>")
    assert (made.ids == tokenizer.eos_id).sum() == 2 and made.ids[-1] == tokenizer.eos_id  # no second one behind
    assert (made.targets == tokenizer.eos_id).sum() == 2
    assert template.end_of_turn() == "</s>" and PLAIN.end_of_turn() == "<|im_end|>"


def test_what_follows_the_last_answer_is_left_out() -> None:
    thanks = {"role": "user", "content": "Thanks."}
    assert PLAIN.parts([*DIALOGUE, thanks]) == PLAIN.parts(DIALOGUE)


def test_generation_continues_from_the_ids_of_training(tmp_path: Path) -> None:
    for template in (PLAIN, ChatTemplate.find(folder_with(tmp_path, LLAMA, bos_token="<s>", eos_token="</s>"))):
        made = encode_chat(template.parts(DIALOGUE), TOKENIZER, "here")
        second = np.flatnonzero(np.diff(made.learn.astype(int)) == 1)[1] + 1  # where the second answer begins
        assert chat_prompt_ids(TOKENIZER, template, DIALOGUE[:4]) == made.ids[:second].tolist()
        assert chat_prompt(template, DIALOGUE[:4]) == TOKENIZER.backend.decode(
            made.ids[:second].tolist(), skip_special_tokens=False
        )


@pytest.mark.parametrize("bos", ["", "<|endoftext|>"])
@pytest.mark.parametrize("source", [CHATML, LLAMA, "{% generation %}{{ messages | tojson }}{% endgeneration %}\n  x"])
def test_texts_and_saved_templates_are_those_of_transformers(tmp_path: Path, source: str, bos: str) -> None:
    from transformers import AutoTokenizer

    TOKENIZER.save(tmp_path, 64)
    template = ChatTemplate(source, bos=bos, eos="<|endoftext|>")
    template.save(tmp_path)
    found, oracle = ChatTemplate.find(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert found.source == source
    for messages, prompt in ((DIALOGUE, False), (DIALOGUE[:4], True), (DIALOGUE[1:2], True)):
        text = found.render(messages, prompt)
        assert text == template.render(messages, prompt)
        if bos or source != LLAMA:  # transformers writes "None" for a token that does not exist
            assert text == oracle.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
    assert Tokenizer.load(tmp_path).eos == TOKENIZER.eos


def test_the_template_is_found_in_all_of_its_places(tmp_path: Path) -> None:
    assert ChatTemplate.find(tmp_path).source == CHATML
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    assert chat_prompt(folder_with(tmp_path, named), DIALOGUE) == "plain"
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }} ü", encoding="utf-8")
    assert chat_prompt(tmp_path, DIALOGUE) == "Be brief. ü"
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"chat_template\.jinja is not valid UTF-8"):
        ChatTemplate.find(tmp_path)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (5, r'tokenizer_config\.json: "chat_template" must be a string or a list'),
        ([{"name": "rag", "template": "x"}], r'none of its chat templates \(rag\) is named "default"'),
        ("{% if %}", r"the chat template of .*tokenizer_config\.json failed: "),
        ("{{ raise_exception('only users') }}", "failed: only users"),
        ("{{ messages[9].content }}", "failed: .* has no element 9"),
        ("{{ messages.append(1) }}", "failed: access to attribute 'append' of .list. object is unsafe"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "failed: access to attribute '__class__' .* is unsafe"),
        ("{{ 1 / 0 }}", "failed: division by zero"),
        ("always the same", r"leaves out message 1 \(role system\); remove it, or use a model"),
        ("{{ messages[0].content }}", "renders nothing for message 3"),
        (REWRITING, r"changes the text before message 4: 'hm</think>1\\n' becomes '1\\nuser:Two\?"),
    ],
)
def test_templates_that_cannot_be_used_say_why(tmp_path: Path, template: Any, message: str) -> None:
    messages = [*DIALOGUE[:2], {"role": "assistant", "content": "hm</think>1"}, *DIALOGUE[3:]]
    with pytest.raises(ValueError, match=message):
        ChatTemplate.find(folder_with(tmp_path, template)).parts(messages)


def test_a_template_that_rewrites_earlier_turns_still_serves_single_ones() -> None:
    messages = [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "hm</think>1"}]
    assert ChatTemplate(REWRITING).parts(messages) == [
        Part("user:One?\nassistant:", False),
        Part("hm</think>1\n", True),
    ]


def test_a_missing_folder_and_wrong_messages_are_refused_for_prompts_too(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere is not a folder"):
        chat_prompt(tmp_path / "nowhere", DIALOGUE)
    with pytest.raises(ValueError, match="message 1 has unknown role 'robot'; choose from system, user, assistant"):
        chat_prompt(PLAIN, [{"role": "robot", "content": "x"}])


# bad files

USER = '{"role": "user", "content": "q"}'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"prompt": ', "not valid JSON"),
        (b"[" * 100_000, "nested too deeply: it has more than 64 levels of JSON"),
        (b'{"prompt": "\xff", "completion": "c"}', "is not valid UTF-8: byte 0xff at position 48"),
        (b'["p", "c"]', "not a JSON object; expected "),
        (b"{}", r"the fields \(none\); expected "),
        (b'{"txt": "x"}', r'the fields txt; expected {"prompt", "completion"}, {"instruction", "output"}'),
        (b'{"text": "x"}', r"a text, but the file begins with a prompt with its answer \(line 1\); put them into"),
        (f'{{"messages": [{USER}, {{"role": "assistant", "content": "a"}}]}}'.encode(), "a conversation, but the file"),
        (
            b'{"prompt": "p", "chosen": "c", "rejected": "r"}',
            r'a preference pair \("chosen" and "rejected"\): pass --dpo',
        ),
        (b'{"completion": "c"}', "the fields completion; expected "),
        (b'{"prompt": "p"}', '"prompt" but no "completion"; expected '),
        (b'{"instruction": "p", "input": "q"}', '"instruction" but no "output"; expected '),
        (
            b'{"prompt": "p", "completion": "c", "instruction": "i", "output": "o"}',
            r"fields of 2 forms \(prompt, instr",
        ),
        (b'{"prompt": "p", "completion": ""}', '"completion" is empty'),
        (b'{"instruction": "p", "output": ""}', '"output" is empty'),
        (b'{"prompt": "p", "completion": 3}', '"completion" must be a string, got 3'),
        (b'{"prompt": null, "completion": "c"}', '"prompt" must be a string, got None'),
        (b'{"instruction": "p", "input": ["x"], "output": "o"}', r'"input" must be a string, got \[\'x\'\]'),
        (b'{"prompt": "a\\ud800", "completion": "c"}', r'"prompt" has an unpaired surrogate, \\ud800, at position 1'),
        (b'{"messages": []}', '"messages" must be a non-empty list'),
        (b'{"messages": "hello"}', '"messages" must be a non-empty list'),
        (b'{"messages": ["hello"]}', 'message 1 must be an object with "role" and "content"'),
        (b'{"messages": [{"role": "user"}]}', 'message 1 must be an object with "role" and "content"'),
        (
            b'{"messages": [{"role": "robot", "content": "x"}]}',
            "message 1 has unknown role 'robot'; choose from system, user, assistant, tool",
        ),
        (f'{{"messages": [{USER}]}}'.encode(), "no assistant message"),
        (
            f'{{"messages": [{USER}, {{"role": "assistant", "content": ""}}]}}'.encode(),
            "message 2 \\(assistant\\) is empty",
        ),
        (
            f'{{"messages": [{USER}, {{"role": "assistant", "content": null}}]}}'.encode(),
            "of message 2 must be a string",
        ),
    ],
)
def test_bad_lines_are_named_with_file_and_line(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"prompt": "p", "completion": "c"}\n\n' + line + b"\n")  # the bad line is the third
    with pytest.raises(ValueError, match=rf"a\.jsonl, line 3:? .*{message}"):
        read_examples([path], TOKENIZER, PLAIN)


@pytest.mark.parametrize(("content", "message"), [("", "is empty"), ("\n \n", "has no records; each must be one of")])
def test_files_without_examples_are_named_even_next_to_good_ones(tmp_path: Path, content: str, message: str) -> None:
    good = write(tmp_path / "good.jsonl", {"prompt": "p", "completion": "c"})
    (tmp_path / "bad.jsonl").write_text(content)
    with pytest.raises(ValueError, match=rf"bad\.jsonl {message}"):
        read_examples([good, tmp_path / "bad.jsonl"], TOKENIZER, PLAIN)
    with pytest.raises(ValueError, match=r"none\.jsonl does not exist"):
        read_examples([tmp_path / "none.jsonl"], TOKENIZER, PLAIN)
    with pytest.raises(ValueError, match="no data: pass a"):
        read_examples([], TOKENIZER, PLAIN)


def test_several_files_and_folders_are_read_in_order(tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    second = write(tmp_path / "more" / "b.jsonl", {"prompt": "p", "completion": "2"})
    (tmp_path / "more" / "readme.txt").write_text("not an example")
    first = write(tmp_path / "a.jsonl", {"prompt": "p", "completion": "1"})
    examples = read_examples([first, tmp_path / "more"], TOKENIZER, PLAIN)
    assert [e.where for e in examples] == [f"{first}, line 1", f"{second}, line 1"]


def test_a_character_outside_the_alphabet_is_named_with_its_line(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": "ab", "completion": "c"}, {"prompt": "ab", "completion": "ü"})
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2: the character 'ü' is not in"):
        read_examples([path], char_tokenizer(["abc"]), PLAIN)


# length

LONG = [example("abc", "de"), example("abcdef", "ghi"), example("abcdefghij", "k")]  # 5, 9 and 11 tokens


def test_an_example_of_exactly_max_length_fits() -> None:
    fitted = fit(LONG, 11)
    assert fitted.kept == LONG and fitted.report() == "3 of 3 examples, 25 tokens, 9 of them targets"


def test_long_examples_are_refused_by_file_line_and_length(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *({"prompt": "a" * n, "completion": "b"} for n in (3, 9, 20)))
    with pytest.raises(
        ValueError,
        match=r"a\.jsonl, line 2: 10 tokens exceed max_length=8 \(2 of 3 examples are too long, the longest has "
        r"21\); .*--max-length .*--on-long truncate .*--on-long skip \(FinetuneOptions\(on_long=…\) in Python\)$",
    ):
        load_source([path], TOKENIZER, PLAIN, max_length=8, batch_size=1)


def test_truncation_keeps_the_beginning_and_reports_what_it_took() -> None:
    fitted = fit(LONG, 7, "truncate")
    assert fitted.kept[0] is LONG[0] and len(fitted.kept) == 2
    assert fitted.kept[1].tokens.tolist() == TOKENIZER.encode("abcdefg")
    assert fitted.kept[1].targets.tolist() == [IGNORE] * 5 + TOKENIZER.encode("gh")  # no end: it was not reached
    assert (fitted.read, fitted.truncated, fitted.cut_away, fitted.skipped) == (3, 1, 1, 0)
    assert fitted.report().splitlines() == [
        "2 of 3 examples, 12 tokens, 5 of them targets",
        "1 longer than max_length=7: truncated at the end",
        "1 longer than max_length=7: dropped, as truncation would remove the entire completion",
    ]


def test_skipping_leaves_long_ones_out_and_reports_it() -> None:
    fitted = fit(LONG, 9, "skip")
    assert fitted.kept == LONG[:2]
    assert (fitted.read, fitted.truncated, fitted.cut_away, fitted.skipped) == (3, 0, 0, 1)
    assert fitted.report().splitlines()[1:] == ["1 longer than max_length=9: skipped"]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), min_size=1), st.integers(1, 18))
def test_no_example_is_cut_or_dropped_without_being_counted(sizes: list[tuple[int, int]], max_length: int) -> None:
    examples = [example("p" * p, "c" * c) for p, c in sizes]
    for on_long in ("truncate", "skip"):
        try:
            fitted = fit(examples, max_length, on_long)
        except ValueError as error:
            assert f"none of the {len(examples)} examples remain" in str(error)
            assert all(
                e.cut(max_length).n_targets == 0 or (on_long == "skip" and len(e) > max_length) for e in examples
            )
            continue
        assert fitted.read == len(examples)
        assert all(len(e) <= max_length and e.n_targets > 0 for e in fitted.kept)
        assert sum(e not in examples for e in fitted.kept) == fitted.truncated
        untouched = sum(len(e) <= max_length for e in examples)
        assert untouched + fitted.truncated == len(fitted.kept)


def test_unknown_choices_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown on_long 'cut'; choose from refuse, truncate, skip"):
        fit(LONG, 8, "cut")
    with pytest.raises(ValueError, match="max_length must be >= 1, got 0"):
        fit(LONG, 0)


def test_where_no_example_fits_what_can_be_done_does_not_depend_on_the_model() -> None:
    with pytest.raises(ValueError, match="none of the 3 examples remain") as caught:
        fit(LONG, 1, "skip")
    shortest = min(len(e) for e in LONG)
    assert str(caught.value).endswith(
        f"remain with max_length=1, on_long='skip': the shortest has {shortest} tokens; shorten them, pass --on-long "
        f"truncate, or raise --max-length (up to the model's n_positions)"
    )
    with pytest.raises(ValueError, match="every prompt alone is that long, so that no completion is left; shorten the"):
        fit([example("abcdef", "g")], 2, "truncate")


# packing


def naive_first_fit(lengths: list[int], capacity: int) -> list[list[int]]:
    rows: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        for row in rows:
            if sum(lengths[j] for j in row) + lengths[i] <= capacity:
                row.append(i)
                break
        else:
            rows.append([i])
    return rows


@given(st.lists(st.integers(1, 20), min_size=1, max_size=40), st.integers(20, 50))
def test_packing_is_first_fit_decreasing(lengths: list[int], capacity: int) -> None:
    assert list(first_fit_decreasing(lengths, capacity)) == naive_first_fit(lengths, capacity)


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=20), st.integers(9, 30), st.integers(0, 9), st.integers(1, 7),
    st.booleans(),
)  # fmt: skip
def test_every_example_appears_once_per_epoch(
    lengths: list[int], max_length: int, seed: int, batch_size: int, pack: bool
) -> None:
    examples = numbered(lengths)
    rows = Rows(examples, max_length, seed, pack)
    for epoch in range(2):
        seen: list[int] = []
        for first in range(epoch * len(rows), (epoch + 1) * len(rows), batch_size):
            count = min(batch_size, (epoch + 1) * len(rows) - first)
            tokens, targets, segments = rows.sample(first, count)
            assert tokens.shape[1] <= max_length
            if segments is None:
                segments = np.where(tokens == 0, 1, 0)
            for b in range(count):
                for segment in np.unique(segments[b]):
                    piece, said = tokens[b, segments[b] == segment], targets[b, segments[b] == segment]
                    if (piece == 0).all():  # padding
                        assert (said == IGNORE).all()
                        continue
                    number = int(said[-1]) - 1000
                    assert piece.tolist() == examples[number].tokens.tolist()
                    assert said.tolist() == examples[number].targets.tolist()
                    seen.append(number)
        assert sorted(seen) == list(range(len(examples)))


def test_padding_has_a_segment_of_its_own_and_no_targets() -> None:
    rows = Rows(numbered([4, 3, 2, 5]), 8, seed=0)
    tokens, targets, segments = rows.batch([0, 1])
    assert tokens.tolist() == [[1, 2, 3, 4, 5, 1, 2, 3], [1, 2, 3, 4, 1, 2, 0, 0]]
    assert segments is not None and segments.tolist() == [[0] * 5 + [1] * 3, [0] * 4 + [1] * 2 + [2] * 2]
    assert targets[0].tolist() == [IGNORE] * 4 + [1003] + [IGNORE] * 2 + [1001]
    assert targets[1].tolist() == [IGNORE] * 3 + [1000] + [IGNORE, 1002] + [IGNORE] * 2


def test_without_packing_rows_are_padded_to_the_longest_of_their_batch() -> None:
    rows = Rows(numbered([4, 3, 2, 5]), 8, seed=0, pack=False)
    tokens, targets, segments = rows.batch([1, 2])
    assert segments is None and tokens.tolist() == [[1, 2, 3], [1, 2, 0]]
    assert targets.tolist() == [[IGNORE, IGNORE, 1001], [IGNORE, 1002, IGNORE]]


def test_a_row_too_short_for_an_example_is_refused() -> None:
    with pytest.raises(ValueError, match="an example of 9 tokens does not fit into rows of 8"):
        Rows(numbered([3, 9]), 8, seed=0)
    with pytest.raises(ValueError, match="need at least 1 example, got 0"):
        Rows([], 8, seed=0)


# the split and the source


@given(st.integers(2, 60), st.floats(0.001, 0.999), st.integers(0, 20))
def test_the_split_is_a_partition_with_no_empty_side(n: int, fraction: float, seed: int) -> None:
    examples = numbered([1] * n)
    train, held_out = split_examples(examples, fraction, seed)
    assert sorted(int(e.where) for e in [*train, *held_out]) == list(range(n))
    assert train and held_out and abs(len(held_out) - n * fraction) <= 1
    assert split_examples(examples, fraction, seed) == (train, held_out)


def test_one_example_cannot_be_split() -> None:
    with pytest.raises(
        ValueError, match=r"^0: cannot split 1 example into training and validation; provide at least 2, or a"
    ):
        split_examples(numbered([1]), 0.1, 0)
    with pytest.raises(ValueError, match=r"validation must be in \(0, 1\), got 1\.5"):
        split_examples(numbered([1, 1]), 1.5, 0)


def sums(path: Path, n: int = 40) -> Path:
    return write(path, *({"prompt": f"{i}+1=", "completion": str(i + 1)} for i in range(n)))


def test_a_source_always_gives_the_same_batches(tmp_path: Path) -> None:
    path = sums(tmp_path / "a.jsonl")

    def source(seed: int = 3) -> SftSource:
        return load_source([path], TOKENIZER, PLAIN, max_length=24, batch_size=2, accumulate=2, seed=seed)

    whole = [source().microbatches(step) for step in range(12)]
    one = source()
    for step in reversed(range(12)):  # a resumed run begins anywhere
        for a, b in zip(one.microbatches(step), whole[step], strict=True):
            assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))
    assert source().fingerprint() == one.fingerprint() != source(4).fingerprint()
    assert any(not np.array_equal(a.tokens, b.tokens) for a, b in zip(source(4).microbatches(0), whole[0], strict=True))


def test_the_steps_of_an_epoch_learn_every_example_once(tmp_path: Path) -> None:
    path = sums(tmp_path / "a.jsonl", 32)
    source = load_source(
        [path], TOKENIZER, PLAIN, max_length=8, batch_size=2, accumulate=4, validation=0.25, pack=False
    )
    assert source.rows == 24 and source.steps_for(1) == 3
    for epoch in range(2):
        batches = [b for step in range(3 * epoch, 3 * epoch + 3) for b in source.microbatches(step)]
        seen = [tuple(t[t != IGNORE]) for b in batches for t in b.targets]
        assert sorted(seen) == sorted(tuple(e.targets[e.targets != IGNORE]) for e in source.train.examples)
        assert len(set(seen)) == 24


def test_the_fingerprint_tells_other_data_other_masks_and_another_packing() -> None:
    def fingerprint(made: Example, **how: bool) -> str:
        return SftSource(Rows([made], 8, 0, **how), Rows(LONG[:1], 8, 0), 1).fingerprint()

    made = [example("a", "bc"), example("ab", "c"), example("a", "bd")]
    assert len({*map(fingerprint, made), fingerprint(made[0], pack=False)}) == 4
    assert fingerprint(example("a", "bc")) == fingerprint(made[0])


def test_a_source_counts_its_rows_targets_and_steps(tmp_path: Path) -> None:
    source = load_source([sums(tmp_path / "a.jsonl")], TOKENIZER, PLAIN, max_length=24, batch_size=2, accumulate=2)
    assert len(source.train.examples) == 36 and len(source.held_out.examples) == 4
    counted = sum((source.train.batch([r]).targets != IGNORE).sum() for r in range(source.rows))
    assert counted == sum(e.n_targets for e in source.train.examples)
    assert source.rows == len(source.train.plan) < 36
    assert source.steps_for(1) == -(-source.rows // 4) and source.steps_for(4) == source.rows
    assert source.steps_for(1e-6) == 1
    assert [source.steps_for(rows / source.rows) for rows in (12, 13, 16)] == [3, 4, 4]  # 4 rows per step
    with pytest.raises(ValueError, match="epochs must be > 0, got 0"):
        source.steps_for(0)
    format_, first, second = source.report().splitlines()
    assert format_ == "prompts and completions, 40 examples" and first.startswith("40 of 40 examples, ")
    width = source.train.width
    full = sum(map(len, source.train.examples)) / (source.rows * width)
    assert second == (
        f"36 examples for training, 4 for validation; {source.rows} rows of up to {width} tokens, {full:.0%} full"
    )


def test_validation_uses_all_rows_up_to_its_limit(tmp_path: Path) -> None:
    path, apart = sums(tmp_path / "a.jsonl"), sums(tmp_path / "b.jsonl", 9)
    settings = {"max_length": 16, "batch_size": 4, "pack": False, "validation_files": [apart]}
    source = load_source([path], TOKENIZER, PLAIN, **settings)
    assert len(source.train.examples) == 40
    assert "\nvalidation: prompts and completions, 9 examples\n9 of 9 examples, " in source.report()
    batches = list(source.validation())
    assert [len(b.tokens) for b in batches] == [4, 4, 1]
    assert sum((b.targets != IGNORE).sum() for b in batches) == sum(e.n_targets for e in source.held_out.examples)
    few = load_source([path], TOKENIZER, PLAIN, **settings, eval_rows=3)
    assert [b.tokens.tolist() for b in few.validation()] == [b.tokens.tolist() for b in few.validation()]
    assert [len(b.tokens) for b in few.validation()] == [3]


def test_the_sample_prompt_is_that_of_the_first_validation_example(tmp_path: Path) -> None:
    source = load_source([sums(tmp_path / "a.jsonl")], TOKENIZER, PLAIN, max_length=16, batch_size=1)
    prompt = source.prompt()
    assert prompt is not None and TOKENIZER.decode(prompt.tolist()).endswith("+1=")
    assert prompt.tolist() == source.held_out.examples[0].prompt.tolist()
    bare = encode([Part("", False), Part("ab", True)], Tokenizer(TOKENIZER.backend, eos=None), "here")
    assert SftSource(Rows([bare], 8, 0), Rows([bare], 8, 0), 1).prompt() is None


def test_truncated_examples_are_in_the_sources_report(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *({"prompt": "a" * n, "completion": "bc"} for n in (2, 3, 7, 30)))
    source = load_source([path], TOKENIZER, PLAIN, max_length=8, batch_size=1, on_long="truncate")
    assert source.report().splitlines()[1:4] == [
        "3 of 4 examples, 17 tokens, 8 of them targets",
        "1 longer than max_length=8: truncated at the end",
        "1 longer than max_length=8: dropped, as truncation would remove the entire completion",
    ]


def test_a_model_learns_the_completions_in_the_training_loop(tmp_path: Path) -> None:
    lines = [{"prompt": f"{a}{b}>", "completion": f"{b}"} for a in "abcd" for b in "abcd"]
    data = write(tmp_path / "a.jsonl", *lines)
    options = TrainingOptions(steps=60, batch_size=2, lr=1e-2, warmup=5, eval_every=60, sample_tokens=0, engine="numpy")
    config = onfoot.GPT2Config(n_layer=1, n_head=2, n_embd=16, n_positions=32, vocab_size=TOKENIZER.size)
    model = onfoot.create(config, seed=0, engine="numpy")
    source = load_source([data], TOKENIZER, PLAIN, max_length=32, batch_size=2, validation_files=[data])
    before = np.mean([model.loss(b.tokens, b.targets, segments=b.segments) for b in source.validation()])
    (tmp_path / "run").mkdir()
    outcome = Trainer(model, source, options, out=tmp_path / "run").run()
    assert before > 5 and outcome.validation_loss is not None and outcome.validation_loss < 0.5 * before
