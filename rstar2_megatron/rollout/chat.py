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
Every piece of the wording can be replaced by `agentloop.*` keys of the YAML, or all of it by a Jinja chat template. A
tokenizer without these two tokens (Llama 3, Mistral) keeps the wording, and its own chat template writes the turns around it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np

from rstar2_megatron.data.conversation import CONTROL_TOKEN
from rstar2_megatron.model.tokenizer_files import DATE, OWN_TEMPLATE, format_of, own_template, template_fault
from rstar2_megatron.rollout.call_format import PARSERS
from rstar2_megatron.rollout.tool_call import ParsedCall
from rstar2_megatron.rollout.tool_set import tools_of
from rstar2_megatron.settings.schema import AgentLoopSettings
from rstar2_megatron.tools import ToolSchema, render_schemas, required_parameters, tool_name
from rstar2_megatron.trajectory import Problem

TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"

_INSTRUCTIONS = """\
You are an assistant that solves problems for a user{python}.
Think first, between <reason> and </reason>{call}. When \
you are sure, close your reasoning and give the result between <answer> and </answer>."""
_PYTHON = ", and you can run Python code on the way"
_CALL = "; call a tool whenever a computation or a check is worth it"

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

USER_PREFIX = """\
Solve the problem below. Write the result inside <answer> </answer> tags, with the final value in \\boxed{}: \
only what stands in \\boxed{} is graded.
Problem:
"""

REASON = "<reason>"
GENERATION_PREFIX = f"{TURN_START}assistant\n{REASON}"
_CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_ASKED, _SAID, _TOLD = "Question0", "Reply1", "Result2"  # found again in a rendered conversation

_END_OF_MESSAGE = "<|eom_id|>"  # Llama 3 ends a turn by it, too, when it expects a tool's response
_CALL_ID = "call{:05d}"  # Mistral's templates want nine characters

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
        if system is None:
            system = _INSTRUCTIONS.format(python=_PYTHON if settings.needs_judge else "", call=_CALL if schemas else "")
            system += f"\n\n{TOOLS_PROMPT}" if schemas else ""
        return cls(
            # replace, not format: the wording itself contains JSON braces
            system.replace("{tools}", render_schemas(schemas)),
            USER_PREFIX if prefix is None else prefix,
            GENERATION_PREFIX if opening is None else opening,
        )


class TurnMarks(NamedTuple):
    """The texts that a tokenizer's format has around what is said."""

    end: str
    """The generated token that ends an assistant's turn."""
    before_response: str
    """From behind `end` to a tool response."""
    after_response: str
    """From behind a tool response to the opening of the next assistant's turn."""


