"""Hostile variants of valid files: mutations that know a file's structure, and blind ones."""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from random import Random
from typing import Any

DEEP = 20_000  # brackets: deeper than any parser's stack
HOSTILE: list[Any] = [
    0, 1, -1, 2, 3, 7, 2**15, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1, 2**64,
    10**9, 10**12, 10**30, 10**400, 0.0, -0.0, 1.5, -1.5, 1e-300, 1e308, float("nan"), float("inf"), float("-inf"),
    True, False, None, "", "a", "0", "12", "nan", "../x", "/etc/passwd", "/dev/zero", "\x1b[31mred", "a\nb", "\x00",
    "\ud800", "\u202e", "[red]", "é" * 50, "x" * 5000, [], {}, [[]], [1], [1, 2, 3], ["a"], {"a": 1}, [None], [{}],
    [0] * 100, "(a+)+$", "(", "<|endoftext|>", "llama", "gpt2", "qwen2", "LORA", "float32", "F32", "BF16", "Q8_0",
]  # fmt: skip
INTEGERS = [0, 1, 2, 3, 4, 5, 7, 8, 9, 31, 32, 33, 255, 2**15, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**61, 2**62,
            2**63 - 1, 2**63, 2**64 - 33, 2**64 - 1]  # fmt: skip
