"""Data as it comes: every format gives the ids and masks that transformers gives for the same example.

The oracle for conversations is `apply_chat_template` with {% generation %} marks around the answers, or, for a
conversation with its completion, the difference of two renderings, which is TRL's rule; for texts it is the tokenizer's
own call. Files are written by the libraries that people use: csv, json, pyarrow and datasets.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from datasets import Dataset, DatasetDict
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from onfoot.data import records as records_module
from onfoot.data.preferences import read_preferences
from onfoot.data.records import ReadLog, first_record, records
from onfoot.data.sft_examples import read_example, read_examples
from onfoot.formats.chat import ChatTemplate
from onfoot.formats.tokenizer import Tokenizer, bpe_tokenizer, byte_tokenizer

MARKED = (
    "{{ bos_token }}{% if tools %}<|tools|>{{ tools | tojson }}\n{% endif %}{% for m in messages %}"
    "{% if m.role == 'assistant' %}<|assistant|>\n{% generation %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<|call|>{{ call.function.name }}{{ call.function.arguments | tojson }}"
    "{% endfor %}"
    "{{ eos_token }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}<|{{ m.role }}|>\n{{ m.content | trim }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
TURNS = [
    {"role": "system", "content": " Be brief. "},
    {"role": "user", "content": "How many is one and one?"},
    {"role": "assistant", "content": "Two,  grüße 🤗"},
    {"role": "user", "content": "And one more?"},
    {"role": "assistant", "content": "Three."},
]
CALLS = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "sky", "arguments": {"city": "Oslo"}}}]},
    {"role": "tool", "content": '{"sky": "blue"}'},
    {"role": "assistant", "content": "Blue."},
]
INPUT = "Input:\n7\n\n"
TOOLS = [{"type": "function", "function": {"name": "sky", "description": "The sky's colour."}}]
WORDS = ["the cat sat on the mat, and one and one is two. ", "How many? Three grüße! ", "user assistant system\n"] * 40


class Pair:
    """A tokenizer of ours, and the same in transformers."""

    def __init__(self, folder: Path, source: str, make: Callable[[], Tokenizer]) -> None:
        folder.mkdir(exist_ok=True)
        self.ours = make()
        self.ours.save(folder, 512)
        self.template = ChatTemplate(source, bos="", eos=self.ours.eos or "")
        self.template.save(folder)
        self.ours = Tokenizer.load(folder)
        self.template = ChatTemplate.find(folder)
        self.theirs = AutoTokenizer.from_pretrained(folder)

    def masked(self, messages: list[dict[str, Any]], tools: Any = None) -> tuple[list[int], list[int]]:
        out = self.theirs.apply_chat_template(
            messages, tools=tools, return_dict=True, return_assistant_tokens_mask=True, add_generation_prompt=False
        )
        return list(out["input_ids"]), list(out["assistant_masks"])

    def read(self, *values: Any, folder: Path) -> list[Any]:
        path = folder / "read.jsonl"
        path.write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")
        return read_examples([path], self.ours, self.template)


@pytest.fixture(scope="module", params=["bytes", "bpe"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    make = {"bytes": byte_tokenizer, "bpe": lambda: bpe_tokenizer(iter(WORDS), 400)}[request.param]
    return Pair(tmp_path_factory.mktemp("pair"), MARKED, make)


# ids and masks


@pytest.mark.parametrize("n", [2, 3, 5])
def test_conversations_have_the_ids_and_masks_of_transformers(pair: Pair, n: int, tmp_path: Path) -> None:
    messages = TURNS[1:3] if n == 2 else TURNS[:n]
    ids, mask = pair.masked(messages)
    (made,) = pair.read({"messages": messages}, folder=tmp_path)
    assert made.ids.tolist() == ids
    assert made.learn.astype(int).tolist() == mask
    assert 0 < sum(mask) < len(mask)


def test_every_answer_of_a_long_conversation_is_masked_as_in_transformers(pair: Pair, tmp_path: Path) -> None:
    messages = [TURNS[0], *(turn for _ in range(4) for turn in TURNS[1:])]
    ids, mask = pair.masked(messages)
    (made,) = pair.read({"messages": messages}, folder=tmp_path)
    assert (made.ids.tolist(), made.learn.astype(int).tolist()) == (ids, mask)
    assert sum(a < b for a, b in pairwise(mask)) == 8  # eight answers begin


@settings(max_examples=40, deadline=None)
@given(
    texts=st.lists(
        st.text(st.characters(codec="utf-8", exclude_characters="\ufdd0\ufdd1"), max_size=12), min_size=4, max_size=4
    )
)
def test_any_conversation_has_the_ids_and_masks_of_transformers(pair: Pair, texts: list[str]) -> None:
    roles = ("user", "assistant", "user", "assistant")
    messages = [{"role": role, "content": text + "."} for role, text in zip(roles, texts, strict=True)]
    made = read_example({"messages": messages}, pair.template, pair.ours, "here")
    assert (made.ids.tolist(), made.learn.astype(int).tolist()) == pair.masked(messages)


def test_sharegpt_turns_are_the_messages_of_the_same_meaning(pair: Pair, tmp_path: Path) -> None:
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    turns = [{"from": names[turn["role"]], "value": turn["content"]} for turn in TURNS]
    apart = {"system": turns[0]["value"], "conversations": turns[1:]}
    expected = pair.masked(TURNS)
    for made in pair.read(
        {"conversations": turns}, apart, {"conversations": TURNS}, {"messages": TURNS}, folder=tmp_path
    ):
        assert (made.ids.tolist(), made.learn.astype(int).tolist()) == expected


def test_tool_calls_tool_results_and_tools_are_rendered_as_in_transformers(pair: Pair, tmp_path: Path) -> None:
    ids, mask = pair.masked(CALLS, TOOLS)
    values = [{"messages": CALLS, "tools": tools} for tools in (TOOLS, json.dumps(TOOLS))]
    for made in pair.read(*values, folder=tmp_path):
        assert (made.ids.tolist(), made.learn.astype(int).tolist()) == (ids, mask)
    assert "<|call|>sky" in pair.theirs.decode([i for i, learn in zip(ids, mask, strict=True) if learn])


def test_a_prompt_of_messages_is_masked_by_the_difference_of_two_renderings(pair: Pair, tmp_path: Path) -> None:
    """TRL's rule: the prompt with the start of an answer, and the whole; what the whole has more is learned."""
    prompt, completion = TURNS[:4], TURNS[4:]
    before = pair.theirs.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
    whole = pair.theirs.apply_chat_template([*prompt, *completion], return_dict=False)
    assert whole[: len(before)] == before
    (made,) = pair.read({"prompt": prompt, "completion": completion}, folder=tmp_path)
    assert made.ids.tolist() == whole
    assert made.learn.tolist() == [False] * len(before) + [True] * (len(whole) - len(before))  # the first answer is not


