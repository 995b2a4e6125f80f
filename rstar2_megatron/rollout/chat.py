"""rStar2's conversation format: text and token ids of prompts and tool responses.

A conversation on the wire is

    <|im_start|>system ... <tools> schema </tools> ...<|im_end|>
    <|im_start|>user {user_prefix}{problem}<|im_end|>
    <|im_start|>assistant
    <reason>            the generation prefix ends the prompt; the model continues from here
    ...<|im_end|>       generated, trained
    <|im_start|>user
    <tool_response>
    ...
    </tool_response><|im_end|>
    <|im_start|>assistant
    <reason>            ...

The model's turn ends with the generated `<|im_end|>`. The newline after it belongs to the format, so every
tool response starts with it. Public code drops that newline, so its training and serving render different ids.
Every piece of the wording can be replaced by `agentloop.*` keys of the YAML, or all of it by a Jinja chat template.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np

from rstar2_megatron.settings.schema import AgentLoopSettings
from rstar2_megatron.tools import (
    ToolSchema,
    render_schemas,
    required_parameters,
    tool_name,
    tool_schemas,
)
from rstar2_megatron.trajectory import Problem

TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"

_INSTRUCTIONS = """\
You are an assistant that solves problems for a user, and you can run Python code on the way.
Think first, between <reason> and </reason>; call a tool whenever a computation or a check is worth it. When \
you are sure, close your reasoning and give the result between <answer> and </answer>.

"""

TOOLS_PROMPT = """\
# Tools

These functions can be called. Each line between the <tools> tags is the JSON schema of one function:
<tools>
{tools}
</tools>

To call one, write a JSON object with its name and arguments between <tool_call> tags and end your turn:
<tool_call>
{"name": <function name>, "arguments": <JSON object of arguments>}
</tool_call>
The outcome comes back between <tool_response> tags, and you go on from there."""

SYSTEM_PROMPT = _INSTRUCTIONS + TOOLS_PROMPT

USER_PREFIX = """\
Solve the problem below. Write the result inside <answer> </answer> tags, with the final value in \\boxed{}: \
only what stands in \\boxed{} is graded.
Problem:
"""

GENERATION_PREFIX = f"{TURN_START}assistant\n<reason>"


_PROMPTS_KEPT = 256

Tokenizer = Any  # a Hugging Face tokenizer: encode, decode


class Wording(NamedTuple):
    """The texts around problems and turns; this project's own where the settings name none."""

    system_prompt: str
    user_prefix: str
    generation_prefix: str

    @classmethod
    def of(cls, settings: AgentLoopSettings, schemas: list[ToolSchema]) -> Self:
        """`schemas` are rendered into the system prompt's {tools}."""
        system, prefix, opening = settings.system_prompt, settings.user_prefix, settings.generation_prefix
        system = SYSTEM_PROMPT if system is None else system
        return cls(
            # replace, not format: the wording itself contains JSON braces
            system.replace("{tools}", render_schemas(schemas)),
            USER_PREFIX if prefix is None else prefix,
            GENERATION_PREFIX if opening is None else opening,
        )