NORMALIZERS = [
    {"type": "Replace", "pattern": {"String": "a"}, "content": "aaaaaaaa"},
    {"type": "Replace", "pattern": {"String": ""}, "content": "xyz"},
    {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": ""},
    {"type": "Prepend", "prepend": "▁" * 9},
    {"type": "NFKC"},
    {"type": "Lowercase"},
    {"type": "Strip", "strip_left": True, "strip_right": True},
    {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
]
PRE_TOKENIZERS = [
    {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated", "invert": False},
    {"type": "Split", "pattern": {"Regex": ""}, "behavior": "Removed", "invert": True},
    {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
    {"type": "FixedLength", "length": 0},
    {"type": "Digits", "individual_digits": True},
    {"type": "Punctuation", "behavior": "Contiguous"},
    {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
]
MODELS = [
    {"type": "Unigram", "unk_id": 5, "vocab": [["a", -1.0]], "byte_fallback": True},
    {"type": "Unigram", "unk_id": 0, "vocab": []},
    {
        "type": "WordPiece",
        "unk_token": "?",
        "continuing_subword_prefix": "",
        "max_input_chars_per_word": 9,
        "vocab": {},
    },
    {"type": "WordLevel", "vocab": {"a": 4294967295}, "unk_token": "b"},
    {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 7}, "merges": [["a", "b"]], "unk_token": "zz", "dropout": 1.0},
    {"type": "BPE", "vocab": {"": 0}, "merges": [["", ""]], "fuse_unk": True, "byte_fallback": True},
]
DECODERS = [
    {"type": "WordPiece", "prefix": "##", "cleanup": True},
    {"type": "Strip", "content": "a", "start": 2**31, "stop": 2**31},
    {"type": "CTC", "pad_token": "", "word_delimiter_token": "", "cleanup": True},
    {"type": "ByteFallback"},
    {"type": "BPEDecoder", "suffix": ""},
    {"type": "Replace", "pattern": {"String": ""}, "content": "ab"},
]
TRUNCATION = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
PADDING = {
    "strategy": {"Fixed": 64}, "direction": "Left", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
    "pad_token": "a",
}  # fmt: skip
SNIPPETS = [
    "{% for i in range(99999) %}", "{% endfor %}", "{% for m in messages %}", "{% for c in 'abc' * 1000 %}",
    "{{ 'a' * 10**9 }}", "{{ 9**9**9 }}", "{{ 10**4000 }}", "{{ m.content }}", "{{ messages }}", "{{ m }}", "text",
    "{% set ns = namespace(x='ab', y=[]) %}", "{% set ns.x = ns.x ~ ns.x %}", "{% set ns.x = ns.x + ns.x %}",
    "{% set ns.y = [ns.y, ns.y] %}", "{% set ns.y = {'a': ns.y, 'b': ns.y} %}", "{{ ns.y }}", "{{ ns.x|length }}",
    "{% macro f(n) %}{{ f(n + 1) }}{{ f(n + 1) }}{% endmacro %}", "{{ f(0) }}", "{% if messages %}", "{% endif %}",
    "{% else %}", "{{ '%999999999d' % 1 }}", "{{ '%*d'|format(999999999, 1) }}", "{{ '{:999999999}'.format(1) }}",
    "{{ 'a'.ljust(10**9) }}", "{{ 'a'|center(10**9) }}", "{{ 'a'|indent(10**9) }}", "{{ lipsum(n=10**6) }}",
    "{{ range(99999)|list }}", "{{ range(99999)|join(range(99999)|join) }}", "{{ [[1] * 9999] * 9999 }}",
    "{{ messages|tojson(indent=10**8) }}", "{{ messages.__class__.__mro__ }}", "{{ ''.__class__ }}", "{{ x.y.z }}",
    "{{ cycler.__init__.__globals__ }}", "{{ raise_exception('no') }}", "{% break %}", "{% continue %}",
    "{{ (" + "(" * 3000 + ")" * 3000 + ") }}", "{{ a" + "|upper" * 500 + " }}", "{{ 'a'|replace('', 'b' * 9999) }}",
    "{% set x %}{% for i in range(99999) %}xxxxxxxx{% endfor %}{% endset %}", "{{ x * 1000 }}", "{{ x }}",
    "{% for i in range(99999) if false %}{% endfor %}", "{{ messages|map(attribute='content')|join('x' * 9999) }}",
    "{{ messages|sort|sum(start=[]) }}", "{{ ('a' * 9999).split('') }}", "{{ ('a' * 9999)|wordwrap(1) }}",
    "{{ 'a'.encode().hex() }}", "{{ dict(a=1).items()|list }}", "{% generation %}", "{% endgeneration %}",
    "{{ messages[-1]['role'] == 'user' }}", "{{ messages|selectattr('role', 'equalto', 'user')|list }}",
    "{% filter upper %}", "{% endfilter %}", "{% call f(1) %}", "{% endcall %}", "{% include 'x' %}", "{#", "#}", "{{",
    "{% for x in messages recursive %}{{ loop(messages) }}", "{{ loop.index }}", "{{ bos_token }}", "{{ self }}",
    "{% block a %}{{ self.a() }}{% endblock %}", "{{ 'é\x1b\u202e' }}", "{{ 1/0 }}", "{{ 'x'.zfill(10**9) }}",
    "{% set a = range(99999)|list %}", "{% set a = a + a %}", "{{ a == a }}", "{{ a|unique|list|length }}",
    "{{ 'a'.translate({97: 'b' * 999}) }}", "{{ 'x\t'.expandtabs(10**9) }}", "{{ a|batch(1)|list }}", "{% raw %}",
    "{{ 'x'|pprint }}", "{{ a|slice(10**9)|list }}", "{{ -(-(-1)) }}", "{{ 1e308 * 10 }}", "{{ (10**300)**9 }}",
    "{{ ''.join(['ab' * 9999] * 9999) }}", "{{ 'ab'.replace('a', 'b' * 9999).replace('b', 'a' * 9999) }}",
]  # fmt: skip


def mutate(data: bytes, name: str, random: Random) -> bytes:
    """A hostile variant of the file of that name."""
    knowing: Callable[[bytes, Random], bytes] | None = None
    if name.endswith("tokenizer.json"):
        knowing = _tokenizer if random.random() < 0.5 else _json
    elif name.endswith(".json"):
        knowing = _json
    elif name.endswith(".jsonl"):
        knowing = _lines
    elif name.endswith(".safetensors"):
        knowing = _safetensors
    elif name.endswith(".gguf"):
        knowing = _gguf
    elif name.endswith(".jinja"):
        knowing = _template
    if knowing is not None and random.random() < 0.75:
        data = knowing(data, random)
        return data if random.random() < 0.9 else _blind(data, random)
    return _blind(data, random)


def replace(path: Path, random: Random) -> None:
    """Something else in a file's place: nothing, a folder, a pipe, a socket, a device, a link that leads nowhere."""
    path.unlink()
    choice = random.randrange(8)
    if choice == 1:
        path.mkdir()
    elif choice == 2:
        os.mkfifo(path)
    elif choice == 3:
        path.symlink_to(path.name)
    elif choice == 4:
        path.symlink_to("/dev/zero")
    elif choice == 5:
        path.symlink_to("missing")
    elif choice == 6:
        before = Path.cwd()
        os.chdir(path.parent)  # a socket's path must be short
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
        os.chdir(before)
    elif choice == 7:
        path.write_bytes(b"")


def _blind(data: bytes, random: Random) -> bytes:
    out = bytearray(data)
    kind = random.randrange(7)
    if kind == 0:  # as a crash leaves it
        return data[: random.randrange(len(data) + 1)]
    for _ in range(1 + random.randrange(4)):
        if not out:
            break
        at = random.randrange(len(out))
        if kind == 1:
            out[at] ^= 1 << random.randrange(8)
        elif kind == 2:
            out[at] = random.choice((0, 255, 0x22, 0x5B, 0x7B, 0x80, 0xED, random.randrange(256)))
        elif kind == 3:
            out[at:at] = random.randbytes(random.randrange(1, 20))
        elif kind == 4:
            del out[at : at + random.randrange(1, 40)]
        elif kind == 5:
            begin = random.randrange(len(out))
            out[at:at] = out[begin : begin + random.randrange(1, 200)]
        else:
            out += out[at:] if len(out) < 1 << 16 else b""
    return bytes(out)


def _json(data: bytes, random: Random) -> bytes:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return _blind(data, random)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        value = _changed(value, random)
    return _dumped(value, random)


def _dumped(value: Any, random: Random) -> bytes:
    text = json.dumps(value)
    wild = random.random()
    if wild < 0.03:
        text = text.replace("null", "[" * DEEP + "]" * DEEP, 1) if "null" in text else "[" * DEEP + "]" * DEEP
    elif wild < 0.06 and "{" in text:  # a key twice
        at = random.choice([i for i, c in enumerate(text) if c == "{"])
        end = text.find(",", at)
        if end > at:
            text = text[: at + 1] + text[at + 1 : end] + "," + text[at + 1 :]
    elif wild < 0.08:
        text = text.replace("1", "1" * 5000, 1)
    return text.encode("utf-8", "surrogatepass")


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) inside a value; of long containers the first and a few more."""
    out: list[tuple[Any, Any]] = []
    waiting = [value]
    while waiting and len(out) < 5000:
        inside = waiting.pop()
        if isinstance(inside, dict):
            keys: list[Any] = list(inside)
        elif isinstance(inside, list):
            keys = list(range(len(inside)))
        else:
            continue
        if len(keys) > 40:  # a vocabulary must not hide the other fields
            keys = [*keys[:10], *keys[-10:]]
        for key in keys:
            out.append((inside, key))
            waiting.append(inside[key])
    return out


def _changed(value: Any, random: Random) -> Any:
    value = deepcopy(value)  # what stands in it may be one of the constants above
    places = _places(value)
    if not places or random.random() < 0.01:
        return deepcopy(random.choice(HOSTILE))
    inside, key = random.choice(places)
    old, kind = inside[key], random.randrange(10)
    if kind == 0:
        del inside[key]
    elif kind == 1 and isinstance(inside, dict):
        del inside[key]
        inside[str(random.choice(HOSTILE)) if random.random() < 0.5 else f"{key}x"] = old
    elif kind == 2:
        other, other_key = random.choice(places)
        inside[key] = json.loads(json.dumps(other[other_key])) if other_key in other or isinstance(other, list) else 0
    elif kind == 3 and isinstance(inside, list):
        inside += [old] * random.choice((1, 2, 50))
    elif kind in (4, 5, 6) and isinstance(old, int | float) and not isinstance(old, bool):
        half, whole = (old / 2, float(old)) if abs(old) < 1e300 else (old, old)
        with_it = [old + 1, old - 1, old * 2, -old, half, whole, str(old), [old], old * 10**6, old + 2**32]
        inside[key] = random.choice(with_it)
    elif kind in (4, 5) and isinstance(old, str):
        inside[key] = random.choice((old + "x", old[:-1], old.upper(), old * 100, [old], {"content": old}))
    else:
        inside[key] = deepcopy(random.choice(HOSTILE))
    return value


def _tokenizer(data: bytes, random: Random) -> bytes:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return _blind(data, random)
    if not isinstance(value, dict):
        return _json(data, random)
    for _ in range(random.choice((1, 1, 2))):
        kind = random.randrange(9)
        if kind == 0:
            value["truncation"] = _changed(TRUNCATION, random) if random.random() < 0.5 else TRUNCATION
        elif kind == 1:
            value["padding"] = _changed(PADDING, random) if random.random() < 0.5 else PADDING
        elif kind == 2:
            chosen = random.choices(NORMALIZERS, k=random.choice((1, 2, 8)))
            value["normalizer"] = {"type": "Sequence", "normalizers": chosen}
        elif kind == 3:
            chosen = random.choices(PRE_TOKENIZERS, k=random.choice((1, 2, 3)))
            value["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": chosen}
        elif kind == 4:
            chosen = random.choice(MODELS)
            value["model"] = _changed(chosen, random) if random.random() < 0.5 else chosen
        elif kind == 5:
            value["decoder"] = {"type": "Sequence", "decoders": random.choices(DECODERS, k=random.choice((1, 2)))}
        elif kind == 6 and isinstance(value.get("added_tokens"), list) and value["added_tokens"]:
            token = dict(value["added_tokens"][0]) if isinstance(value["added_tokens"][0], dict) else {}
            token |= {"id": random.choice(INTEGERS), "content": random.choice(("<x>", "a", "", " "))}
            token[random.choice(("lstrip", "rstrip", "single_word", "normalized", "special"))] = random.random() < 0.5
            value["added_tokens"] = [*value["added_tokens"], token]
        elif isinstance(value.get("model"), dict) and isinstance(value["model"].get("vocab"), dict):
            model = value["model"] = {**value["model"], "vocab": dict(value["model"]["vocab"])}
            vocab = model["vocab"]
            if vocab:
                vocab[random.choice(sorted(vocab))] = random.choice((*INTEGERS, None, "a", 1.5, -1))
        else:
            value = _changed(value, random)
            if not isinstance(value, dict):
                break
    return _dumped(value, random)


def _lines(data: bytes, random: Random) -> bytes:
    lines = data.split(b"\n")
    for _ in range(random.choice((1, 1, 2))):
        at = random.randrange(len(lines))
        kind = random.randrange(6)
        if kind == 0:
            lines[at] = _blind(lines[at], random)
        elif kind == 1:
            lines.insert(
                at, random.choice((b"", b"null", b"[]", b"\xef\xbb\xbf{}", b"{}", b'{"text": "a"}', b"[" * DEEP))
            )
        elif kind == 2:
            lines += lines[at:]
        else:
            lines[at] = _json(lines[at], random)
    return b"\n".join(lines)


def _safetensors(data: bytes, random: Random) -> bytes:
    length = int.from_bytes(data[:8], "little")
    header, body = data[8 : 8 + length], data[8 + length :]
    kind = random.randrange(8)
    if kind == 0:
        return struct.pack("<Q", random.choice(INTEGERS)) + data[8:]
    if kind == 1:
        return struct.pack("<Q", max(length + random.randrange(-9, 10), 0)) + data[8:]
    if kind == 2:
        body = (
            body[: random.randrange(len(body) + 1)] if random.random() < 0.5 else body + bytes(random.randrange(1, 64))
        )
    else:
        try:
            value = json.loads(header)
        except (ValueError, RecursionError):
            return _blind(data, random)
        names = [name for name in value if name != "__metadata__"]
        entry = value.get(random.choice(names)) if names else None
        if kind == 3 and isinstance(entry, dict):
            entry["data_offsets"] = [n + random.choice((0, -4, 4, 1, 2**40)) for n in entry["data_offsets"]]
        elif kind == 4 and isinstance(entry, dict):
            entry["shape"] = random.choice(([], [0], [*entry["shape"], 1], [2**32, 2**32], [2**63, 2], [0, 2**62]))
        elif kind == 5 and isinstance(entry, dict):
            entry["dtype"] = random.choice(("F16", "BF16", "F64", "I64", "U8", "BOOL", "F8_E4M3", "F32 ", "", "C64"))
        else:
            value = _changed(value, random)
        header = _dumped(value, random)
    return struct.pack("<Q", len(header)) + header + body


def _gguf(data: bytes, random: Random) -> bytes:
    out = bytearray(data)
    fields = _gguf_fields(data)
    for _ in range(random.choice((1, 1, 2, 3))):
        at, size = random.choice(fields)
        value = random.choice(INTEGERS) if random.random() < 0.7 else int.from_bytes(out[at : at + size], "little") + (
            random.choice((-32, -1, 1, 8, 32))
        )  # fmt: skip
        out[at : at + size] = (value % (1 << 8 * size)).to_bytes(size, "little")
    if random.random() < 0.1:  # arrays of arrays of arrays
        nested = struct.pack("<IQ", 9, 1) * random.choice((1, 3, 100, 5000))
        _insert_pair(out, b"some.arrays", struct.pack("<I", 9) + nested)
    if random.random() < 0.1:
        _insert_pair(out, b"general.alignment", struct.pack("<II", 4, random.choice(INTEGERS) % 2**32))
    return bytes(out)


def _insert_pair(out: bytearray, key: bytes, value: bytes) -> None:
    """Puts a key and its value before all others of a GGUF header, and counts it."""
    out[24:24] = struct.pack("<Q", len(key)) + key + value
    out[16:24] = struct.pack("<Q", (struct.unpack_from("<Q", out, 16)[0] + 1) % 2**64)


SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}


def _gguf_fields(data: bytes) -> list[tuple[int, int]]:
    """Where the numbers of a valid file's header stand, and their bytes; those of long arrays are left out."""
    fields = [(4, 4), (8, 8), (16, 8)]
    at = 24

    def number(size: int) -> int:
        nonlocal at
        fields.append((at, size))
        at += size
        return int.from_bytes(data[at - size : at], "little")

    def text() -> None:
        nonlocal at
        n = number(8)
        if n:
            fields.append((at + n // 2, 1))
        at += n

    def value(kind: int) -> None:
        if kind == 8:
            text()
        elif kind == 9:
            inner, n = number(4), number(8)
            kept = len(fields) + 20
            for _ in range(n):
                value(inner)
            del fields[kept:]
        else:
            number(SIZES[kind])

    for _ in range(struct.unpack_from("<Q", data, 16)[0]):
        text()
        value(number(4))
    for _ in range(struct.unpack_from("<Q", data, 8)[0]):
        text()
        for _ in range(number(4)):
            number(8)
        number(4), number(8)
    return fields


def _template(data: bytes, random: Random) -> bytes:
    text = data.decode("utf-8", "replace")
    parts = random.choices(SNIPPETS, k=random.randrange(1, 8))
    if random.random() < 0.5:
        opened = sum(part.startswith("{% for") and "endfor" not in part for part in parts)
        parts += ["{% endfor %}"] * opened
        parts += ["{% endif %}"] * parts.count("{% if messages %}")
    text = "".join(parts) if random.random() < 0.7 else text + "".join(parts)
    return text.encode("utf-8", "surrogatepass")