def test_texts_have_the_ids_of_the_tokenizer_and_its_eos_and_all_are_targets(pair: Pair, tmp_path: Path) -> None:
    texts = ["the cat sat", "grüße 🤗\n", "ends itself<|endoftext|>"]
    for text, made in zip(texts, pair.read(*({"text": text} for text in texts), folder=tmp_path), strict=True):
        whole = text if text.endswith("<|endoftext|>") else text + "<|endoftext|>"
        assert made.ids.tolist() == pair.theirs(whole)["input_ids"]
        assert made.targets.tolist() == made.ids[1:].tolist()


def test_prompts_and_completions_have_the_ids_of_the_tokenizer(pair: Pair, tmp_path: Path) -> None:
    """TRL's rule: the ids of both together, of which the prompt's own come first and are not learned."""
    for prompt, completion in (("How many?\n", "Three."), ("the cat", " sat on the mat")):
        before, whole = (
            pair.theirs(prompt)["input_ids"],
            pair.theirs(prompt + completion + "<|endoftext|>")["input_ids"],
        )
        assert whole[: len(before)] == before
        (made,) = pair.read({"prompt": prompt, "completion": completion}, folder=tmp_path)
        assert made.ids.tolist() == whole
        assert made.learn.tolist() == [False] * len(before) + [True] * (len(whole) - len(before))


@pytest.mark.parametrize("given", ["7", "", None])
def test_alpaca_records_have_the_ids_and_masks_of_transformers(pair: Pair, given: str | None, tmp_path: Path) -> None:
    value = {"instruction": "Add one.", "input": given, "output": "8, grüße"}
    prompt = f"Instruction:\nAdd one.\n\n{INPUT if given else ''}Answer:\n"
    before = pair.theirs(prompt)["input_ids"]
    whole = [*before, *pair.theirs("8, grüße<|endoftext|>")["input_ids"]]
    (made,) = pair.read(value, folder=tmp_path)
    assert (made.ids.tolist(), made.learn.tolist()) == (whole, [i >= len(before) for i in range(len(whole))])
    question = "Add one.\n\n7" if given else "Add one."
    expected = pair.masked([{"role": "user", "content": question}, {"role": "assistant", "content": "8, grüße"}])
    made = read_example(value, pair.template, pair.ours, "here", templated=True)
    assert (made.ids.tolist(), made.learn.astype(int).tolist()) == expected


