"""Sections `data`, `agentloop`, `tools`, `reward` and `evaluation`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, ValidationInfo, field_validator, model_validator

from rstar2_megatron.extension.choice import name_or_code
from rstar2_megatron.extension.user_code import FOLDERS, UserCode
from rstar2_megatron.settings.sections.base import Section


class DataSettings(Section):
    type: Literal["math"] = "math"
    train_data_paths: list[str]
    """Files (jsonl, json, parquet, csv), directories that `datasets` reads, or hf:OWNER/NAME[:CONFIG][:SPLIT][@REVISION]."""
    val_data_paths: list[str] = []
    prompt_key: str = "prompt"
    """Column of the problem: a text, or a list of messages."""
    answer_key: str = "solutions"
    """Column of the accepted answers. Rows of verl's form have reward_model.ground_truth in its place."""
    rows: UserCode | None = None
    """path/to/file.py:name of a function row(dict) -> dict | Problem | None that maps any other row; None drops it."""
    max_prompt_length: int = Field(ge=1)
    filter_prompt_by_length: bool = True
    rollout_batch_size: int = Field(ge=1)
    """Problems per training step."""
    shuffle: bool = True
    seed: int = 1234


RewardFunction = Annotated[str | UserCode, name_or_code("math", "environment")]


class RewardTerm(Section):
    """One of several rewards that are added."""

    name: str = Field(pattern=r"^[^\W\d]\w*$")
    """Its mean is logged as rollout/reward/{name}."""
    function: RewardFunction
    weight: float = 1.0


class RewardSettings(Section):
    group_name: str = "RewardGroup"
    reward_type: Literal["rstar2"] = "rstar2"
    function: RewardFunction = "math"
    """math: the answer's comparison with the solutions; environment: the sum of what agentloop.environment gave, or what
    agentloop.loop set; or a function of yours, path/to/file.py:name.
    """
    terms: list[RewardTerm] = []
    """Several functions, whose weighted sum is the reward; in place of `function`."""
    positive_above: float = 0.0
    """A trajectory counts as right (resample-on-correct, pass rates, avg@k) when its reward is above this."""
    arguments: dict[str, Any] = {}
    """Keyword arguments of every call of your functions: verl's reward_kwargs."""
    function_timeout_s: float = Field(30.0, gt=0)
    """Time limit of one call of your function; of one attempt of an async one."""
    function_memory_mb: int = Field(2048, ge=64)
    """Memory that a process of your plain functions may take beyond its libraries."""
    function_concurrency: int = Field(64, ge=1)
    """Calls of your async functions at a time, for each reward worker."""
    function_retries: int = Field(2, ge=0)
    """Further attempts of an async function that failed."""
    mode: Literal["paper", "released"] = "paper"
    """paper: the last box inside the model's last <answer>; released: either of two graders on the whole response."""
    timeout_s: float = Field(2.0, gt=0)
    """Time limit for grading one answer."""
    num_workers: int = Field(1, ge=1)
    """Grading processes of one reward worker."""

    @property
    def weighted(self) -> list[RewardTerm]:
        """The terms; `function` alone is one."""
        name = self.function if isinstance(self.function, str) else self.function.name
        return self.terms or [RewardTerm(name=name, function=self.function)]

    @property
    def has_math(self) -> bool:
        """Whether the built-in grader compares answers with solutions."""
        return any(term.function == "math" for term in self.weighted)

    @property
    def has_own(self) -> bool:
        """Whether a function is the user's."""
        return any(not isinstance(term.function, str) for term in self.weighted)

    @model_validator(mode="after")
    def _one_form(self) -> RewardSettings:
        if self.terms and self.function != "math":
            raise ValueError("function and terms are both set; name the function as one of the terms")
        names = [term.name for term in self.terms]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"terms has the name {twice[0]!r} twice")
        return self


class ToolLimits(Section):
    """Limits of a tool that is not the judge's."""

    timeout_s: float = Field(30.0, gt=0)
    """A call that takes longer is a timeout, which counts as an error of the model."""
    max_concurrency: int = Field(32, ge=1)
    """Calls at the same time in each rollout worker; further ones wait, and their time does not count as the tool's."""
    max_length: int | None = Field(None, ge=16)
    """Characters of a result shown to the model; null: agentloop.max_tool_response_length."""


