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


# Templates that read tools, of our own making, with the constructs of published ones. What the
# assistant writes stands in generation blocks, which `without_blocks` removes.
LLAMA31 = """\
{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = "26 Jul 2024" %}{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}{%- set system_message = "" %}{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}{{- "Environment: ipython\\n" }}{%- endif %}
{{- "Today Date: " + date_string + "\\n\\n" + system_message + "<|eot_id|>" }}
{%- if tools is not none %}
    {%- if messages | length == 0 %}{{- raise_exception("no first user message") }}{%- endif %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\nFunctions:\\n\\n' -}}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
    {{- messages[0]['content'] | trim + "<|eot_id|>" }}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {%- if message.role == 'assistant' -%}{%- generation -%}
        {{- message['content'] | trim + '<|eot_id|>' -}}{%- endgeneration -%}
        {%- else %}{{- message['content'] | trim + '<|eot_id|>' }}{%- endif %}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}{{- raise_exception("one call") }}{% endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{%- generation -%}
        {{- '{"name": "' + tool_call.name + '", "parameters": ' -}}
        {{- tool_call.arguments | tojson + "}<|eot_id|>" -}}{%- endgeneration -%}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
        {{- message.content | tojson }}{%- else %}{{- message.content }}{%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""
QWEN_TOOLS = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}"""
QWEN_RESULT = """\
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
QWEN_CALLS = """\
            {%- for tool_call in message.tool_calls %}
                {%- if tool_call.function is defined %}
                    {%- set tool_call = tool_call.function %}{%- endif %}
                {{- '\\n<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
                {%- if tool_call.arguments is string %}{{- tool_call.arguments }}
                {%- else %}{{- tool_call.arguments | tojson }}{%- endif %}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
        {{- '<|im_end|>' -}}{%- endgeneration -%}{{- '\\n' }}"""
QWEN25 = (
    QWEN_TOOLS
    + """
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role -}}{{- '\\n' -}}{%- generation -%}
        {%- if message.content %}{{- message.content }}{%- endif %}