def test_a_template_without_marks_learns_the_same_answers_with_their_line_ends(tmp_path: Path) -> None:
    plain = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    marked, unmarked = (Pair(tmp_path / str(i), source, byte_tokenizer) for i, source in enumerate((MARKED, plain)))
    (first,), (second,) = (p.read({"messages": TURNS}, folder=tmp_path) for p in (marked, unmarked))
    n = len(second.ids)
    assert first.ids[:n].tolist() == second.ids.tolist()
    more = second.learn & ~first.learn[:n]
    assert (
        set(second.ids[more].tolist()) == set(byte_tokenizer().encode("\n"))
        and not (first.learn[:n] & ~second.learn).any()
    )


def test_marks_are_found_where_a_template_rewrites_earlier_turns(tmp_path: Path) -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content if loop.last else m.content.split('</think>')[-1] }}{{ eos_token }}{% endgeneration %}"
        "{% else %}{{ m.role }}:{{ m.content }}\n{% endif %}{% endfor %}"
    )
    pair = Pair(tmp_path / "t", source, byte_tokenizer)
    messages = [TURNS[1], {"role": "assistant", "content": "hm</think>1"}, TURNS[3], TURNS[4]]
    (made,) = pair.read({"messages": messages}, folder=tmp_path)
    assert (made.ids.tolist(), made.learn.astype(int).tolist()) == pair.masked(messages)


def test_a_message_with_the_character_of_a_mark_is_refused(tmp_path: Path) -> None:
    pair = Pair(tmp_path / "t", MARKED, byte_tokenizer)
    messages = [TURNS[1], {"role": "assistant", "content": "a\ufdd1b"}]
    with pytest.raises(
        ValueError, match=r"read\.jsonl, line 1: a message has the character U\+FDD0 or U\+FDD1; remove it"
    ):
        pair.read({"messages": messages}, folder=tmp_path)


def test_a_role_that_the_template_leaves_out_is_named_with_file_and_line(tmp_path: Path) -> None:
    source = "{% for m in messages if m.role in ('user', 'assistant') %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
    pair = Pair(tmp_path / "t", source, byte_tokenizer)
    with pytest.raises(
        ValueError, match=r"read\.jsonl, line 1: the chat template of .* leaves out message 3 \(role tool\)"
    ):
        pair.read({"messages": CALLS}, folder=tmp_path)
    raising = "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{% endfor %}"
    pair = Pair(tmp_path / "r", raising, byte_tokenizer)
    with pytest.raises(ValueError, match=r"read\.jsonl, line 1: the chat template of .* failed: no tools"):
        pair.read({"messages": CALLS}, folder=tmp_path)


# files

ROWS = [
    {"instruction": 'Say "a,b"\nand more', "input": "", "output": "a, b"},
    {"instruction": "Grüße 🤗", "input": "x\ty", "output": "1\n2"},
    {"instruction": "Third", "input": " padded ", "output": "three"},
]
CHATS = [{"messages": TURNS}, {"messages": TURNS[1:3]}, {"messages": TURNS[1:]}]
TEXTS = [{"text": "one, two"}, {"text": 'three\n"four"'}, {"text": "🤗"}]
KINDS = {"Alpaca": ROWS, "messages": CHATS, "text": TEXTS}


def write_csv(path: Path, rows: list[dict[str, Any]], delimiter: str = ",") -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter=delimiter)
        writer.writeheader()
        nested = ({k: v if isinstance(v, str) else json.dumps(v) for k, v in row.items()} for row in rows)
        writer.writerows(nested)


WRITERS: dict[str, Callable[[Path, list[dict[str, Any]]], Any]] = {
    "a.jsonl": lambda path, rows: path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"),
    "a.json": lambda path, rows: path.write_text(json.dumps(rows, indent=2, ensure_ascii=False), encoding="utf-8"),
    "dense.json": lambda path, rows: path.write_text(json.dumps(rows, separators=(",", ":")), encoding="utf-8"),
    "lines.json": lambda path, rows: path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"),
    "a.csv": write_csv,
    "a.tsv": lambda path, rows: write_csv(path, rows, "\t"),
    "a.parquet": lambda path, rows: pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist(rows), path, row_group_size=2
    ),
    "saved": lambda path, rows: Dataset.from_list(rows).save_to_disk(path, num_shards=2),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", WRITERS)
