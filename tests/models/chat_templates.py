"""Chat templates in the shapes of well-known targets, and a small tokenizer with their special tokens.

They are written for the tests: they keep what decides masks and prompts (special tokens, the order of parts, what is
dropped from history, when a template refuses), and shorten what the system prompt and the list of tools say.
"""

from dataclasses import dataclass, field
from functools import cache
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from models.data.chat_template import ChatTemplate, open_chat_template

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TAGGED = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Reasoning only after the last question, and an empty block before a last answer without it; the results of tools are
# a user's turn; a closed block in the prompt with enable_thinking=false.
QWEN3 = (
    "{%- if tools %}<|im_start|>system\n"
    "{%- if messages[0].role == 'system' %}{{ '\n' + messages[0].content + '\n' }}{% endif %}\n# Tools"
    "{%- for tool in tools %}\n{{ tool | tojson }}{% endfor %}<|im_end|>\n"
    "{% elif messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n{% endif %}"
    "{%- set ns = namespace(last=-1) %}"
    "{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}"
    "{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{%- elif m.role == 'assistant' %}"
    "{%- set content = m.content %}{% set thought = '' %}"
    "{%- if m.reasoning_content is string %}{% set thought = m.reasoning_content %}"
    "{%- elif '</think>' in content %}"
    "{%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{- '<|im_start|>assistant\n' }}"
    "{%- if loop.index0 > ns.last and (loop.last or thought) %}"
    "{{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}"
    "{%- else %}{{- content }}{% endif %}"
    "{%- for call in m.tool_calls or [] %}"
    "{%- if (loop.first and content) or not loop.first %}{{- '\n' }}{% endif %}"
    '{{- \'<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{- call.function.arguments | tojson }}{{- '}\n</tool_call>' }}{% endfor %}"
    "{{- '<|im_end|>\n' }}"
    "{%- elif m.role == 'tool' %}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}"
    "{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{% endif %}"
    "{%- endif %}{% endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{% endif %}"
    "{%- endif %}"
)
# Qwen3-2507: the prompt opens the block.
QWEN3_OPENED = QWEN3.replace(
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{% endif %}",
    "{{- '<think>\n' }}",
)
END_OF_ANSWER = "{{- '<|im_end|>\n' }}{%- elif m.role == 'tool' %}"
TAGGED_QWEN3 = QWEN3.replace(
    "{{- '<|im_start|>assistant\n' }}{%- if loop", "{{- '<|im_start|>assistant\n' }}{%- generation %}{%- if loop"
).replace(
    END_OF_ANSWER, "{{- '<|im_end|>' }}{%- endgeneration %}{{- '\n' }}{%- elif m.role == 'tool' %}"
)  # fmt: skip
assert "generation %}{%- if loop" in TAGGED_QWEN3
assert "endgeneration" in TAGGED_QWEN3
# No content beside a call, one call at a time; everything trimmed; tools in the first question.
LLAMA3 = (
    "{{- bos_token }}{% set ns = namespace(tools=tools) %}"
    "{%- if messages[0].role == 'system' %}{% set said = messages[0].content | trim %}{% set rest = messages[1:] %}"
    "{%- else %}{% set said = '' %}{% set rest = messages %}{% endif %}"
    "{{- '<|start_header_id|>system<|end_header_id|>\n\nToday: ' + (date_string or '1 Jan 2026') + '\n\n' + said }}"
    "{{- '<|eot_id|>' }}"
    "{%- for m in rest %}"
    "{%- if m.role == 'tool' %}{{- '<|start_header_id|>ipython<|end_header_id|>\n\n' + m.content | tojson }}"
    "{%- else %}{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}"
    "{%- if 'tool_calls' in m %}"
    "{%- if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
    '{{- \'{"name": "\' + m.tool_calls[0].function.name + \'", "parameters": \' }}'
    "{{- m.tool_calls[0].function.arguments | tojson + '}' }}"
    "{%- elif m.role == 'user' and ns.tools %}"
    "{{- 'Functions: ' }}{% for tool in ns.tools %}{{ tool | tojson }}{% endfor %}{% set ns.tools = none %}"
    "{{- '\n\n' + m.content | trim }}"
    "{%- else %}{{- m.content | trim }}{% endif %}{% endif %}{{- '<|eot_id|>' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
# The system prompt stands in the first question; roles alternate, so that there are no tools.
GEMMA3 = (
    "{{- bos_token }}"
    "{%- if messages[0].role == 'system' %}{% set said = messages[0].content + '\n\n' %}{% set rest = messages[1:] %}"
    "{%- else %}{% set said = '' %}{% set rest = messages %}{% endif %}"
    "{%- for m in rest %}"
    "{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}"
    "{{- (said if loop.first else '') + m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{- '<start_of_turn>model\n' }}{% endif %}"
)
# The prompt opens the block, and answers lose their reasoning.
R1 = (
    "{%- set ns = namespace(tool=false, said='') %}"
    "{%- for m in messages %}{% if m.role == 'system' %}{% set ns.said = m.content %}{% endif %}{% endfor %}"
    "{{- bos_token + ns.said }}"
    "{%- for m in messages %}"
    "{%- if m.role == 'user' %}{{- '<|User|>' + m.content }}"
    "{%- elif m.role == 'tool' %}{{- '<|tool_output_begin|>' + m.content + '<|tool_outputs_end|>' }}"
    "{%- set ns.tool = true %}"
    "{%- elif m.role == 'assistant' and m.tool_calls %}{{- '<|Assistant|><|tool_calls_begin|>' }}"
    "{%- for call in m.tool_calls %}{{- call.function.name + '\n' + call.function.arguments | tojson }}{% endfor %}"
    "{{- '<|tool_calls_end|>' + eos_token }}"
    "{%- elif m.role == 'assistant' %}"
    "{%- if ns.tool %}{{- m.content + eos_token }}{% set ns.tool = false %}"
    "{%- else %}{{- '<|Assistant|>' + m.content.split('</think>')[-1] + eos_token }}{% endif %}{% endif %}{% endfor %}"
    "{%- if add_generation_prompt and not ns.tool %}{{- '<|Assistant|><think>\n' }}{% endif %}"
)
# The first R1: its prompt does not open the block.
R1_CLOSED = R1.replace("'<|Assistant|><think>\n'", "'<|Assistant|>'")
# History and prompts without reasoning hold the end of a block alone.
DEEPSEEK_V31 = (
    "{{- bos_token }}{%- for m in messages %}"
    "{%- if m.role == 'system' %}{{- m.content }}{%- elif m.role == 'user' %}{{- '<|User|>' + m.content }}"
    "{%- elif m.role == 'assistant' %}{{- '<|Assistant|></think>' + m.content.split('</think>')[-1] + eos_token }}"
    "{%- endif %}{% endfor %}"
    "{%- if add_generation_prompt %}{{- '<|Assistant|>' + ('<think>' if thinking else '</think>') }}{% endif %}"
)
# System prompt and tools stand before the last question, and the system prompt only where no answer follows it.
MISTRAL = (
    "{%- if messages[0].role == 'system' %}{% set said = messages[0].content %}{% set rest = messages[1:] %}"
    "{%- else %}{% set rest = messages %}{% endif %}"
    "{%- set asked = rest | selectattr('role', 'equalto', 'user') | list %}"
    "{%- set ns = namespace(index=0) %}"
    "{%- for m in rest %}{% if not (m.role == 'tool' or m.tool_calls) %}"
    "{%- if (m.role == 'user') != (ns.index % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{%- set ns.index = ns.index + 1 %}{% endif %}{% endfor %}"
    "{{- bos_token }}"
    "{%- for m in rest %}"
    "{%- if m.role == 'user' %}"
    "{%- if tools and m == asked[-1] %}{{- '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}"
    "{%- if loop.last and said is defined %}{{- '[INST]' + said + '\n\n' + m.content + '[/INST]' }}"
    "{%- else %}{{- '[INST]' + m.content + '[/INST]' }}{% endif %}"
    "{%- elif m.tool_calls %}{{- '[TOOL_CALLS][' }}"
    "{%- for call in m.tool_calls %}"
    "{%- if call.id is not defined or call.id | length != 9 %}{{ raise_exception('ids of 9 characters') }}{% endif %}"
    "{{- (call.function | tojson)[:-1] + ', \"id\": \"' + call.id + '\"}' }}"
    "{{- ', ' if not loop.last else '' }}{% endfor %}{{- ']' + eos_token }}"
    "{%- elif m.role == 'assistant' %}{{- m.content + eos_token }}"
    "{%- elif m.role == 'tool' %}{{- '[TOOL_RESULTS]{\"content\": ' + m.content + '}[/TOOL_RESULTS]' }}{% endif %}"
    "{%- endfor %}"
)
# Reasoning in a channel of its own, which only the last answer keeps; another end of turn in history; the result of a
# tool names the function of the last call.
HARMONY = (
    "{{- '<|start|>system<|message|>Reasoning: ' + (reasoning_effort or 'medium') + '<|end|>' }}"
    "{%- if messages[0].role == 'system' %}{% set said = messages[0].content %}{% set rest = messages[1:] %}"
    "{%- else %}{% set said = '' %}{% set rest = messages %}{% endif %}"
    "{%- if said or tools %}{{- '<|start|>developer<|message|># Instructions\n\n' + said }}"
    "{%- if tools %}{{- '\n\n# Tools\n\n' + tools | tojson }}{% endif %}{{- '<|end|>' }}{% endif %}"
    "{%- set last = namespace(call=none) %}"
    "{%- for m in rest %}"
    "{%- if m.role == 'assistant' %}"
    "{%- if '<|channel|>' in m.content %}{{ raise_exception('pass reasoning in thinking') }}{% endif %}"
    "{%- if m.tool_calls %}"
    "{%- set later = namespace(final=false) %}"
    "{%- for other in rest[loop.index:] %}"
    "{%- if other.role == 'assistant' and 'tool_calls' not in other %}{% set later.final = true %}{% endif %}"
    "{%- endfor %}"
    "{%- if m.content and m.thinking %}{{ raise_exception('content or thinking beside a call, not both') }}{% endif %}"
    "{%- if (m.content or m.thinking) and not later.final %}"
    "{{- '<|start|>assistant<|channel|>analysis<|message|>' + (m.content or m.thinking) + '<|end|>' }}{% endif %}"
    "{%- set call = m.tool_calls[0].function %}"
    "{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}"
    "{{- call.arguments | tojson + '<|call|>' }}{% set last.call = call.name %}"
    "{%- elif loop.last and not add_generation_prompt %}"
    "{%- if 'thinking' in m %}"
    "{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{% endif %}"
    "{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|return|>' }}"
    "{%- else %}{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}"
    "{%- set last.call = none %}{% endif %}"
    "{%- elif m.role == 'tool' %}"
    "{%- if last.call is none %}{{ raise_exception('a result without a call') }}{% endif %}"
    "{{- '<|start|>functions.' + last.call + ' to=assistant<|channel|>commentary<|message|>' + m.content | tojson }}"
    "{{- '<|end|>' }}"
    "{%- else %}{{- '<|start|>user<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{% endif %}"
)
# No end of turn: the beginning of the next one ends an answer.
GLM4 = (
    "{{- '[gMASK]<sop>' }}{% if tools %}{{- '<|system|>\nTools: ' + tools | tojson }}{% endif %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'assistant' %}"
    "{%- if m.tool_calls %}{% for call in m.tool_calls %}"
    "{{- '<|assistant|>' + call.function.name + '\n' + call.function.arguments | tojson }}{% endfor %}"
    "{%- else %}{{- '<|assistant|>\n' + m.content }}{% endif %}"
    "{%- elif m.role == 'tool' %}{{- '<|observation|>\n' + m.content }}"
    "{%- else %}{{- '<|' + m.role + '|>\n' + m.content }}{% endif %}{% endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{% endif %}"
)
GLM45 = (
    "{{- '[gMASK]<sop>' }}{% if tools %}{{- '<|system|>\nTools: ' + tools | tojson }}{% endif %}"
    "{%- set ns = namespace(last=-1) %}"
    "{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'user' %}{{- '<|user|>\n' + m.content }}"
    "{{- '/nothink' if enable_thinking is defined and not enable_thinking else '' }}"
    "{%- elif m.role == 'assistant' %}{{- '<|assistant|>' }}"
    "{%- set content = m.content %}{% set thought = m.reasoning_content or '' %}"
    "{%- if not thought and '</think>' in content %}"
    "{%- set thought = content.split('</think>')[0].split('<think>')[-1] %}"
    "{%- set content = content.split('</think>')[-1] %}{% endif %}"
    "{%- if loop.index0 > ns.last and thought %}{{- '\n<think>' + thought.strip() + '</think>' }}"
    "{%- else %}{{- '\n<think></think>' }}{% endif %}"
    "{%- if content.strip() %}{{- '\n' + content.strip() }}{% endif %}"
    "{%- for call in m.tool_calls or [] %}{{- '\n<tool_call>' + call.function.name }}"
    "{%- for key, value in call.function.arguments.items() %}"
    "{{- '\n<arg_key>' + key + '</arg_key>\n<arg_value>' + value + '</arg_value>' }}{% endfor %}"
    "{{- '\n</tool_call>' }}{% endfor %}"
    "{%- elif m.role == 'tool' %}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|observation|>' }}{% endif %}"
    "{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{%- else %}{{- '<|system|>\n' + m.content }}{% endif %}{% endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}"
    "{{- '\n<think></think>' if enable_thinking is defined and not enable_thinking else '' }}{% endif %}"
)


@dataclass(frozen=True)
class Family:
    """A template, its arguments, and the tokens that end the target's answers."""

    template: str
    ends: tuple[str, ...]
    arguments: dict[str, Any] = field(default_factory=dict)

    def open(self) -> ChatTemplate:
        tokenizer = make_tokenizer(self.template)
        ends: Any = tokenizer.convert_tokens_to_ids(list(self.ends))
        template = open_chat_template(tokenizer, arguments=self.arguments, ends=frozenset(ends))
        assert template is not None
        return template


FAMILIES = {
    "chatml": Family(CHATML, ("<|im_end|>",)),
    "chatml, tagged": Family(TAGGED, ("<|im_end|>",)),
    "qwen3": Family(QWEN3, ("<|im_end|>", "<eos>")),
    "qwen3, no thinking": Family(QWEN3, ("<|im_end|>", "<eos>"), {"enable_thinking": False}),
    "qwen3, opened": Family(QWEN3_OPENED, ("<|im_end|>", "<eos>")),
    "qwen3, tagged": Family(TAGGED_QWEN3, ("<|im_end|>", "<eos>")),
    "llama3": Family(LLAMA3, ("<|eot_id|>",)),
    "gemma3": Family(GEMMA3, ("<end_of_turn>", "<eos>")),
    "r1": Family(R1, ("<eos>",)),
    "r1, closed": Family(R1_CLOSED, ("<eos>",)),
    "deepseek-v3.1": Family(DEEPSEEK_V31, ("<eos>",)),
    "deepseek-v3.1, thinking": Family(DEEPSEEK_V31, ("<eos>",), {"thinking": True}),
    "mistral": Family(MISTRAL, ("<eos>",)),
    "harmony": Family(HARMONY, ("<|return|>", "<|call|>")),
    "glm4": Family(GLM4, ("<|user|>", "<|observation|>", "<eos>")),
    "glm4.5": Family(GLM45, ("<|user|>", "<|observation|>", "<eos>")),
    "glm4.5, no thinking": Family(GLM45, ("<|user|>", "<|observation|>", "<eos>"), {"enable_thinking": False}),
}
SPECIAL = [
    "<bos>", "<eos>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<start_of_turn>", "<end_of_turn>", "<|User|>", "<|Assistant|>", "<|tool_calls_begin|>", "<|tool_calls_end|>",
    "<|tool_output_begin|>", "<|tool_outputs_end|>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "<|start|>", "<|message|>", "<|channel|>", "<|end|>",
    "<|return|>", "<|call|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>",
]  # fmt: skip
PLAIN_ADDED = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
"""Tokens of their own that decoding without special tokens keeps, as in Qwen3."""


@cache
def _trained() -> str:
    tokenizer = Tokenizer(models.BPE())
    # Line breaks stay together, and a space goes with the word after it: as in the tokenizers of these targets, text
    # around a boundary may become one token.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=340, special_tokens=SPECIAL, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(["the answer is that\n\n\nthere is\n\nan answer\n\n"] * 3, trainer)
    return tokenizer.to_str()


def make_tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    """A tokenizer of every byte and a few words, which knows the special tokens of all families."""
    made = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained()), bos_token="<bos>", eos_token="<eos>",
        additional_special_tokens=SPECIAL[2:],
    )  # fmt: skip
    made.add_tokens(PLAIN_ADDED)
    made.chat_template = template  # type: ignore[assignment]
    return made