"""
    + QWEN_CALLS
    + QWEN_RESULT
)
QWEN3 = (
    QWEN_TOOLS
    + """
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages | length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages | length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string
        and not (message.content.startswith('<tool_response>')
                 and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}{%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>' + message.role + '\\n' -}}{%- generation -%}
        {%- if loop.index0 > ns.last_query_index and (loop.last or reasoning) %}
            {{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}{%- endif %}
        {{- content.lstrip('\\n') }}
"""
    + QWEN_CALLS
    + QWEN_RESULT
)
HERMES = """\
{%- macro kind(spec) %}{%- if spec.type in ({"string": "str", "number": "float"}) %}
{{- {"string": "str", "number": "float"}[spec.type] }}{%- else %}{{- "Any" }}{%- endif %}
{%- endmacro %}
{{- bos_token }}{{- '<|im_start|>system\\nYou may call functions. <tools> ' }}
{%- for tool in tools or [] %}{%- if tool.function is defined %}{%- set tool = tool.function %}
{%- endif %}{{- '{"name": "' + tool.name + '(' }}
{%- for name, spec in tool.parameters.properties | items %}{{- name + ": " + kind(spec) }}
{%- if not loop.last %}{{- ", " }}{%- endif %}{%- endfor %}
{{- ')", "parameters": ' + tool.parameters | tojson + '}' }}{%- endfor %}
{{- ' </tools><|im_end|>\\n' }}
{%- for message in messages %}
    {%- if message.role == "assistant" -%}
        {{- '<|im_start|>assistant\\n' -}}{%- generation -%}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- '<tool_call>\\n{"arguments": ' + tool_call.arguments | tojson }}
            {{- ', "name": "' + tool_call.name + '"}\\n</tool_call>' }}
        {%- endfor %}
        {%- if message.content %}{{- message.content }}{%- endif %}
        {{- '<|im_end|>' -}}{%- endgeneration -%}{{- '\\n' -}}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>tool\\n<tool_response>\\n' + message.content }}
        {{- '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
MISTRAL_TOOLS = """\
{%- set user_messages = messages | selectattr("role", "equalto", "user") | list %}
{{- bos_token }}
{%- for message in messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[0]) %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}{%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}{{- '"' + key + '": "' + val + '"' }}
                    {%- else %}{{- '"' + key + '": ' + val | tojson }}{%- endif %}
                    {%- if not loop.last %}{{- ", " }}{%- endif %}
                {%- endfor %}
                {{- "}}" }}{%- if not loop.last %}{{- ", " }}{%- endif %}
            {%- endfor %}
            {{- "][/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {{- "[INST] " + message["content"] + "[/INST]" }}
    {%- elif message.tool_calls is defined and message.tool_calls is not none -%}
        {%- generation -%}{{- "[TOOL_CALLS] [" -}}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function | tojson %}
            {{- out[:-1] }}
            {%- if not tool_call.id is defined or tool_call.id | length != 9 %}
                {{- raise_exception("Tool call IDs have nine characters") }}{%- endif %}
            {{- ', "id": "' + tool_call.id + '"}' }}
            {%- if not loop.last %}{{- ", " }}{%- endif %}
        {%- endfor %}
        {{- "]" + eos_token -}}{%- endgeneration -%}
    {%- elif message["role"] == "assistant" -%}
        {%- generation -%}{{- " " + message["content"] + eos_token -}}{%- endgeneration -%}
    {%- elif message["role"] == "tool" %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content | string }}
        {{- ', "call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}"""
SMOLLM3 = """\
{%- if enable_thinking is not defined -%}{%- set enable_thinking = true -%}{%- endif -%}
{{- "<|im_start|>system\\n## Metadata\\n\\n" -}}
{%- set today = strftime_now("%d %B %Y") -%}
{{- "Today Date: " ~ today ~ "\\n" -}}
{{- "Reasoning Mode: " + ("/think" if enable_thinking else "/no_think") + "\\n\\n" -}}
{%- if tools -%}
  {%- set ns = namespace(text="### Tools\\n\\n<tools>\\n") -%}
  {%- for tool in tools -%}{%- set ns.text = ns.text ~ (tool | string) ~ "\\n" -%}{%- endfor -%}
  {{- ns.text + "</tools>\\n\\n" -}}
{%- endif -%}
{%- if documents -%}
  {%- for document in documents -%}
    {{- "## " ~ document.title ~ "\\n" ~ document.text ~ "\\n" -}}
  {%- endfor -%}
{%- endif -%}
{{- "<|im_end|>\\n" -}}
{%- for message in messages -%}
  {%- set content = message.content if message.content is string else "" -%}
  {%- if message.role == "user" -%}
    {{- "<|im_start|>user\\n" + content + "<|im_end|>\\n" -}}
  {%- elif message.role == "assistant" -%}
    {{- "<|im_start|>assistant\\n" -}}{%- generation -%}
    {{- content.lstrip("\\n") -}}
    {%- for tool_call in message.tool_calls or [] -%}
      {{- "<tool_call>" ~ tool_call.function | tojson ~ "</tool_call>" -}}
    {%- endfor -%}
    {{- "<|im_end|>" -}}{%- endgeneration -%}{{- "\\n" -}}
  {%- elif message.role == "tool" -%}
    {{- "<|im_start|>user\\n" + content + "<|im_end|>\\n" -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<|im_start|>assistant\\n" -}}{%- endif -%}"""
TOOL_STYLES = {
    "llama 3.1": (LLAMA31, "llama3"),
    "qwen 2.5": (QWEN25, "gpt2"),
    "qwen 3": (QWEN3, "gpt2"),
    "hermes": (HERMES, "llama3"),
    "mistral": (MISTRAL_TOOLS, "llama2"),
    "smollm3": (SMOLLM3, "llama3"),
}


def without_blocks(template: str) -> str:
    return template.replace("{%- generation -%}", "").replace("{%- endgeneration -%}", "")


FUNCTIONS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Get the {name}.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "number"}},
                "required": ["city"],
            },
        },
    }
    for name in ("weather", "time")
]
DOCUMENTS = [{"title": "Grüße", "text": "It rains."}, {"title": "B", "text": "It does not."}]
CALL = {"name": "weather", "arguments": {"city": "Zürich", "days": 2}}
WITH_CALLS: list[dict[str, Any]] = [
    {"role": "user", "content": "How is the weather?"},
    {
        "role": "assistant",
        "tool_calls": [{"type": "function", "id": "call12345", "function": CALL}],
    },
    {"role": "tool", "tool_call_id": "call12345", "name": "weather", "content": '{"rain": 0.3}'},
    {"role": "assistant", "content": "Dry, mostly."},
    {"role": "user", "content": "And the time?"},
    {"role": "assistant", "content": "Noon."},
]