def test_every_kind_of_file_has_the_same_examples(tmp_path: Path, name: str, kind: str) -> None:
    rows, tokenizer, log = KINDS[kind], byte_tokenizer(), ReadLog()
    WRITERS[name](tmp_path / name, rows)
    examples = read_examples([tmp_path / name], tokenizer, ChatTemplate(), log)
    expected = [read_example(row, ChatTemplate(), tokenizer, "here") for row in rows]
    assert [e.ids.tolist() for e in examples] == [e.ids.tolist() for e in expected]
    assert [e.learn.tolist() for e in examples] == [e.learn.tolist() for e in expected]
    said = {
        "Alpaca": "Alpaca instructions",
        "messages": "conversations",
        "text": "texts, in which every token is a target",
    }
    assert log.report() == f"{said[kind]}, 3 examples"


def test_examples_are_named_by_line_entry_or_row(tmp_path: Path) -> None:
    words = {"a.jsonl": ["line 1", "line 2", "line 3"], "a.json": ["entry 1", "entry 2", "entry 3"],
             "a.csv": ["line 2", "line 4", "line 6"], "a.parquet": ["row 1", "row 2", "row 3"],
             "saved": ["row 1", "row 2", "row 3"]}  # fmt: skip
    for name, expected in words.items():
        WRITERS[name](tmp_path / name, ROWS)
        assert [where for where, _ in records(tmp_path / name)] == [f"{tmp_path / name}, {word}" for word in expected]