class OwnToolSettings(ToolLimits):
    """A tool of the user."""

    use: UserCode
    """A typed, documented function, or a class with `__call__`: `path/to/file.py:name` or `package.module:name`."""
    settings: dict[str, Any] = {}
    """Arguments of the function that the model does not see, or of the class when it is made."""


class McpSettings(ToolLimits):
    """The tools of an MCP server, which share the limits."""

    mcp: str
    """Command that starts it, or its address (http://host:port/mcp). Each rollout worker has its own connection."""
    tools: list[str] | None = None
    """Names of those to use; null: all."""

    @field_validator("mcp")
    @classmethod
    def _found(cls, value: str, info: ValidationInfo) -> str:
        """Files that a command names count from where paths of `UserCode` do; the program itself is found by PATH."""
        if value.startswith(("http://", "https://")):
            return value
        folders = (info.context or {}).get(FOLDERS, [Path.cwd()])
        words = shlex.split(value)
        for at, word in enumerate(words):
            if at or "/" in word:
                found = (Path(folder) / Path(word).expanduser() for folder in folders)
                words[at] = next((str(path) for path in found if path.is_file()), word)
        return shlex.join(words)


def _kind_of_tool(value: Any) -> str:
    if isinstance(value, McpSettings) or (isinstance(value, dict) and "mcp" in value):
        return "mcp"
    return "name" if isinstance(value, str) and ":" not in value else "own"


def _own_tool(value: Any) -> Any:
    return {"use": value} if isinstance(value, str) else value


ToolEntry = Annotated[
    Annotated[str, Tag("name")]
    | Annotated[OwnToolSettings, BeforeValidator(_own_tool), Tag("own")]
    | Annotated[McpSettings, Tag("mcp")],
    Discriminator(_kind_of_tool),
]


WORDING = ("system_prompt", "user_prefix", "generation_prefix", "chat_template", "tool_call_format")
"""Keys of `agentloop` that say how a conversation is written."""


