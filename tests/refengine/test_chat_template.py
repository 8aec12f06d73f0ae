# ruff: noqa: E501, S106 - a template reads best in one line; bos_token is no password
from __future__ import annotations

import datetime as dt
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refengine import template_budget
from refengine.chat_template import MAX_TEMPLATE_CHARS, render_chat
from refengine.errors import ModelFileError, RequestError

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# What the templates of the Qwen family use: a macro, namespaces, reversed messages, thinking, tools, vision parts.
QWEN_LIKE = """\
{%- macro text_of(content) %}
    {%- if content is string %}
        {{- content }}
    {%- elif content is iterable and content is not mapping %}
        {%- for part in content %}
            {%- if 'image' in part or part.type == 'image' %}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' }}
            {%- elif 'text' in part %}
                {{- part.text }}
            {%- else %}
                {{- raise_exception('Unexpected part: ' ~ (part.keys() | list | join(', '))) }}
            {%- endif %}
        {%- endfor %}
    {%- elif content is none or content is undefined %}
        {{- '' }}
    {%- else %}
        {{- raise_exception('Unexpected content type.') }}
    {%- endif %}
{%- endmacro %}
{%- if not messages %}
    {{- raise_exception('No messages provided.') }}
{%- endif %}
{%- if tools and tools is iterable and tools is not mapping %}
    {{- '<|im_start|>system\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '\\n</tools>' }}
    {%- if messages[0].role == 'system' and text_of(messages[0].content)|trim %}
        {{- '\\n\\n' + text_of(messages[0].content)|trim }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + text_of(messages[0].content)|trim + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" %}
        {%- set content = text_of(message.content)|trim %}
        {%- if not(content.startswith('<tool_response>') and content.endswith('</tool_response>')) %}
            {%- set ns.multi_step_tool = false %}
            {%- set ns.last_query_index = index %}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = text_of(message.content)|trim %}
    {%- if message.role == "system" %}
        {%- if not loop.first %}
            {{- raise_exception('System message must be at the beginning.') }}
        {%- endif %}
    {%- elif message.role == "user" %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index %}
            {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content + '\\n</think>\\n\\n' + content }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {%- if message.tool_calls and message.tool_calls is iterable %}
            {%- for tool_call in message.tool_calls %}
                {%- set tool_call = tool_call.function %}
                {{- '\\n<tool_call>\\n<function=' + tool_call.name + '>\\n' }}
                {%- for name, value in tool_call.arguments|items %}
                    {{- '<parameter=' + name + '>\\n' }}
                    {%- set value = value if value is string else value | tojson %}
                    {{- value ~ '\\n</parameter>\\n' }}
                {%- endfor %}
                {{- '</function>\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.previtem and loop.previtem.role != "tool" %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != "tool" %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- else %}
        {{- raise_exception('Unexpected message role.') }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
HELLO = [{"role": "user", "content": "Hello"}]


def user(content):
    return {"role": "user", "content": content}


def test_smollm2_adds_its_system_message():
    assert render_chat(SMOLLM2, [user("What is gravity?")]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is gravity?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_smollm2_takes_the_system_message_that_is_given():
    messages = [
        {"role": "system", "content": "Be brief."},
        user("Hi"),
        {"role": "assistant", "content": "Hi."},
    ]
    assert render_chat(SMOLLM2, messages, add_generation_prompt=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHi.<|im_end|>\n"
    )


def test_a_template_of_the_qwen_kind():
    call = {"function": {"name": "weather", "arguments": {"city": "Zürich", "days": [1, 2]}}}
    messages = [
        {"role": "system", "content": " Be brief. "},
        user("old"),
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nanswer"},
        user([{"type": "text", "text": "Look: "}, {"type": "image", "image": "x.png"}]),
        {"role": "assistant", "content": None, "reasoning_content": "call it", "tool_calls": [call]},
        {"role": "tool", "content": "sun"},
        {"role": "tool", "content": "rain"},
    ]
    tools = [{"type": "function", "function": {"name": "weather", "description": "<wétter>"}}]
    assert render_chat(QWEN_LIKE, messages, tools=tools, enable_thinking=False) == (
        "<|im_start|>system\n# Tools\n<tools>\n"
        '{"type": "function", "function": {"name": "weather", "description": "<wétter>"}}\n'
        "</tools>\n\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nold<|im_end|>\n"
        "<|im_start|>assistant\nanswer<|im_end|>\n"
        "<|im_start|>user\nLook: <|vision_start|><|image_pad|><|vision_end|><|im_end|>\n"
        "<|im_start|>assistant\n<think>\ncall it\n</think>\n\n\n<tool_call>\n<function=weather>\n"
        "<parameter=city>\nZürich\n</parameter>\n<parameter=days>\n[1, 2]\n</parameter>\n"
        "</function>\n</tool_call><|im_end|>\n"
        "<|im_start|>user\n<tool_response>\nsun\n</tool_response>\n<tool_response>\nrain\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


def test_a_long_conversation_is_within_the_budget():
    messages = [
        {"role": ("user", "assistant")[i % 2], "content": f"{i} " + "word " * 200} for i in range(600)
    ]
    prompt = render_chat(QWEN_LIKE, messages)
    assert prompt.count("<|im_end|>") == 600
    short = [{"role": ("user", "assistant")[i % 2], "content": "ok"} for i in range(3000)]
    assert render_chat(QWEN_LIKE, short).count("ok") == 3000


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["user", "assistant"]), st.text(max_size=30)), min_size=1, max_size=5)
)
def test_the_sandbox_changes_nothing_in_what_is_rendered(turns):
    messages = [{"role": role, "content": content} for role, content in turns]
    template = (
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m['content'] }}{% endfor %}{{ eos_token }}"
    )
    expected = "".join(f"[{role}]{content}" for role, content in turns)
    assert render_chat(template, messages, bos_token="<s>", eos_token="</s>") == f"<s>{expected}</s>"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),
        ("{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}{% if i == 4 %}{% break %}{% endif %}{{ i }}{% endfor %}", "013"),
        ("{% for i in range(4) %}{{ loop.index }}/{{ loop.length }}{{ ',' if not loop.last }}{% endfor %}", "1/4,2/4,3/4,4/4"),
        ("{% for i in messages | map(attribute='role') %}{{ i }}{{ loop.last }}{% else %}none{% endfor %}", "userTrue"),
        ("{% for k, v in {'b': 1, 'a': 2} | dictsort %}{{ k }}{{ v }}{% endfor %}", "a2b1"),
        ("{{ {'é': ['<', none, true, 1.5]} | tojson }}", '{"é": ["<", null, true, 1.5]}'),
        ("{{ [1, {'a': 2}] | tojson(indent=2) }}", '[\n  1,\n  {\n    "a": 2\n  }\n]'),
        ("{{ {'b': 1, 'a': 2} | tojson(sort_keys=true, separators=(',', ':')) }}", '{"a":2,"b":1}'),
        ("{{ 'a-b-c'.split('-')[1:] | join('+') }}{{ '/'.join(['x', 'y']) }}", "b+cx/y"),
        ("{{ 'aXbX'.replace('X', '.') }}{{ 'aXbX' | replace('X', '.', 1) }}{{ 'ab'.replace('', '-') }}", "a.b.a.bX-a-b-"),
        ("{{ 'a\nb\n\nc' | indent(2) }}|{{ 'a\nb' | indent(1, first=true) }}", "a\n  b\n\n  c| a\n b"),
        ("{{ '%s is %05.2f%%' % ('x', 3.14159) }}{{ '%d' | format(7) }}", "x is 03.14%7"),
        ("{{ 2.567 | round(1) }} {{ 7 | abs + 2 * 3 - 4 ** 2 % 5 }}", "2.6 12"),
        ("{{ messages[0].missing is defined }}{{ messages[0].missing }}{{ none | default('d', true) }}", "Falsed"),
        ("{{ 'x' * 3 ~ 1 ~ none }}{{ [1] + [2] }}{{ (1, 2) }}", "xxx1None[1, 2](1, 2)"),
        ("{% generation %}inside{% endgeneration %}", "inside"),
        ("{% set x %}a{{ 1 }}b{% endset %}{{ x | upper }}", "A1B"),
        ("{% macro m(a, b=2) %}{{ a }}{{ b }}{{ caller() if caller }}{% endmacro %}{{ m(1) }}{% call m(3) %}c{% endcall %}", "1232c"),
        ("{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ [3, 1, 2] | sort | first }}", "11"),
        ("{% filter upper %}a{{ 'b' }}{% endfilter %}", "AB"),
        ("{{ dict(a=1).items() | list }}{{ {'a': 1}.get('b', 5) }}", "[('a', 1)]5"),
        ("{{ namespace(a=1) }}", "<Namespace>"),
    ],
)  # fmt: skip
def test_what_templates_use_works(template, expected):
    assert render_chat(template, HELLO) == expected


def test_the_date_is_todays():
    before = dt.datetime.now().astimezone().strftime("%d %b %Y")
    rendered = render_chat("{{ strftime_now('%d %b %Y') }}", HELLO)
    assert rendered in (before, dt.datetime.now().astimezone().strftime("%d %b %Y"))


def test_a_templates_own_refusal_is_about_the_request():
    with pytest.raises(RequestError, match=r"^the chat template refused the messages: roles must alternate$"):
        render_chat("{{ raise_exception('roles must\n   alternate') }}", HELLO)
    with pytest.raises(RequestError, match="System message must be at the beginning"):
        render_chat(QWEN_LIKE, [user("a"), {"role": "system", "content": "b"}])


@pytest.mark.parametrize("messages", ["hello", [1], [["role", "user"]], [None]])
def test_messages_of_another_shape_are_refused(messages):
    with pytest.raises(RequestError, match="messages is not a list of objects"):
        render_chat(SMOLLM2, messages)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([{"role": "user"}], "UndefinedError.*'content'"),
        ([{"role": "user", "content": 5}], "TypeError"),
        ([user("a"), {"role": "user", "content": None}], "TypeError"),
    ],
)
def test_messages_that_the_template_cannot_render_are_refused(messages, message):
    with pytest.raises(
        RequestError, match=rf"cannot render these messages: {message}.*check that each message"
    ):
        render_chat(SMOLLM2, messages)


def test_messages_that_contain_themselves_are_refused():
    content: list[object] = []
    content.append(content)
    with pytest.raises(RequestError, match="messages are too large"):
        render_chat("x", [user(content)])


GROW = (
    "{%% set ns = namespace(x=%s) %%}{%% for i in range(99) %%}{%% set ns.x = %s %%}{%% endfor %%}{{ ns.x }}"
)
HOSTILE = {
    "dunder": "{{ ''.__class__ }}",
    "dunder-item": "{{ ''['__class__']['__mro__'] }}",
    "dunder-of-a-list": "{{ messages.__class__ }}",
    "dunder-in-map": "{{ ['']|map(attribute='__class__')|list }}",
    "globals-of-a-function": "{{ raise_exception.__globals__ }}",
    "init-of-a-macro": "{% macro m() %}{% endmacro %}{{ m.__init__.__globals__ }}",
    "loop-context": "{% for i in [1] %}{{ loop.__init__ }}{% endfor %}",
    "change-a-list": "{{ messages.append(1) }}",
    "change-a-dict": "{{ messages[0].update({}) }}",
    "range": "{% for i in range(10**9) %}{% endfor %}",
    "nested-loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "nested-lazy-loops": "{% for i in range(99999) %}{% for j in range(99999)|select %}{% endfor %}{% endfor %}",
    "output": "{% for i in range(99999) %}" + "y" * 1000 + "{% endfor %}",
    "output-of-a-value": "{% for i in range(99999) %}{{ 'y' * 999 }}{% endfor %}",
    "block-set": "{% set q %}{% for i in range(9999) %}{{ 'z' * 999 }}{% endfor %}{% endset %}",
    "text-of-a-macro": "{% macro m() %}" + "y" * 100_000 + "{% endmacro %}{% for i in range(9999) %}{{ m() }}{% endfor %}",
    "repeat": "{{ 'x' * 10**10 }}",
    "repeat-reversed": "{{ 10**10 * 'x' }}",
    "repeat-list": "{{ [1] * 10**10 }}",
    "power": "{{ 10 ** 100000 }}",
    "squares": GROW % (3, "ns.x * ns.x"),
    "double": GROW % ("'a'", "ns.x ~ ns.x"),
    "double-plus": GROW % ("'a'", "ns.x + ns.x"),
    "double-join": GROW % ("'a'", "[ns.x, ns.x]|join"),
    "double-replace": GROW % ("'aa'", "ns.x.replace('a', ns.x)"),
    "double-list-plus": GROW % ("[1]", "ns.x + ns.x"),
    "shared-lists": GROW % ("[1]", "[ns.x, ns.x]"),
    "shared-tuples": GROW % ("[1]", "(ns.x, ns.x)"),
    "shared-dicts": GROW % ("[1]", "{'a': ns.x, 'b': ns.x}"),
    "shared-dict-calls": GROW % ("[1]", "dict(a=ns.x, b=ns.x)"),
    "shared-in-map": GROW % ("[1]", "[none, none]|map('default', ns.x, true)|list"),
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "two-calls-each": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "block-in-itself": "{% block a %}{{ self.a() }}{{ self.a() }}{% endblock %}",
    "recursive-loop": "{% for i in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "center": "{{ 'x'|center(10**9) }}",
    "center-method": "{{ 'x'.center(10**9) }}",
    "zfill-by-item": "{{ 'x'['zfill'](10**9) }}",
    "percent-width": "{{ '%1000000000d' % 1 }}",
    "percent-precision": "{{ '%.1000000000f' % 1 }}",
    "percent-star": "{{ '%*d'|format(1000000000, 1) }}",
    "percent-named": "{{ '%(a)1000000000d'|format(a=1) }}",
    "format-method": "{{ '{:>1000000000}'.format(1) }}",
    "format-map-method": "{{ '{a:>1000000000}'.format_map({'a': 1}) }}",
    "join": "{{ ('a' * 99999)|join('b' * 999) }}",
    "join-method": "{{ ('b' * 999).join(range(99999)) }}",
    "replace": "{{ ('a' * 99999)|replace('', 'b' * 99999) }}",
    "replace-method": "{{ ('a' * 99999).replace('a', 'b' * 99999) }}",
    "indent": "{{ 'a\nb'|indent(10**9) }}",
    "round": "{{ 1.5|round(10**7, 'ceil') }}",
    "json-indent": "{{ messages|tojson(indent=10**9) }}",
    "bytes-of-an-int": "{{ (1).to_bytes(10**9, 'big') }}",
    "slices": "{% set s = 'a' * 1000000 %}{% for i in range(99999) %}{% set q = s[1:] %}{% endfor %}",
    "date-width": "{{ strftime_now('%1000000000Y') }}",
    "budget-refill": "{% for x in [[1]|map('counted loop', -10**9)|list] %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{% endfor %}",
    "broken": "{% if %}",
    "unclosed": "{% for m in messages %}",
    "unknown-filter": "{{ 1|nothing }}",
    "unknown-tag": "{% debug %}",
    "include": "{% include 'x' %}",
    "import": "{% from 'x' import y %}",
    "extends": "{% extends 'x' %}",
    "deep-brackets": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "deep-ifs": "{% if 1 %}" * 5000 + "{% endif %}" * 5000,
    "many-sums": "{{ " + "1+" * 20_000 + "1 }}",
    "many-digits": "{{ 1" + "0" * 5000 + " }}",
    "too-long": "x" * (MAX_TEMPLATE_CHARS + 1),
}  # fmt: skip


@pytest.mark.parametrize("template", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_broken_or_hostile_template_is_stopped_with_one_line(template):
    with pytest.raises(ModelFileError, match=r"^tokenizer\.chat_template") as caught:
        render_chat(template, HELLO)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in KiB on Linux")
def test_hostile_templates_need_little_memory():
    resource = pytest.importorskip("resource")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for name, template in HOSTILE.items():
        if name.startswith(("shared-", "two-")):
            continue  # these cost time
        with pytest.raises(ModelFileError):
            render_chat(template, HELLO)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024


def test_processor_time_is_limited(monkeypatch):
    monkeypatch.setattr(template_budget, "_CPU_SECONDS", -1.0)
    with pytest.raises(ModelFileError, match="takes more than -1 seconds"):
        render_chat("{{ 'x'|upper }}", HELLO)


def test_a_stopped_template_leaves_the_next_rendering_alone():
    for _ in range(2):
        with pytest.raises(ModelFileError):
            render_chat(HOSTILE["nested-loops"], HELLO)
        assert render_chat("{{ messages[0].content }}", HELLO) == "Hello"


def test_nothing_runs_without_a_budget():
    with pytest.raises(template_budget.BudgetError, match="outside a rendering"):
        template_budget.charge(1)
    with pytest.raises(template_budget.BudgetError, match="outside a rendering"):
        template_budget.charge_value("x")