JSON_VALUES = st.text(max_size=9) | st.integers() | st.none() | st.lists(st.booleans(), max_size=3)


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.dictionaries(st.text(max_size=3), JSON_VALUES, max_size=3), max_size=6),
    block=st.integers(4, 40),
    indent=st.none() | st.integers(0, 2),
    ascii_only=st.booleans(),
)  # fmt: skip
def test_a_json_list_is_read_entry_by_entry_whatever_the_blocks(
    values: list[Any], block: int, indent: int | None, ascii_only: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("json") / "a.json"
    text = json.dumps(values, indent=indent, ensure_ascii=ascii_only)
    path.write_bytes(text.encode("utf-8", errors="replace"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records_module, "BLOCK", block)
        assert [value for _, value in records(path)] == json.loads(path.read_bytes())


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.text(st.characters(codec="utf-8", exclude_characters="\0\r"), max_size=9),
            st.text(st.characters(codec="utf-8", exclude_characters="\0\r"), min_size=1, max_size=9),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_a_csv_file_is_read_as_it_was_written(rows: list[tuple[str, str]]) -> None:
    import tempfile

    values = [{"instruction": a, "output": b} for a, b in rows]
    with tempfile.TemporaryDirectory() as folder:
        write_csv(Path(folder) / "a.csv", values)
        assert [value for _, value in records(Path(folder) / "a.csv")] == values


def test_a_bom_before_json_and_csv_makes_no_difference(tmp_path: Path) -> None:
    for name in ("a.json", "a.csv", "a.jsonl"):
        WRITERS[name](tmp_path / name, ROWS)
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + (tmp_path / name).read_bytes())
        assert [value for _, value in records(tmp_path / name)] == ROWS


def test_the_split_of_a_dataset_dict_must_be_named(tmp_path: Path) -> None:
    DatasetDict({"train": Dataset.from_list(ROWS), "test": Dataset.from_list(ROWS[:1])}).save_to_disk(tmp_path / "both")
    with pytest.raises(ValueError, match=r"both has several splits; give one of them: .*both/train, .*both/test"):
        read_examples([tmp_path / "both"], byte_tokenizer(), ChatTemplate())
    assert len(read_examples([tmp_path / "both" / "test"], byte_tokenizer(), ChatTemplate())) == 1


def test_a_selection_of_a_dataset_is_read_in_its_own_order(tmp_path: Path) -> None:
    Dataset.from_list(ROWS * 300).select([5, 0, 601]).save_to_disk(tmp_path / "some")
    assert [value for _, value in records(tmp_path / "some")] == [ROWS[2], ROWS[0], ROWS[1]]


def test_columns_that_are_null_in_a_row_are_absent(tmp_path: Path) -> None:
    rows = [{"instruction": "a", "input": None, "output": "b"}, {"instruction": "a", "input": "c", "output": "d"}]
    WRITERS["a.parquet"](tmp_path / "a.parquet", rows)
    assert first_record(tmp_path / "a.parquet") == {"instruction": "a", "output": "b"}
    WRITERS["a.parquet"](tmp_path / "b.parquet", [{"messages": CALLS}])  # tool_calls is null in most messages
    assert first_record(tmp_path / "b.parquet") == {"messages": CALLS}


def test_a_folder_may_have_files_and_saved_datasets_inside(tmp_path: Path) -> None:
    for name in ("a.jsonl", "a.csv", "saved"):
        (tmp_path / "in" / name).parent.mkdir(exist_ok=True)
        WRITERS[name](tmp_path / "in" / name, ROWS)
    found = [e.where.removeprefix(str(tmp_path)) for e in read_examples([tmp_path], byte_tokenizer(), ChatTemplate())]
    words = ("a.csv, line 2", "a.csv, line 4", "a.csv, line 6", "a.jsonl, line 1", "a.jsonl, line 2", "a.jsonl, line 3")
    assert found == [f"/in/{word}" for word in (*words, "saved, row 1", "saved, row 2", "saved, row 3")]


# bad input

GOOD = '{"prompt": "p", "completion": "c"}\n'


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", "5", r"a\.json must have a list of objects"),
        ("a.json", "[]", r"a\.json has no records"),
        ("a.json", '{"data": [\n' + GOOD + "]}", r"a\.json must have a list of objects"),
        ("a.json", '{\n  "prompt": "p",\n  "completion": "c"\n}', r"a\.json must have a list of objects"),
        ("a.json", "[{}, 5]", r"a\.json, entry 1: found the fields \(none\)"),
        ("a.json", f"[{GOOD}", r"a\.json, entry 1: the list has no end; is the file truncated\?"),
        ("a.json", f"[{GOOD},]", r"a\.json, entry 2: not valid JSON: Expecting value"),
        ("a.json", f"[{GOOD} {GOOD}]", r"a\.json, entry 1: expected a comma or the end of the list"),
        ("a.json", f'[{GOOD}, {{"prompt": "x]', r"a\.json, entry 2: not valid JSON: Unterminated string"),
        ("a.json", f'[{GOOD}, {{"prompt": x}}, {GOOD}]', r"a\.json, entry 2: not valid JSON: Expecting value"),
        ("a.json", f'[{GOOD}, {{"prompt": "a", "prompt": "b"}}]', r"a\.json, entry 2: not valid JSON: duplicate key"),
        ("a.json", "[" * 100_000, r"a\.json, entry 1: nested too deeply"),
        ("a.csv", "prompt,answer\na,b\n", r"a\.csv, line 2: found \"prompt\" but no \"completion\""),
        ("a.csv", "a,b\n1,2\n", r"a\.csv, line 2: found the fields a, b; expected"),
        ("a.csv", "prompt,completion\na\n", r"a\.csv, line 2: 1 fields, but the first line names 2"),
        ("a.csv", 'prompt,completion\na,"b" c\n', r"a\.csv, line 2: not valid CSV: ',' expected after '\"'"),
        ("a.csv", 'prompt,"completion" x\na,b\n', r"a\.csv, line 1: not valid CSV: ',' expected after '\"'"),
        ("a.csv", 'prompt,completion\n1,"open\n2,"b"\n', r"a\.csv, lines 2 to 3: not valid CSV: ',' expected"),
        ("a.csv", 'prompt,completion\n"1\n2"\n', r"a\.csv, lines 2 to 3: 1 fields, but the first line names 2"),
        ("a.csv", "prompt,prompt\na,b\n", r"a\.csv, line 1: the column 'prompt' occurs twice"),
        ("a.csv", "prompt,completion\n", r"a\.csv has no records"),
        ("a.csv", b"prompt,completion\na,\xff\n", r"a\.csv, line 2 is not valid UTF-8: byte 0xff at position 20"),
        ("a.csv", 'messages\n"[{"\n', r'a\.csv, line 2: "messages": not valid JSON'),
        ("a.parquet", "no table", r"a\.parquet cannot be read: "),
        (
            "a.jsonl",
            '{"conversations": [{"from": "cat", "value": "x"}]}',
            r"a\.jsonl, line 1: turn 1 is from 'cat'; choose",
        ),
        ("a.jsonl", '{"conversations": []}', r'line 1: "conversations" must be a non-empty list'),
        ("a.jsonl", '{"conversations": [{"value": "x"}]}', r'line 1: turn 1 must be an object with "from" and "value"'),
        ("a.jsonl", '{"prompt": [], "completion": []}', r'line 1: "prompt" must be a non-empty list'),
        ("a.jsonl", '{"prompt": "x", "completion": []}', r'line 1: "completion" must be a string, got \[\]'),
        ("a.jsonl", '{"text": ""}', "line 1: no targets"),
        ("a.jsonl", '{"text": 5}', 'line 1: "text" must be a string, got 5'),
        ("a.jsonl", '{"messages": [{"role": "user", "content": "x"}], "tools": 5}', 'line 1: "tools" must be a list'),
        ("a.jsonl", GOOD + '{"text": "x"}', r"line 2: a text, but the file begins with a prompt with its answer"),
    ],
)
def test_bad_files_are_named_with_the_place_and_the_reason(
    tmp_path: Path, name: str, content: str | bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message) as caught:
        read_examples([tmp_path / name], byte_tokenizer(), ChatTemplate())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "after", ["hello", f"[{GOOD}]", " \n\n]", f",{GOOD}", f"{' ' * 200}5"], ids=["text", "list", "]", ",", "far away"]
)
@pytest.mark.parametrize("entries", ["", GOOD, f"{GOOD},{GOOD}"], ids=["none", "one", "two"])
@pytest.mark.parametrize("block", [4, 1 << 16])
def test_nothing_may_follow_the_list_of_a_json_file(
    tmp_path: Path, entries: str, after: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records_module, "BLOCK", block)
    path = tmp_path / "a.json"
    path.write_text(f"[{entries}]{after}")
    for skip_bad in (False, True):
        with pytest.raises(ValueError, match=r"a\.json: after the end of the list comes '.*; put all entries into one"):
            read_examples([path], byte_tokenizer(), ChatTemplate(), ReadLog(skip_bad))
    path.write_text(f"[{GOOD}] \n\t" + " " * 99)
    assert len(read_examples([path], byte_tokenizer(), ChatTemplate())) == 1