class AgentLoopSettings(Section):
    tools: list[ToolEntry] = ["python_code_with_standard_io"]
    """The model's tools: names that tools.py defines, `my_tools.py:search`, or such a tool with its limits as a mapping
    `{use: my_tools.py:search, timeout_s: 10}`, or an MCP server `{mcp: command or address}` (docs/extend.md).
    """
    environment: UserCode | None = None
    """A class with reset(problem) and step(text) that answers each turn which calls no tool (docs/extend.md)."""
    environment_settings: dict[str, Any] = {}
    """Keyword arguments of the class."""
    environment_timeout_s: float = Field(30.0, gt=0)
    """Time limit of one reset or step."""
    loop: UserCode | None = None
    """An async function (problem, dialogue) that composes the turns itself (docs/extend.md)."""
    use_data_system_prompt: bool = False
    """A system message in the data replaces the system prompt, and must then describe the tools."""
    max_assistant_turns: int = Field(5, ge=1)
    max_parallel_calls: int = Field(1, ge=1)
    """Calls of a turn that are run, together."""
    tool_call_format: Literal["hermes", "qwen3_coder", "llama3", "pythonic", "mistral", "auto"] = "hermes"
    """How the model writes calls; auto: as its chat template says. Others than hermes need a chat_template, whose tool role
    then also writes the responses, or a system_prompt that describes the format.
    """
    tool_noise: float = Field(0.0, ge=0, lt=1)
    """Share of the calls that are not run and fail, as those of an unreliable tool: for experiments (docs/ablations.md)."""
    max_tool_response_length: int = Field(256, ge=16)
    """Characters of a program's result shown to the model; why a call was refused is shown whole."""
    tool_response_truncate_side: Literal["left", "middle", "right"] = "middle"
    """The end that is kept, as in RLinf (`middle`: both). Since verl#6313 left and right name the cut end there."""
    max_identical_calls: int | None = Field(None, ge=2)
    """End a trajectory that makes the same call, with equal arguments, this many times in a row; null: never."""
    max_malformed_turns: int | None = Field(None, ge=1)
    """End a trajectory after this many turns in a row without a call that can be run; null: never."""
    system_prompt: str | None = None
    """null: rStar2's system prompt. {tools} is replaced by the JSON tool schema."""
    user_prefix: str | None = None
    """Text before the problem; null: rStar2's."""
    generation_prefix: str | None = None
    """First text of every assistant turn; null: rStar2's `<reason>` prefix."""
    chat_template: str | None = None
    """A Jinja chat template, the path of its file, or `tokenizer` for the tokenizer's own, in place of the three keys
    above: RLinf's rollout.custom_chat_template. null: the three keys, in ChatML or else in the tokenizer's own turns.
    """
    tool_descriptions: list[dict[str, Any]] | None = None
    """Function schemas, or the path of a JSON or YAML file with them, in place of the descriptions in tools.py."""

    @property
    def needs_judge(self) -> bool:
        """Whether a tool is one of the built-in ones, which run programs at the Code Judge."""
        return any(isinstance(tool, str) for tool in self.tools)

    def in_own_wording(self) -> AgentLoopSettings:
        """These settings with this project's own texts and form of calls."""
        return self.model_copy(update={name: type(self).model_fields[name].default for name in WORDING})

    @model_validator(mode="after")
    def _one_wording(self) -> AgentLoopSettings:
        pieces = {name: getattr(self, name) for name in ("system_prompt", "user_prefix", "generation_prefix")}
        written = [name for name, text in pieces.items() if text is not None]
        if self.environment is not None and self.loop is not None:
            raise ValueError("environment and loop are both set; a loop of yours talks to its environment itself")
        if self.environment_settings and self.environment is None:
            raise ValueError(
                "environment_settings are set and environment is not; a loop's are its arguments, loop: {reference: FILE:NAME, "
                "arguments: {...}}"
            )
        if self.chat_template is not None and written:
            raise ValueError(f"chat_template is the whole wording, and {', '.join(written)} are written too; set them to null")
        if self.chat_template is None and self.system_prompt is None and self.tool_call_format not in ("hermes", "auto"):
            raise ValueError(
                f"tool_call_format={self.tool_call_format}, but this project's system prompt describes hermes calls; set "
                "chat_template=tokenizer, or a system_prompt that describes the format"
            )
        return self


class CodeJudgeSettings(Section):
    host_addr: str | None = None
    """Address of a running judge; null: the run starts its own on loopback."""
    host_port: int | None = Field(None, ge=1, le=65535)
    """null: a free port; of a running judge 8088."""
    redis_uri: str | None = None
    """URI of a running Redis, e.g. redis://host:6379/0; null: the run starts its own on loopback."""
    num_workers: int = Field(2, ge=1)
    """Execution slots of the judge that the run starts."""
    time_limit_s: float = Field(4.0, gt=0)
    """Of a call, without its waits for a core."""
    memory_mb: int = Field(512, ge=64)
    """Of a call, beyond the interpreter with numpy and sympy loaded."""
    request_timeout_s: float = Field(60.0, gt=0)
    """How long a request waits for its answer before it is sent again."""
    max_outage_s: float = Field(120.0, ge=0)
    """Seconds that calls wait for an unreachable judge before their trajectories are dropped."""
    max_concurrency: int = Field(128, ge=1)
    """Calls in flight of each rollout worker."""


class ToolsSettings(Section):
    codejudge: CodeJudgeSettings = CodeJudgeSettings()


class EvaluationSettings(Section):
    before_and_after: bool = True
    num_problems: int = Field(-1, ge=-1)
    """Number of problems of data.val_data_paths to use; -1: all."""
    num_samples: int = Field(1, ge=1)
    """k of avg@k."""
    temperature: float = Field(0.6, ge=0)
    max_assistant_turns: int | None = None
    max_new_tokens: int | None = None
    save_trajectories: bool = True
    """Every trajectory of each evaluation of a run, in evaluation/{when}.jsonl."""
