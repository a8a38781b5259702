"""What templates of published models do, each idiom in a few lines, and what hostile ones would."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

import pytest
from jinja2.exceptions import SecurityError
from jinja2.sandbox import SandboxedEnvironment

from centella.errors import WeightsError
from centella.tasks.chat import bounds
from centella.tasks.chat.messages import ChatTemplate
from centella.tasks.chat.sandbox import BUDGET, environment

USER: dict[str, Any] = {"role": "user", "content": " Weather in Rome? "}
CALL = {"role": "assistant", "content": "", "tool_calls": [
    {"id": "abcdefghi", "type": "function",
     "function": {"name": "weather", "arguments": {"city": "Rome", "days": 2}}}]}  # fmt: skip
ANSWER = {"role": "tool", "content": "22 °C", "tool_call_id": "abcdefghi"}
THOUGHT = {"role": "assistant", "content": "<think>\nwarm\n</think>\n\nIt is 22 °C."}
SYSTEM = {"role": "system", "content": "Be brief."}
ALL: list[dict[str, Any]] = [
    SYSTEM,
    USER,
    CALL,
    ANSWER,
    THOUGHT,
    {"role": "user", "content": "Thanks"},
]
TOOLS = [{"type": "function", "function": {
    "name": "weather", "description": "Says the weather.", "parameters": {
        "type": "object", "required": ["city"],
        "properties": {"city": {"type": "string"},
                       "days": {"type": ["integer", "null"]},
                       "parts": {"type": "array", "items": {"type": "string"}}}}}}]  # fmt: skip
DOCUMENTS = [{"title": "Rome", "text": "A city."}, {"title": "Oslo", "text": "Another."}]

# By idiom: a template, and what it gives of ALL, TOOLS and DOCUMENTS.
IDIOMS: dict[str, tuple[str, str]] = {
    "the system message is taken off, and the date is set": (
        """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}{%- set date_string = strftime_now("") %}{%- endif %}
{%- endif %}
{{- system_message ~ "/" ~ messages | length ~ "/" ~ date_string }}""",
        "<s>Be brief./5/",
    ),
    "tools as JSON, indented or in a line": (
        """{%- for t in tools %}{{- t | tojson(indent=4) }}{{ "\\n" }}{%- endfor %}
{{- tools[0].function.parameters.properties.city | tojson }}""",
        """{
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Says the weather.",
        "parameters": {
            "type": "object",
            "required": [
                "city"
            ],
            "properties": {
                "city": {
                    "type": "string"
                },
                "days": {
                    "type": [
                        "integer",
                        "null"
                    ]
                },
                "parts": {
                    "type": "array",
                    "items": {
                        "type": "string"
                    }
                }
            }
        }
    }
}
{"type": "string"}""",
    ),
    "a list without some of its elements": (
        """{{- (["search", "code"] | reject("equalto", "code") | list | length) }}
{{- (["search", "code"] | reject('equalto', 'code') | join(", ")) }}
{{- messages | selectattr("role", "equalto", "user") | map(attribute="content") | list }}
{{- messages | rejectattr("role", "in", ["user", "tool"]) | map(attribute="role") | unique
    | join("+") }}""",
        "1search[' Weather in Rome? ', 'Thanks']system+assistant",
    ),
    "calls with arguments that are objects or text": (
        """{%- for m in messages if 'tool_calls' in m and m.tool_calls is iterable %}
{%- for call in m.tool_calls %}{%- if call.function %}{%- set call = call.function %}{%- endif %}
{{- call.name + "(" }}
{%- for name, value in call.arguments | items %}
{{- name + "=" + (value if value is string else value | tojson) }}
{%- if not loop.last %}{{ ", " }}{% endif %}{%- endfor %}{{- ")" }}
{{- call.arguments if call.arguments is string else call.arguments | tojson }}
{%- endfor %}{%- endfor %}""",
        'weather(city=Rome, days=2){"city": "Rome", "days": 2}',
    ),
    "thoughts are cut off before the last question": (
        """{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string
        and not(message.content.startswith('<x>') and message.content.endswith('</x>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}{%- if '</think>' in message.content %}
{%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
{%- set thought = message.content.split('</think>')[0].rstrip('\\n').split('<think>')[-1] %}
{{- loop.index0 }}/{{ ns.last_query_index }}/{{ thought.strip("\\n") }}/{{ content }}
{%- endif %}{%- endfor %}
{%- if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}""",
        "4/5/warm/It is 22 °C.<think></think>",
    ),
    "neighbours of a message": (
        """{%- for m in messages %}
{%- if m.role == "tool" %}
{%- if loop.first or loop.previtem.role != "tool" %}{{- "<" }}{%- endif %}{{- m.content }}
{%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{- ">" }}{%- endif %}
{%- elif loop.nextitem is defined and loop.nextitem.role == "tool" %}{{- "!" }}
{%- endif %}{%- endfor %}""",
        "!<22 °C>",
    ),
    "roles must take turns": (
        """{%- set ns = namespace(index=0) %}
{%- for message in messages %}
{%- if not (message.role == "tool" or message.role == "system" or
    (message.tool_calls is defined and message.tool_calls is not none)) %}
{%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
{{- raise_exception("roles must take turns") }}
{%- endif %}{%- set ns.index = ns.index + 1 %}{%- endif %}{%- endfor %}
{{- ns.index }}{{ raise_exception("no") if ns.index > 9 else "" }}""",
        "3",
    ),
    "JSON is opened to add to it": (
        """{%- set out = messages[2].tool_calls[0].function | tojson %}
{{- out[:-1] }}{{- ', "id": "' + messages[2].tool_calls[0].id[:3] + '"}' }}
{%- if messages[2].tool_calls[0].id | length != 9 %}{{ raise_exception("id") }}{% endif %}
{%- for key, value in tools[0].function.items() if key != "parameters" %}
{{- ', "' + key + '": ' ~ (value if value is not string else '"' + value + '"') }}{%- endfor %}""",
        '{"name": "weather", "arguments": {"city": "Rome", "days": 2}, "id": "abc"}'
        ', "name": "weather", "description": "Says the weather."',
    ),
    "parts of a message": (
        """{%- macro shown(content) -%}
{%- if content is string %}{{- content }}
{%- elif content is iterable and content is not mapping %}
{%- for item in content %}
{%- if item is mapping and item.type == "text" %}{{- item.text | trim }}
{%- elif "image" in item or item.type == "image" %}{{- "[image]" }}{%- endif %}{%- endfor %}
{%- else %}{{- content }}{%- endif %}{%- endmacro -%}
{{- shown(messages[3].content) }}
{{- shown([{"type": "text", "text": " a "}, {"type": "image"}, {"image": 1}]) }}
{{- shown(none) or "-" }}{{- shown(5) }}""",
        "22 °Ca[image][image]None5",
    ),
    "types of parameters, by a macro that calls itself": (
        """{%- macro typed(spec) %}
{%- set names = {"string": "str", "integer": "int", "null": "None"} %}
{%- if names[spec.type] is defined %}{{- names[spec.type] }}
{%- elif spec.type == "array" %}{{- "list[" + typed(spec["items"]) + "]" }}
{%- elif spec.type is iterable and spec.type is not string %}
{{- "Union[" }}{%- for t in spec.type %}{{- typed({"type": t}) }}
{%- if not loop.last %}{{- "," }}{%- endif %}{%- endfor %}{{- "]" }}
{%- else %}{{- "Any" }}{%- endif %}{%- endmacro %}
{%- for name, spec in tools[0].function.parameters.properties | dictsort %}
{{- name }}:{{ typed(spec) }}{{ "" if loop.last else " " }}{%- endfor %}""",
        "city:str days:Union[int,None] parts:list[str]",
    ),
    "documents": (
        """{%- for doc in documents %}
{{- "[" ~ loop.index ~ "] %s: %s" | format(doc.title, doc['text']) }}{{ "; " if not loop.last }}
{%- endfor %}{{ "%d of %d" % (documents | length, 2) }}{{ "{}/{:>3}".format(1, 2) }}""",
        "[1] Rome: A city.; [2] Oslo: Another.2 of 21/  2",
    ),
    "text is gathered in a namespace, and lines are padded": (
        """{%- set ns = namespace(found=false, text="<tools>\\n") %}
{%- for t in tools %}{%- set ns.text = ns.text ~ (t.function.name | string) ~ "\\n" %}{%- endfor %}
{%- set ns.text = ns.text + "</tools>" %}{{- ns.text }}
{{- "ab" | center(6) }}|{{ "ab".center(6) }}|{{ "7".zfill(3) }}|{{ "a".ljust(2) }}|""",
        "<tools>\nweather\n</tools>  ab  |  ab  |007|a |",
    ),
    "loops are left early, and their bodies marked": (
        """{%- for m in messages %}{%- if m.role == "system" %}{%- continue %}{%- endif %}
{%- if loop.index > 4 %}{%- break %}{%- endif %}{{- m.role[0] | upper }}{%- endfor %}
{%- for m in messages if m.role == "assistant" %}
{%- generation %}{{- m.content[-4:] }}{%- endgeneration %}{%- endfor %}""",
        "UAT °C.",
    ),
    "blocks are set, and slices have steps": (
        """{%- set block %}{{ messages[0].content }}{% for m in messages[1:6:2] %}, {{ m.role }}
{%- endfor %}{% endset %}{{- block | replace("Be", "Is") | capitalize }}""",
        "Is brief., user, tool, user",
    ),
    "numbers": (
        """{{- "12" | int + 1 }} {{ "x" | int(7) }} {{ "ff" | int(base=16) }} {{ 2.5 | int }}
{{- " " ~ 2.567 | round(1) }} {{ 2.1 | round(0, "ceil") | int }} {{ 7 // 2 }} {{ 7 % 4 }}
{{- " " ~ 2 ** 5 }} {{ "1.5" | float }} {{ [3, 1, 2] | sort | last }} {{ range(3) | list }}
{{- " " ~ [1, 5] | max }}""",
        "13 7 255 2 2.6 3 3 3 32 1.5 3 [0, 1, 2] 5",
    ),
    "what is not there": (
        """{{- nothing }}{{ nothing is defined }}{{ nothing | default("d") }}
{{- messages[0].get("name", "-") }}{{ messages[0].name is none }}{{ nothing is none }}
{{- (nothing or messages[0].absent or "x") ~ (tools is not none and tools | length > 0) }}
{%- if nothing %}a{% elif not nothing and nothing == absent %}b{% endif %}
{%- for m in nothing %}{% else %}none{% endfor %}""",
        "Falsed-FalseFalsexTruebnone",
    ),
}


def rendered(template: str, **values: Any) -> str:
    given = {"tools": TOOLS, "documents": DOCUMENTS, "enable_thinking": False, **values}
    return ChatTemplate(template, {"bos_token": "<s>"}, "here").render(ALL, **given)


@pytest.mark.parametrize("idiom", IDIOMS)
def test_idioms(idiom: str) -> None:
    template, text = IDIOMS[idiom]
    assert rendered(template) == text


# Each would take memory or time without end.
GROWTH = {
    "a list that contains itself twice, printed": "{{ n.x }}",
    "the same, in a string": "{{ n.x ~ '' }}",
    "the same, by a filter": "{{ n.x | upper }}",
    "the same, as JSON": "{{ n.x | tojson }}",
    "the same, by a format": "{{ '%s' % n.x }}",
    "the same, by a format with a tuple": "{{ '%s' % (n.x, ) }}",
    "the same, by str.format": "{{ '{}'.format(n.x) }}",
    "the same, joined": "{{ [n.x] | join }}",
    "the same, as text": "{{ n.x | string | length }}",
    "the same, compared": "{{ n.x == n.y }}",
    "the same, sought": "{{ n.x in [n.y] }}",
    "the same, tested": "{{ [n.x] | select('equalto', n.y) | list }}",
    "the same, sorted": "{{ [n.x, n.y] | sort }}",
    "the same, as a key": "{{ {n.t: 1} }}",
    "the same, as an index": "{{ {}[n.t] }}",
    "the same, as an argument": "{{ {}.get(n.t) }}",
    "the same, as a refusal": "{{ raise_exception(n.x) }}",
    "the same, as values of a mapping": "{{ {'a': n.x}.values() }}",
    "the same, as items of a mapping": "{{ {'a': n.x}.items() ~ '' }}",
    "the same, as the name of a filter": "{{ [1] | map(n.t) | list }}",
    "the same, as the name of an attribute": "{{ [{}] | map(attribute=n.t) | list }}",
    "the same, as what a loop has seen": "{% for i in [1] %}{{ loop.changed(n.x) }}"
    "{{ loop.changed(n.y) }}{% endfor %}",
    "a namespace that contains itself": "{% set n.x = [n] %}{{ n.x }}",
    "a wide column": "{{ '{:9999}'.format(1) }}",
    "a column as wide as a value says": "{{ '{:{}}'.format(1, 2000) }}",
    "a format with a width from a value": "{{ '%*d' % (99999999, 1) }}",
    "a width behind brackets in a key": "{{ '%(a(b))99999999d' % {'a(b)': 1} }}",
    "a key behind a percent sign": "{{ '%l%(%999999999d)' % 1 }}",
    "a precision": "{{ '%.99999999f' % 1 }}",
    "a precision of many zeros": "{{ '%.000000000099999999f' % 1 }}",
    "a width behind an index in brackets": "{{ '{0[:]:9999}'.format({':': 1}) }}",
    "a width from an index in brackets": "{{ '{:{0[w]}}'.format({'w': 2000}) }}",
    "a width from a key": "{{ '{:>{w}}'.format(1, w=2000) }}",
    "what is stripped": "{{ ('b' * 9999999).strip('a' * 999999 ~ 'b') }}",
    "what is trimmed": "{{ ('b' * 9999999) | trim('a' * 999999 ~ 'b') }}",
    "sought from the end": "{{ ('a' * 9999999).rfind('ab' ~ 'a' * 4999999) }}",
    "split from the end": "{{ ('a' * 9999999).rsplit('ab' ~ 'a' * 4999999) }}",
    "a format of many fields": "{{ ('%s' * 1000) % ((('a' * 999999,) * 1000)) }}",
    "str.format of many fields": "{{ ('{0}' * 1000).format('a' * 999999) }}",
    "format_map": "{{ ('{a}' * 1000).format_map({'a': 'a' * 999999}) }}",
    "a method by a filter": "{{ (['{:99999999}'] | map(attribute='format') | first)(1) }}",
    "tabs": "{{ ('\\t' * 99999).expandtabs(1000) }}",
    "a string in pieces": "{{ ('a,' * 4999999).split(',') | length }}",
    "a string of words": "{{ ('a ' * 4999999).split() | length }}",
    "a string of lines": "{{ ('a\\n' * 4999999).splitlines() | length }}",
    "a string as a list": "{{ ('a' * 9999999) | list | length }}",
    "a list of lists": "{% set a = [0] * 9999 %}{{ (a * 9999) | length }}",
    "many strings": "{% set s = 'a' * 9999999 %}{% for i in range(1000) %}"
    "{% set n.x = n.x + [s ~ i] %}{% endfor %}",
    "many slices": "{% set s = 'a' * 9999999 %}{% for i in range(1000) %}"
    "{% set n.x = n.x + [s[i:]] %}{% endfor %}",
    "many blocks": "{% set s = 'a' * 9999999 %}{% for i in range(1000) %}"
    "{% set b %}{{ s }}{% endset %}{% set n.x = n.x + [b] %}{% endfor %}",
    "a loop that calls itself": "{% for x in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    "many parts": "{% set s = 'a' * 9999999 %}{% for i in range(1000) %}"
    "{% set n.x = n.x + [s.partition('b')] %}{% endfor %}",
    "a range, sorted": "{{ range(999999999) | sort }}",
    "a range, backwards, sorted": "{{ range(999999999) | reverse | sort }}",
    "a range, filtered, sought": "{{ 'a' in (range(999999999) | map('string')) }}",
    "a range as keys": "{{ {}.fromkeys(range(999999999)) }}",
    "a range as a dictionary": "{{ dict(range(999999999)) }}",
    "bytes": "{{ (1).to_bytes(999999999, 'big') }}",
    "bytes of a string": "{{ 'a'.encode().center(999999999) }}",
    "digits": "{{ 5 | round(-999999999) }}",
    "digits above": "{{ 5 | round(999999999, 'ceil') }}",
    "a string that is rounded": "{{ 'a' | round(9, 'ceil') }}",
    "a product of many digits": "{{ 10 ** 20 * 10 ** 20 }}",
    "a power of many digits": "{{ 10 ** 20 ** 2 }}",
    "a large power of a small number": "{{ 2 ** 999999999 }}",
    "separators": "{{ [1, 2] | tojson(separators=('a' * 999999, ':')) }}",
    "tabs that take away": "{{ ('\\t' * 99999).expandtabs(-1000) }}",
    "indented lines": "{{ ('a\\n' * 99999) | indent(1000) }}",
    "JSON, indented": "{{ n.deep | tojson(indent=1000) }}",
}
TWICE = """{% set n = namespace(x=[1], y=[1], t=(1,), deep=[]) %}
{% for i in range(60) %}
{% set n.x = [n.x, n.x] %}{% set n.y = [n.y, n.y] %}{% set n.t = (n.t, n.t) %}
{% set n.deep = [n.deep] * 2 %}{% endfor %}
"""


@pytest.mark.parametrize("what", GROWTH)
def test_what_grows_is_refused_with_its_line(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "ROUNDS", 100_000)  # ten times as soon
    begin = time.perf_counter()
    with pytest.raises(WeightsError, match=r"^here: chat_template, line 5: "):
        rendered(TWICE + GROWTH[what])
    assert time.perf_counter() - begin < 60  # hours, or no memory, without bounds


@pytest.mark.parametrize(
    "template",
    [
        "{{ ns is defined }}{{ ns is mapping }}{{ ns == none }}{{ ns }}{{ [ns] != [] }}",
        "{{ ns | string }}{{ ns ~ '' }}{{ '%s' % ns }}",
        "{{ 7 | round }} {{ 7.0 | round }} {{ 1234 | round(-2) }} {{ 7 | round(0, 'ceil') }}",
        "{{ 5000 * 5000 }} {{ 1700000000 * 1000 }} {{ 2 ** 70 }} {{ 1e300 * 2 }} {{ 2 ** -1 }}",
        "{{ 10 ** 9 * -10 }} {{ 3 * 'ab' }} {{ [1] * 2 }} {{ -3 * [1] }} {{ 2 ** 0.5 }}",
    ],
)
def test_templates_write_what_jinja_writes(template: str) -> None:
    given = "{% set ns = namespace(a=1, b='x') %}" + template
    assert rendered(given) == SandboxedEnvironment().from_string(given).render()


@pytest.mark.parametrize(
    "template",
    [
        "{{ (':' * 4000000).format(1) | length }}",
        "{{ ('{{' * 400000).format(1) | length }}",
        "{{ ('%%' * 400000) % () }}",
        "{{ ('%(' * 2000000) % {} }}",
        "{{ ('[' * 4000000).format(1) | length }}",
    ],
)
def test_formats_are_read_once(template: str) -> None:
    begin = time.perf_counter()
    with suppress(WeightsError):  # an incomplete key
        rendered(template)
    assert time.perf_counter() - begin < 8  # hours, where each mark is followed to the end


@pytest.mark.parametrize(
    "attribute", ["encode", "translate", "maketrans", "__class__", "__add__", "__len__", "hex"]
)
def test_strings_have_the_methods_that_are_listed(attribute: str) -> None:
    with pytest.raises(WeightsError, match="line 1: "):
        rendered(f"{{{{ 'a'.{attribute}() }}}}")
    with pytest.raises(WeightsError, match="line 1: "):
        rendered(f"{{{{ ('a' | safe).{attribute}() }}}}")


def test_a_format_reads_no_attribute_that_is_not_safe() -> None:
    sandbox, _ = environment()
    context = sandbox.from_string("").new_context({BUDGET: bounds.Budget()})
    for call in ("{0.__class__}".format, sandbox.getattr("{0.__class__}", "format")):
        with suppress(SecurityError):  # or nothing is there
            assert "class" not in sandbox.call(context, call, 5)
    assert rendered("{{ '{0:>5}|{a[b]}|{1!r}'.format(1, 'x', a={'b': 2024}) }}") == "    1|2024|'x'"
    assert rendered("{{ '%(a)s %5.2f%%' % {'a': 1} if 0 else '%5.2f%% %s' % (1, 'b') }}") == (
        " 1.00% b"
    )


def test_a_rendering_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "SECONDS", 1.0)
    slow = (
        "{% set s = 'a' * 9999999 %}\n{% for i in range(99999) %}{% if 'b' in s %}{% endif %}"
        "{% endfor %}"
    )
    with pytest.raises(WeightsError, match="line 2: expected to be done in 1 s"):
        rendered(slow)


def test_errors_name_their_line() -> None:
    with pytest.raises(WeightsError, match="here: expected a chat template, got: line 3: "):
        rendered("a\n\n{% if %}")
    with pytest.raises(WeightsError, match=r"chat_template, line 2: .*no tools"):
        rendered("{% macro f() %}\n{{ raise_exception('no tools') }}{% endmacro %}\n\n{{ f() }}")
    with pytest.raises(WeightsError, match="at most 200,000 characters, got 200,001"):
        rendered("a" * 200_001)