ROW = "p,c\n"


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (f'{ROW}1,"open\n{ROW * 9}', 3),
        (f'{ROW}1,"two\nlines"\n{ROW}1,"open\n{ROW}', 6),
        (f'{ROW}"two\nlines","open\n{ROW}', 4),
        (f'{ROW}1,"a ""word""\n{ROW * 2}', 3),
        (f'{ROW}1,"', 3),
        (f'{ROW}1,"open', 3),
        (f'{ROW}1,"open\n{ROW}\n\n', 3),
    ],
)
def test_a_quote_that_is_not_closed_is_no_bad_record_to_skip(tmp_path: Path, content: str, line: int) -> None:
    path = tmp_path / "a.csv"
    for end, bom in (("\n", ""), ("\r\n", "\ufeff")):
        path.write_bytes((bom + "prompt,completion\n" + content).replace("\n", end).encode())
        for skip_bad in (False, True):
            with pytest.raises(ValueError, match=rf"a\.csv, line {line}: the quote that opens here is not closed, so"):
                read_examples([path], byte_tokenizer(), ChatTemplate(), ReadLog(skip_bad))


def test_a_field_of_csv_beyond_the_limit_is_no_bad_record_to_skip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records_module, "TEXT_BYTES", 100)
    (tmp_path / "a.csv").write_text(f'prompt,completion\n{ROW}1,"open\n{ROW * 99}')
    with pytest.raises(ValueError, match=r"a\.csv, lines 3 to \d+: not valid CSV: .*\(100\); is a quote not closed\?"):
        read_examples([tmp_path / "a.csv"], byte_tokenizer(), ChatTemplate(), ReadLog(skip_bad=True))


def test_a_bad_row_of_csv_takes_no_other_row_with_it(tmp_path: Path) -> None:
    lines = [b"prompt,completion", b"p,c", b'\xff,"open', b'p,"c"', b"p,c", b"p,\xff", b"p,c"]
    (tmp_path / "a.csv").write_bytes(b"\n".join(lines))
    log = ReadLog(skip_bad=True)
    found = read_examples([tmp_path / "a.csv"], byte_tokenizer(), ChatTemplate(), log)
    assert [e.where.rpartition(" ")[2] for e in found] == ["2", "5", "7"] and log.n_bad == 2
    assert "a.csv, lines 3 to 4: not valid CSV" in log.bad_report()


