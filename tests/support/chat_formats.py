"""Chat templates that write DeepSeek's prompt formats, and ChatML, in as few words as they need.

They render what the official ones do for the conversations of these tests, quirks included: V3
shows text or calls, never both, and leaves a single call open; R1 cuts reasoning out of the past
and opens it in the prompt; V3.1 wants arguments as objects and has a switch for thinking. None of
DeepSeek's says a word about tools.
"""

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"

_SYSTEM = """
{{- bos_token }}
{%- for m in messages if m.role == 'system' %}{{ '' if loop.first else '\n\n' }}{{ m.content }}
{%- endfor %}
"""

_V3_CALLS = """
{%- macro calls(m) %}
{%- for c in m.tool_calls %}
{{- '<｜tool▁calls▁begin｜>' if loop.first else '\n' }}
{{- '<｜tool▁call▁begin｜>' + c.type + '<｜tool▁sep｜>' + c.function.name }}
{{- '\n```json\n' + c.function.arguments + '\n```<｜tool▁call▁end｜>' }}
{%- endfor %}
{%- endmacro %}
"""

_V3_RESULTS = """
{%- elif m.role == 'tool' %}
{{- '<｜tool▁outputs▁begin｜>' if loop.previtem.role != 'tool' else '\n' }}
{{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}<｜tool▁outputs▁end｜>{% endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt and messages[-1].role != 'tool' %}<｜Assistant｜>"""

V3 = (
    _V3_CALLS
    + _SYSTEM
    + """
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '<｜User｜>' + m.content }}
{%- elif m.role == 'assistant' and m.content is none %}<｜Assistant｜>{{ calls(m) }}
{%- if m.tool_calls | length > 1 %}{{ '<｜tool▁calls▁end｜>' + eos_token }}{% endif %}
{%- elif m.role == 'assistant' %}
{{- '' if loop.previtem.role == 'tool' else '<｜Assistant｜>' }}{{ m.content + eos_token }}
"""
    + _V3_RESULTS
    + "{% endif %}"
)

R1 = (
    _V3_CALLS
    + _SYSTEM
    + """
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '<｜User｜>' + m.content }}
{%- elif m.role == 'assistant' and 'tool_calls' in m %}
{{- '<｜Assistant｜>' + (m.content or '') + calls(m) + '<｜tool▁calls▁end｜>' + eos_token }}
{%- elif m.role == 'assistant' %}
{{- '' if loop.previtem.role == 'tool' else '<｜Assistant｜>' }}
{{- m.content.split('</think>')[-1] + eos_token }}
"""
    + _V3_RESULTS
    + "<think>\n{% endif %}"
)

V31 = (
    _SYSTEM
    + """
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '<｜User｜>' + m.content }}
{%- elif m.role == 'assistant' %}
{{- '' if loop.previtem.role == 'tool' else '<｜Assistant｜><think></think>' }}{{ m.content or '' }}
{%- for c in m.tool_calls or [] %}{{ '<｜tool▁calls▁begin｜>' if loop.first }}
{{- '<｜tool▁call▁begin｜>' + c.function.name + '<｜tool▁sep｜>' }}
{{- c.function.arguments | tojson }}<｜tool▁call▁end｜>
{{- '<｜tool▁calls▁end｜>' if loop.last }}
{%- endfor %}{{ eos_token }}
{%- elif m.role == 'tool' %}{{ '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt and messages[-1].role == 'user' %}<｜Assistant｜><think>
{{- '' if thinking else '</think>' }}{% endif %}"""
)

CHATML = """
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