class ChatTemplate:
    """Renders problems and tool responses for one tokenizer and one wording.

    Raises ValueError when the tokenizer does not hold `<|im_start|>` and `<|im_end|>` as single tokens.
    """

    def __init__(self, tokenizer: Tokenizer, settings: AgentLoopSettings) -> None:
        self.tokenizer = tokenizer
        self.settings = settings
        self.schemas: list[ToolSchema] = tool_schemas(settings.tools, settings.tool_descriptions)
        self.system_prompt, self.user_prefix, self.generation_prefix = Wording.of(settings, self.schemas)
        if settings.chat_template is not None:
            self.generation_prefix = self._generation_prefix_of_template()
        self._prompts: dict[str, list[int]] = {}
        self.start_id = self._single_token(TURN_START)
        self.end_id = self._single_token(TURN_END)

    def _single_token(self, token: str) -> int:
        ids = self._encode(token)
        if len(ids) != 1:
            raise ValueError(
                f"the tokenizer splits {token} into {len(ids)} tokens; rollout.model.model_path needs a "
                f"tokenizer with Qwen's special tokens {TURN_START} and {TURN_END}"
            )
        return ids[0]

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    @property
    def stop_token_ids(self) -> list[int]:
        """Tokens that end an assistant turn."""
        return [self.end_id]

    def prompt_text(self, problem: Problem) -> str:
        """The whole prompt, generation prefix included.

        The last user message is the problem and gets the user prefix. A system message of the data cannot describe the
        tools, so it is left out unless `agentloop.use_data_system_prompt` is set.
        Raises ValueError for a prompt without a user message.
        """
        messages = [m for m in problem.prompt if m["role"] != "system"]
        users = [i for i, m in enumerate(messages) if m["role"] == "user"]
        if not users:
            raise ValueError(f"problem {problem.query_id}: its prompt has no user message")
        system = self.system_prompt
        if self.settings.use_data_system_prompt:
            system = next((m["content"] for m in problem.prompt if m["role"] == "system"), system)
        if self.settings.chat_template is not None:
            return self._render(
                problem.prompt if self.settings.use_data_system_prompt else messages, opened=True
            )
        parts = [self._message("system", system)] if system else []
        for i, message in enumerate(messages):
            prefix = self.user_prefix if i == users[-1] else ""
            parts.append(self._message(message["role"], prefix + message["content"]))
        return "".join(parts) + self.generation_prefix

    def _render(self, messages: Sequence[Mapping[str, str]], *, opened: bool) -> str:
        """Text of the messages by the Jinja template; opened: with the opening of the next assistant turn."""
        text = self.tokenizer.apply_chat_template(
            list(messages),
            tools=self.schemas,
            chat_template=self.settings.chat_template,
            add_generation_prompt=opened,
            tokenize=False,
        )
        return str(text)

    def _generation_prefix_of_template(self) -> str:
        messages = [{"role": "user", "content": "?"}]
        closed, opened = (self._render(messages, opened=value) for value in (False, True))
        if not opened.startswith(closed):
            raise ValueError(
                "agentloop.chat_template changes earlier text when add_generation_prompt is set, so it has no generation prefix"
            )
        return opened.removeprefix(closed)

    @staticmethod
    def _message(role: str, content: str) -> str:
        return f"{TURN_START}{role}\n{content}{TURN_END}\n"

    def prompt_ids(self, problem: Problem) -> list[int]:
        """Token ids of `prompt_text`. The last prompts are cached, because all rollouts of a problem share one."""
        text = self.prompt_text(problem)
        if text not in self._prompts:
            if len(self._prompts) >= _PROMPTS_KEPT:
                self._prompts.clear()
            self._prompts[text] = self._encode(text)
        return list(self._prompts[text])

    def tool_response_text(self, responses: Sequence[str]) -> str:
        """Text after a generated `<|im_end|>`: the tool responses and the next turn's opening.

        Special tags inside a program's output are broken up, so that the output cannot open or close a turn.
        """
        body = "\n".join(f"<tool_response>\n{defuse(text)}\n</tool_response>" for text in responses)
        return f"\n{self._message('user', body)}{self.generation_prefix}"

    def tool_response_ids(self, responses: Sequence[str]) -> list[int]:
        """Token ids of `tool_response_text`. They are never trained on."""
        return self._encode(self.tool_response_text(responses))

    def conversation(
        self, problem: Problem, assistant_texts: Sequence[str], tool_responses: Sequence[Sequence[str]]
    ) -> list[tuple[str, bool]]:
        """A finished conversation as (text, trained) segments, for SFT data and for checks.

        `assistant_texts[i]` is the i-th turn without generation prefix and turn end. `tool_responses[i]` holds the
        responses to its calls; the last turn has none.
        """
        if len(tool_responses) != len(assistant_texts) - 1:
            raise ValueError(
                f"{len(assistant_texts)} assistant turns need {len(assistant_texts) - 1} tool responses, "
                f"got {len(tool_responses)}"
            )
        segments = [(self.prompt_text(problem), False)]
        for i, text in enumerate(assistant_texts):
            segments.append((text + TURN_END, True))
            if i < len(tool_responses):
                segments.append((self.tool_response_text(tool_responses[i]), False))
        return segments

    def decode(self, token_ids: Sequence[int] | np.ndarray) -> str:
        """Text of generated tokens with special tokens, without the closing turn end."""
        text: str = self.tokenizer.decode(token_ids, skip_special_tokens=False)
        return text.removesuffix(TURN_END)


def defuse(text: str) -> str:
    """Break `<|` of special tokens and the tool response's closing tag inside untrusted text."""
    return text.replace("<|", "< |").replace("</tool_response>", "< /tool_response>")


def check_tools_in_prompt(prompt: str, schemas: Sequence[ToolSchema]) -> None:
    """Step-0 gate: the prompt must describe every tool.

    Raises ValueError when a tool's name or one of its required parameters is missing from the prompt.
    """
    for schema in schemas:
        name = tool_name(schema)
        missing = [word for word in [name, *required_parameters(schema)] if word not in prompt]
        if missing:
            raise ValueError(
                f"the rendered prompt does not describe tool {name!r}: {missing} missing. Put {{tools}} (or "
                f"the names themselves) into agentloop.system_prompt. The prompt begins: {prompt[:200]!r}"
            )