@pytest.mark.parametrize("at", [0, 2, 500], ids=["first line", "near the start", "late"])
def test_a_byte_0_makes_a_bad_line_of_json_lines_wherever_it_is(tmp_path: Path, at: int) -> None:
    lines = [GOOD.encode()] * 501
    lines[at] = lines[at].replace(b"p", b"\0", 1)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"".join(lines))
    with pytest.raises(ValueError, match=rf"a\.jsonl, line {at + 1}: not valid JSON"):
        read_examples([path], byte_tokenizer(), ChatTemplate())
    log = ReadLog(skip_bad=True)
    assert len(read_examples([path], byte_tokenizer(), ChatTemplate(), log)) == 500 and log.n_bad == 1


@pytest.mark.parametrize(
    "content",
    [
        b"\x7fELF\x02\x01\x01\0" * 9,
        b"[1]" + b"\0" * 99,
        *((GOOD * 9).encode(code) for code in ("utf-16-le", "utf-16-be")),
    ],
    ids=["ELF", "zeros", "UTF-16-LE", "UTF-16-BE"],
)
def test_a_binary_file_is_named_as_such_whatever_its_suffix(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.jsonl is a binary file \(byte 0 at position \d\), not UTF-8 text"):
        read_examples([tmp_path / "a.jsonl"], byte_tokenizer(), ChatTemplate(), ReadLog(skip_bad=True))


def test_a_saved_dataset_cannot_name_files_outside(tmp_path: Path) -> None:
    Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    state = tmp_path / "saved" / "state.json"
    for name in ("../other.arrow", "missing.arrow", 5):
        state.write_text(json.dumps({"_data_files": [{"filename": name}]}))
        with pytest.raises(ValueError, match=r"state\.json names the file .*, which is not in the folder"):
            list(records(tmp_path / "saved"))
    (tmp_path / "saved" / "x.arrow").write_bytes(b"ARROW?" * 9)
    state.write_text(json.dumps({"_data_files": [{"filename": "x.arrow"}]}))
    with pytest.raises(ValueError, match=r"x\.arrow cannot be read: "):
        list(records(tmp_path / "saved"))


def test_wrong_offsets_in_a_saved_dataset_are_refused_before_they_are_followed(tmp_path: Path) -> None:
    Dataset.from_list([{"text": "abc"}, {"text": "de"}]).save_to_disk(tmp_path / "saved")
    (file,) = (tmp_path / "saved").glob("*.arrow")
    right, wrong = (np.array([0, 3, end], np.int32).tobytes() for end in (5, 1 << 30))
    assert file.read_bytes().count(right) == 1
    file.write_bytes(file.read_bytes().replace(right, wrong))
    with pytest.raises(ValueError, match=r"\.arrow cannot be read: "):
        list(records(tmp_path / "saved"))


def test_bad_records_are_skipped_and_counted_on_request(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    bad = ["{", '{"prompt": "p"}', '{"text": "mixed"}', '{"prompt": "p", "completion": ""}', "\ud800"]
    lines = [GOOD.strip(), *bad, GOOD.strip()]
    path.write_bytes("\n".join(lines).encode("utf-8", errors="surrogatepass"))
    log = ReadLog(skip_bad=True)
    examples = read_examples([path], byte_tokenizer(), ChatTemplate(), log)
    assert [e.where.rpartition(" ")[2] for e in examples] == ["1", "7"] and log.n_bad == 5
    assert log.report().startswith(
        f"prompts and completions, 2 examples\n5 bad records skipped, the first: {path}, line 2: not valid JSON: "
    )
    path.write_text("\n".join([GOOD.strip(), "{"]))
    read_examples([path], byte_tokenizer(), ChatTemplate(), one := ReadLog(skip_bad=True))
    assert one.bad_report().startswith(f"1 bad record skipped, the first: {path}, line 2: not valid JSON: ")
    path.write_text("\n".join(["{", "}"]))
    with pytest.raises(
        ValueError, match=r"no example can be read: 2 bad records skipped, the first: .*line 1: not valid"
    ):
        read_examples([path], byte_tokenizer(), ChatTemplate(), ReadLog(skip_bad=True))


def test_forms_of_the_same_meaning_may_stand_in_one_file_and_all_forms_in_several(tmp_path: Path) -> None:
    log = ReadLog()
    sharegpt = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}
    WRITERS["a.jsonl"](tmp_path / "a.jsonl", [*CHATS, sharegpt])
    WRITERS["a.jsonl"](tmp_path / "b.jsonl", [json.loads(GOOD), ROWS[0]])
    WRITERS["a.jsonl"](tmp_path / "c.jsonl", TEXTS)
    assert len(read_examples([tmp_path], byte_tokenizer(), ChatTemplate(), log)) == 9
    assert log.report() == (
        "conversations, 3 examples; ShareGPT conversations, 1 example; prompts and completions, 1 example; Alpaca "
        "instructions, 1 example; texts, in which every token is a target, 3 examples"
    )


def test_without_pyarrow_the_error_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    WRITERS["a.parquet"](tmp_path / "a.parquet", ROWS)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match=r'a\.parquet needs pyarrow: pip install "onfoot\[parquet\]"'):
        read_examples([tmp_path / "a.parquet"], byte_tokenizer(), ChatTemplate())