class ChatTemplate:
    """Renders problems and tool responses for one tokenizer and one wording.

    Raises ValueError when the tokenizer has neither `<|im_start|>` and `<|im_end|>` as single tokens nor a chat template.
    """

    def __init__(self, tokenizer: Tokenizer, settings: AgentLoopSettings) -> None:
        self.tokenizer = tokenizer
        self.settings = settings
        self.tools = tools_of(settings)
        self.schemas: list[ToolSchema] = [tool.schema for tool in self.tools]
        self.system_prompt, self.user_prefix, self.generation_prefix = Wording.of(settings, self.schemas)
        self._wholly = settings.chat_template is not None  # the template writes the wording too
        chatml = all(len(self._encode(token)) == 1 for token in (TURN_START, TURN_END))
        if settings.chat_template == OWN_TEMPLATE or not (chatml or self._wholly):
            self._template = self._own_template()
        else:
            self._template = settings.chat_template or _CHATML
        opening = self._generation_prefix_of_template()
        if self._wholly:
            self.generation_prefix = opening
        elif settings.generation_prefix is None:
            self.generation_prefix = opening + REASON
        form: str = settings.tool_call_format
        if form == "auto":
            form = format_of(self._template) if self._wholly else "hermes"
            if not form:
                raise ValueError(
                    "agentloop.tool_call_format=auto, but agentloop.chat_template shows no known form of a tool call"
                )
        self.call_format = form
        self.turns = TurnMarks(TURN_END, f"\n{TURN_START}user\n", f"{TURN_END}\n") if chatml else self._turns_of_template()
        self._ends = [self.turns.end]
        if form == "llama3" and len(self._encode(_END_OF_MESSAGE)) == 1:
            self._ends.append(_END_OF_MESSAGE)
        self.stop_token_ids = [self._encode(end)[0] for end in self._ends]
        """Tokens that end an assistant turn."""
        self.end_id = self.stop_token_ids[0]
        # Qwen's and Hermes' templates write the tags themselves; one that knows no tools would write a bare turn of the role
        self._tool_role = self._wholly and (form != "hermes" or self._has_tags_of_its_own())
        self._prompt_ids = functools.lru_cache(_PROMPTS_KEPT)(self._encode)
        self._specials = pattern_of(special_tokens(tokenizer))
        if self._tool_role and _TOLD not in self.tool_response_text([_TOLD]):
            raise ValueError("the chat template writes nothing for the role tool; give agentloop.chat_template one that does")

    def _has_tags_of_its_own(self) -> bool:
        try:
            return "<tool_response>" in self._told_by_template([_TOLD])
        except ValueError:
            return False

    def _own_template(self) -> str:
        """The tokenizer's chat template. Raises ValueError when there is none, or it has no tools and writes the wording."""
        _, own = own_template(self.tokenizer.chat_template, whole=self._wholly)
        if not own:
            raise ValueError(
                f"the tokenizer has neither {TURN_START} and {TURN_END} as single tokens nor a chat template; rollout."
                "model.model_path needs the tokenizer of an instruct model, or a chat_template.jinja beside it"
            )
        if self._wholly and (fault := template_fault(own, self.settings.tool_call_format)):
            raise ValueError(f"agentloop.chat_template=tokenizer, but the tokenizer's chat template {fault}")
        return own

    def _turns_of_template(self) -> TurnMarks:
        said = [{"role": "user", "content": _ASKED}, {"role": "assistant", "content": _SAID}]
        told = [*said, {"role": "user", "content": _TOLD}]
        ended = self._render(said, opened=False).rpartition(_SAID)[2]
        end = str(self.tokenizer.decode(self._encode(ended)[:1])) if ended else ""
        after_reply = self._render(told, opened=True).rpartition(_SAID)[2]
        before, found, after = after_reply.removeprefix(end).partition(_TOLD)
        opening = self._generation_prefix_of_template()
        if not end or len(self._encode(end)) != 1 or not after_reply.startswith(end) or not found:
            raise ValueError(
                f"the chat template ends an assistant's turn by {ended!r}, which does not begin with one token that a "
                "tool's response can follow; give agentloop.chat_template a template that does"
            )
        return TurnMarks(end, before, after.removesuffix(opening))

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def prompt_text(self, problem: Problem) -> str:
        """The whole prompt, generation prefix included. Chat markers inside the problem's messages are broken up.

        The last user message is the problem and gets the user prefix. A system message of the data cannot describe the
        tools, so it is left out unless `agentloop.use_data_system_prompt` is set.
        Raises ValueError for a prompt without a user message.
        """
        prompt = [{**m, "content": self._defused(m["content"])} for m in problem.prompt]
        messages = [m for m in prompt if m["role"] != "system"]
        users = [i for i, m in enumerate(messages) if m["role"] == "user"]
        if not users:
            raise ValueError(f"problem {problem.query_id}: its prompt has no user message")
        system = self.system_prompt
        if self.settings.use_data_system_prompt:
            system = next((m["content"] for m in prompt if m["role"] == "system"), system)
        if self._wholly:
            return self._render(prompt if self.settings.use_data_system_prompt else messages, opened=True)
        messages[users[-1]]["content"] = self.user_prefix + messages[users[-1]]["content"]
        if not system:
            return self._render(messages, opened=False) + self.generation_prefix
        try:
            text = self._render([{"role": "system", "content": system}, *messages], opened=False)
        except ValueError:
            text = ""
        if system.strip() not in text:  # the template has no system role
            messages[0]["content"] = f"{system}\n\n{messages[0]['content']}"
            text = self._render(messages, opened=False)
        return text + self.generation_prefix

    def _render(self, messages: Sequence[Mapping[str, Any]], *, opened: bool) -> str:
        """Text of the messages by the Jinja template; opened: with the opening of the next assistant turn.

        Raises ValueError for messages that the template cannot write.
        """
        try:
            text = self.tokenizer.apply_chat_template(
                list(messages),
                tools=self.schemas if self._wholly else None,
                chat_template=self._template,
                date_string=DATE,
                add_generation_prompt=opened,
                tokenize=False,
            )
        except Exception as error:  # a template is a program, which can raise any error
            roles = ", ".join(message["role"] for message in messages)
            raise ValueError(f"the chat template cannot write a conversation of {roles}: {error}") from None
        return str(text)

    def _generation_prefix_of_template(self) -> str:
        messages = [{"role": "user", "content": _ASKED}]
        closed, opened = (self._render(messages, opened=value) for value in (False, True))
        if not opened.startswith(closed):
            raise ValueError(
                "the chat template changes earlier text when add_generation_prompt is set, so it has no generation prefix"
            )
        return opened.removeprefix(closed)

    def prompt_ids(self, problem: Problem) -> list[int]:
        """Token ids of `prompt_text`. The last prompts are cached, because all rollouts of a problem share one."""
        return list(self._prompt_ids(self.prompt_text(problem)))

    def tool_response_text(self, responses: Sequence[str]) -> str:
        """Text after a generated turn end: the tool responses and the next turn's opening.

        Special tags inside a program's output are broken up, so that the output cannot open or close a turn.
        """
        defused = [self._defused(text) for text in responses]
        if self._tool_role:
            return self._told_by_template(defused)
        body = "\n".join(f"<tool_response>\n{text}\n</tool_response>" for text in defused)
        return f"{self.turns.before_response}{body}{self.turns.after_response}{self.generation_prefix}"

    def _told_by_template(self, responses: Sequence[str]) -> str:
        """What the template writes from behind an assistant's turn end to the opening of the next turn."""
        call = {"id": _CALL_ID.format(0), "type": "function", "function": {"name": _SAID, "arguments": {}}}
        said: list[dict[str, Any]] = [
            {"role": "user", "content": _ASKED},
            {"role": "assistant", "content": _SAID, "tool_calls": [call]},
        ]
        told = [{"role": "tool", "tool_call_id": _CALL_ID.format(i), "content": text} for i, text in enumerate(responses)]
        text = self._render([*said, *told], opened=True)
        return text.partition(_SAID)[2].partition(self.turns.end)[2]

    def parse_calls(self, text: str) -> list[ParsedCall]:
        """The calls of an assistant's turn, in the format of the settings."""
        return PARSERS[self.call_format](text, self.schemas)

    def _defused(self, text: str) -> str:
        return defuse(text, self._specials)

    def user_turn_text(self, text: str) -> str:
        """Text from behind a generated turn end: a user's turn with this text, and the next turn's opening."""
        return f"{self.turns.before_response}{self._defused(text)}{self.turns.after_response}{self.generation_prefix}"

    def user_turn_ids(self, text: str) -> list[int]:
        return self._encode(self.user_turn_text(text))

    def tool_response_ids(self, responses: Sequence[str]) -> list[int]:
        """Token ids of `tool_response_text`. They are never trained on."""
        return self._encode(self.tool_response_text(responses))

    def conversation(
        self, problem: Problem, assistant_texts: Sequence[str], answers: Sequence[Sequence[str] | str]
    ) -> list[tuple[str, bool]]:
        """A finished conversation as (text, trained) segments, for SFT data and for checks.

        `assistant_texts[i]` is the i-th turn without generation prefix and turn end. `answers[i]` holds the responses to
        its calls, or the text of a user's turn; the last turn has none.
        """
        if len(answers) != len(assistant_texts) - 1:
            raise ValueError(
                f"{len(assistant_texts)} assistant turns need {len(assistant_texts) - 1} tool responses, got {len(answers)}"
            )
        segments = [(self.prompt_text(problem), False)]
        for i, text in enumerate(assistant_texts):
            segments.append((text + self.turns.end, True))
            if i < len(answers):
                answer = answers[i]
                told = self.user_turn_text(answer) if isinstance(answer, str) else self.tool_response_text(answer)
                segments.append((told, False))
        return segments

    def decode(self, token_ids: Sequence[int] | np.ndarray) -> str:
        """Text of generated tokens with special tokens, without the closing turn end."""
        text: str = self.tokenizer.decode(token_ids, skip_special_tokens=False)
        for end in self._ends:
            text = text.removesuffix(end)
        return text

    def plain(self, token_ids: Sequence[int] | np.ndarray) -> str:
        """Text of a response without special tokens, as verl gives it to rewards."""
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))


def special_tokens(tokenizer: Tokenizer) -> list[str]:
    """Texts that the tokenizer reads as control tokens; its `all_special_tokens` are only those that have a role."""
    added = tokenizer.added_tokens_decoder.values()
    return [token.content for token in added if token.special]


def pattern_of(tokens: Sequence[str]) -> re.Pattern[str] | None:
    """Finds control tokens in a text; those that the wording writes as tags, such as <tool_call>, are text."""
    control = [re.escape(token) for token in tokens if token not in _INSTRUCTIONS + TOOLS_PROMPT]
    return re.compile("|".join(control)) if control else None


def defuse(text: str, specials: re.Pattern[str] | None = None) -> str:
    """Break control tokens such as <|im_end|> and the tool response's closing tag inside untrusted text."""
    if "<|" in text:  # also of `1<|z|<2`, which is none
        text = CONTROL_TOKEN.sub(lambda found: f"< {found[0][1:]}", text)
    if specials:
        text = specials.sub(lambda found: f"{found[0][0]} {found[0][1:]}", text)
    return text.replace("</tool_response>", "< /tool_response>")


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
