"""Chat templates are untrusted programs: they end in time, with bounded output, and cannot reach Python."""

from __future__ import annotations

import threading
import time

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from onfoot.formats.chat import CHATML, ChatTemplate

MESSAGES = [
    {"role": "system", "content": "Be [short]."},
    {"role": "user", "content": "Why?\nHow?"},
    {"role": "assistant", "content": " Because. "},
]
FOREVER = {
    "loops in loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops that choose nothing": (
        "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}"
    ),
    "macros that call themselves twice": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
    ),
    "a power": "{{ 9 ** (9 ** 9) }}",
    "a power of a power": "{% set ns = namespace(x=3) %}{% for i in range(99) %}{% set ns.x = ns.x ** 9 %}{% endfor %}",
    "a long text": "{{ 'a' * 10 ** 10 }}",
    "a text that doubles": (
        "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x }}"
    ),
    "a text joined to itself": (
        "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"
    ),
    "a list that doubles": (
        "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}"
    ),
    "lists in lists": (
        "{% set ns = namespace(x=[]) %}{% for i in range(99) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}"
    ),
    "objects in objects": (
        "{% set ns = namespace(x={}) %}{% for i in range(99) %}{% set ns.x = {1: ns.x, 2: ns.x} %}"
        "{% endfor %}{{ ns.x }}"
    ),
    "a list of long texts": "{{ ('a' * 9999 * 99 * [1]|length * 1)|list * 99 }}",
    "a wide number": "{{ '%9999999999d' % 1 }}",
    "a width from elsewhere": "{{ '%*d' % (999999999, 1) }}",
    "a wide field": "{{ '{:9999999999}'.format(1) }}",
    "a filled line": "{{ 'a'.ljust(10 ** 10) }}",
    "a centred line": "{{ 'a'|center(10 ** 10) }}",
    "tabs": "{{ '\t'.expandtabs(10 ** 10) }}",
    "an indent": "{{ messages|tojson(indent=10 ** 10) }}",
    "a replacement": "{{ ('a' * 99999)|replace('a', 'a' * 99999) }}",
    "a replacement of nothing": "{{ ('a' * 99999).replace('', 'a' * 99999) }}",
    "a joined list": "{{ range(99999)|join('a' * 99999) }}",
    "a joined list of texts": "{{ ('a' * 99999).join(range(99999)|map('string')) }}",
    "a translation": "{{ ('a' * 99999).translate({97: 'a' * 99999}) }}",
    "a sum of lists": "{{ ([range(99999)|list] * 2)|sum(start=[]) }}",
    "filler": "{{ lipsum(n=10 ** 9) }}",
    "slices": "{{ 'a'|list|slice(10 ** 10)|list }}",
    "text in a block": (
        "{% set x %}{% for a in range(99999) %}" + "a" * 1000 + "{% endfor %}{% endset %}{{ x|length }}"
    ),
    "text by a loop": "{% for a in range(99999) %}" + "a" * 1000 + "{% endfor %}",
    "text by a macro": "{% macro f() %}"
    + "a" * 1000
    + "{% endmacro %}{% for a in range(99999) %}{% set x = f() %}{% endfor %}",
    "rounding": "{{ 1.5|round(10 ** 9, 'ceil') }}",
    "a long program": "{{ a }}" * 100_000,
    "a deep program": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
}


@pytest.mark.parametrize("name", FOREVER)
def test_an_endless_template_is_rejected_in_time(name: str) -> None:
    begun = time.process_time()
    with pytest.raises(ValueError, match=r"the chat template of mine failed: .+") as caught:
        ChatTemplate(FOREVER[name], name="mine").render(MESSAGES, False)
    assert time.process_time() - begun < 10  # one second is allowed
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 700


def test_the_limits_hold_in_every_thread_by_itself() -> None:
    outcomes: list[str] = []

    def render(source: str) -> None:
        try:
            outcomes.append(ChatTemplate(source).render(MESSAGES, True)[:3])
        except ValueError as error:
            outcomes.append("longer" if "longer than" in str(error) else str(error))

    sources = [FOREVER["loops in loops"], CHATML, FOREVER["loops in loops"], CHATML]
    threads = [threading.Thread(target=render, args=(source,)) for source in sources]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(outcomes) == ["<|i", "<|i", "longer", "longer"]