# preferences


def test_preference_pairs_are_two_completions_of_one_prompt(pair: Pair, tmp_path: Path) -> None:
    plain = {"prompt": "How many?\n", "chosen": "Three.", "rejected": "the cat"}
    turns = {"prompt": TURNS[:2], "chosen": TURNS[2:3], "rejected": [{"role": "assistant", "content": "no"}]}
    whole = {"chosen": [*TURNS[:2], *turns["chosen"]], "rejected": [*TURNS[:2], *turns["rejected"]]}
    repeated = {"prompt": TURNS[1]["content"], **whole}
    WRITERS["a.jsonl"](tmp_path / "a.jsonl", [plain, turns, whole, repeated])
    log = ReadLog()
    first, *others = read_preferences([tmp_path / "a.jsonl"], pair.ours, pair.template, log)
    assert log.report() == "preference pairs, 4 examples"
    for name, example in zip(("chosen", "rejected"), first, strict=True):
        before, after = (pair.theirs(text)["input_ids"] for text in ("How many?\n", plain[name] + "<|endoftext|>"))
        assert example.ids.tolist() == before + after and example.learn.tolist() == [False] * len(before) + [
            True
        ] * len(after)
    for made in others:
        for name, example in zip(("chosen", "rejected"), made, strict=True):
            ids = pair.theirs.apply_chat_template([*TURNS[:2], *turns[name]], return_dict=False)
            prompt = pair.theirs.apply_chat_template(TURNS[:2], add_generation_prompt=True, return_dict=False)
            assert (
                example.ids.tolist() == ids
                and example.learn.argmax() == len(prompt)
                and example.learn[len(prompt) :].all()
            )


def test_the_prompt_of_texts_that_begin_alike_ends_before_a_space(tmp_path: Path) -> None:
    WRITERS["a.jsonl"](tmp_path / "a.jsonl", [{"chosen": "The sky is blue.", "rejected": "The sky is green."}])
    ((chosen, rejected),) = read_preferences([tmp_path / "a.jsonl"], byte_tokenizer(), ChatTemplate())
    assert byte_tokenizer().decode(chosen.prompt) == byte_tokenizer().decode(rejected.prompt) == "The sky is"
    assert byte_tokenizer().decode(chosen.ids[chosen.learn]) == " blue."


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "p", "chosen": "c"}', r"line 1: found the fields prompt, chosen; expected"),
        ("[1]", "line 1: found not an object; expected"),
        ('{"prompt": "p", "chosen": "c", "rejected": "c"}', "line 1: .*are the same, so there is nothing to prefer"),
        ('{"prompt": "p", "chosen": "c", "rejected": []}', "line 1: .*must both be texts, or both be lists"),
        ('{"chosen": "c", "rejected": "d"}', 'line 1: no "prompt", and "chosen" and "rejected" do not begin with'),
        ('{"prompt": "p", "chosen": "c", "rejected": ""}', 'line 1: "rejected": "completion" is empty'),
    ],
)
def test_bad_preference_pairs_are_named(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "a.jsonl").write_text(line)
    with pytest.raises(ValueError, match=message):
        read_preferences([tmp_path / "a.jsonl"], byte_tokenizer(), ChatTemplate())


# the guide


def test_every_record_of_the_guide_is_read_as_the_guide_says() -> None:
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1:4] for line in page.splitlines() if line.startswith("| ") and '`{"' in line]
    said = []
    for _, record, targets in rows:
        made = read_example(json.loads(record.strip(" `")), ChatTemplate(), byte_tokenizer(), "here")
        learned = byte_tokenizer().decode(made.ids[made.learn])
        said.append((learned.removesuffix("<|im_end|>\n"), targets.strip()))
    assert said == [
        ("8", "every answer"), ("8", "every answer"), (" 8.", "the completion"), ("8", "the completion"),
        ("8", "the output"), ("7 plus one is 8.", "every token, also with LoRA"),
    ]  # fmt: skip
