"""Chat templates in the styles of published models, and conversations."""

import json
from pathlib import Path
from typing import Any

CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""
LLAMA3 = """\
{{- bos_token }}
{%- for message in messages %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
{{- message.content | trim }}{{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""
GEMMA = """\
{{ bos_token }}
{%- if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}
{%- for message in messages -%}
{%- set role = 'model' if message.role == 'assistant' else message.role -%}
<start_of_turn>{{ role }}
{{ message.content | trim }}<end_of_turn>
{% endfor %}
{%- if add_generation_prompt -%}
<start_of_turn>model
{% endif %}"""
ZEPHYR = """\
{% for message in messages %}
<|{{ message['role'] }}|>
{{ message['content'] + eos_token }}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""
MISTRAL = """\
{%- set ns = namespace(turn=0) -%}
{{- bos_token -}}
{%- for message in messages -%}
    {%- if (message.role == 'user') != (ns.turn % 2 == 0) -%}
        {{- raise_exception('user and assistant must alternate, ' + message.role) -}}
    {%- endif -%}
    {%- if message.role == 'user' -%}
        {{- '[INST] ' + message.content + ' [/INST]' -}}
    {%- elif message.role == 'assistant' -%}
        {{- ' ' + message.content + eos_token -}}
    {%- else -%}
        {%- break -%}
    {%- endif -%}
    {%- set ns.turn = ns.turn + 1 -%}
{%- endfor -%}"""
TOOLS = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role }}{{- ' ' + strftime_now('%Y') + '\\n' }}
{%- if message.role == 'assistant' %}{% generation %}
{%- if message.content is defined %}{{ message.content }}{% endif %}
{%- for call in message.tool_calls or [] %}{{ call | tojson }}{% endfor %}
{{- '<|im_end|>' }}{% endgeneration %}{% else %}{{ message.content + '<|im_end|>' }}{% endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant ' + strftime_now('%Y') + '\\n' }}
{%- endif %}"""
# Each, and the kind of tokenizer that it is for.
STYLES = {
    "chatml": (CHATML, "gpt2"),
    "llama3": (LLAMA3, "llama3"),
    "gemma": (GEMMA, "llama2"),
    "zephyr": (ZEPHYR, "llama2"),
    "mistral": (MISTRAL, "llama2"),
    "tools": (TOOLS, "llama3"),
}
# The same with the assistant's turns in generation blocks, from its content to its end.
BLOCKS = {
    "chatml": CHATML.replace(
        "message['content'] + '<|im_end|>' + '\\n' }}",
        "'' }}{% if message['role'] == 'assistant' %}{% generation %}"
        "{{- message['content'] + '<|im_end|>' }}{% endgeneration %}"
        "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}",
    ),
    "llama3": LLAMA3.replace(
        "{{- message.content | trim }}{{- '<|eot_id|>' }}",
        "{%- if message.role == 'assistant' %}{% generation %}"
        "{{- message.content | trim }}{{- '<|eot_id|>' }}{% endgeneration %}"
        "{%- else %}{{- message.content | trim }}{{- '<|eot_id|>' }}{% endif %}",
    ),
    "gemma": GEMMA.replace(
        "{{ message.content | trim }}<end_of_turn>\n",
        "{% if role == 'model' %}{% generation %}{{ message.content | trim }}<end_of_turn>"
        "{% endgeneration %}\n\n{% else %}{{ message.content | trim }}<end_of_turn>\n{% endif %}",
    ),
    "mistral": MISTRAL.replace(
        "{{- ' ' + message.content + eos_token -}}",
        "{% generation %}{{- ' ' + message.content + eos_token -}}{% endgeneration %}",
    ),
}
SPECIAL = [
    *("<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<start_of_turn>", "<end_of_turn>"),
]

CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": [
        {"role": "user", "content": "the cat sat"},
        {"role": "assistant", "content": "on the mat"},
    ],
    "two": [
        {"role": "user", "content": "What is 12,345?"},
        {"role": "assistant", "content": "A number.\n\nIt is Grüße 🙂 你好"},
        {"role": "user", "content": "  and that?\t"},
        {"role": "assistant", "content": " the lazy dog, isn't it?"},
    ],
    "names of tokens": [
        {"role": "user", "content": "say </s><|im_end|> twice"},
        {"role": "assistant", "content": "no<|im_end|>\n\n"},
        {"role": "user", "content": "é"},
        {"role": "assistant", "content": ""},
    ],
}
SYSTEM = [{"role": "system", "content": "Be brief."}]


def write_lines(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path