@pytest.mark.parametrize(
    "source",
    ["{{ ''.__class__.__mro__ }}", "{{ messages.__class__ }}", "{{ messages.append(1) }}",
     "{{ namespace.__init__.__globals__ }}", "{{ raise_exception.__globals__ }}", "{{ '{0.__class__}'.format(1) }}",
     "{% include '/etc/passwd' %}", "{% import 'os' as os %}", "{{ self.__init__ }}"],
)  # fmt: skip
def test_python_stays_out_of_reach(source: str) -> None:
    try:
        text = ChatTemplate(source).render(MESSAGES, False)
    except ValueError:
        return
    assert "class" not in text and "globals" not in text and "root" not in text


ALLOWED = [
    CHATML,
    "{% for m in messages %}{% if loop.first %}^{% elif loop.last %}${% else %}-"
    "{% endif %}{{ m.role|upper }}{% endfor %}",
    "{%- for m in messages if m['role'] != 'system' -%}{{ loop.index }}/{{ loop.length }} "
    "{{ m['content']|trim }}{%- endfor -%}",
    "{% macro show(m, end='') %}[{{ m.role }}] {{ m.content }}{{ end }}{% endmacro %}"
    "{% for m in messages %}{{ show(m, '\n') }}{% endfor %}",
    "{% set ns = namespace(n=0, text='') %}{% for m in messages %}{% set ns.n = ns.n + m.content|length %}"
    "{% set ns.text = ns.text ~ m.role[0] %}{% endfor %}{{ ns.n }} {{ ns.text }}",
    "{{ messages|map(attribute='role')|join(', ') }} {{ messages|selectattr('role', 'equalto', 'user')|list|length }}",
    "{{ messages[1:]|tojson(indent=2) }} {{ messages[0]|tojson }}",
    "{{ '%s has %d' % (messages[0].role, 3) }} {{ '{} {}'.format(1, 'b') }} {{ 'a,b'.split(',')|last }}",
    "{{ messages[0].content.replace('[', '(') }} {{ messages[0].content|replace('.', '!') }} "
    "{{ 'x'.join(['a', 'b']) }}",
    "{% set x %}{{ messages[0].content }}{% endset %}{{ x|upper }} {% filter lower %}ABC{% endfilter %}",
    "{{ 'Be' in messages[0].content }} {{ messages is iterable }} {{ nothing is defined }} "
    "{{ (1, 2)[1] }} {{ {'a': 1}.a }}",
    "{% for k, v in {'a': 1, 'b': [2, 3]}.items() %}{{ k }}={{ v }};"
    "{% endfor %}{{ range(5)|list }} {{ 7 // 2 }} {{ 2 ** 10 }}",
    "{{ 'line one\nline two'|indent(3) }} {{ 'a\nb'|indent(2, true) }} {{ 2.567|round(2) }} {{ [1, 2, 3]|sum }}",
    "{% for m in messages %}{% if m.role == 'user' %}{% continue %}{% endif %}{{ m.role }}{% break %}{% endfor %}",
    "{{ messages|length > 2 and not false }} {{ messages[-1].content.strip().startswith('Be') }} {{ none or 'x' }}",
    "{{ [3, 1, 2]|sort|first }} {{ ['b', 'a', 'b']|unique|list }} {{ {'b': 1, 'a': 2}|dictsort }} {{ 'abc'|reverse }}",
]  # fmt: skip


@pytest.mark.parametrize("source", ALLOWED)
def test_what_templates_do_gives_what_jinja_gives(source: str) -> None:
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    plain.policies["json.dumps_kwargs"] = {"sort_keys": False}
    expected = plain.from_string(source).render(
        messages=MESSAGES, add_generation_prompt=True, bos_token="", eos_token=""
    )
    assert ChatTemplate(source).render(MESSAGES, True) == expected
