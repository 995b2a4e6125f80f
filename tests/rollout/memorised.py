"""A tiny model that has learnt a few conversations by heart, so that a real engine makes real tool calls."""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rstar2_megatron.rollout.chat import ChatTemplate
from rstar2_megatron.settings.schema import AgentLoopSettings
from rstar2_megatron.tools import STANDARD_IO
from rstar2_megatron.trajectory import Problem

SETTINGS = AgentLoopSettings(system_prompt=f"{STANDARD_IO}(code, input)", user_prefix="", max_assistant_turns=2)
_STEPS = 260
ANSWER = "</reason><answer>\\boxed{42}</answer>"


def _call(code: str) -> str:
    return f"</reason><tool_call>{json.dumps({'name': STANDARD_IO, 'arguments': {'code': code, 'input': ''}})}</tool_call>"


# query id: first turn, what its tool would say (digits of the time vary)
CONVERSATIONS = {
    "right": (_call("print(6*7)"), "Tool call success\nstdout: 42\n\nexecution time: {time}s"),
    "loop": (_call("while 1: pass"), "Tool call failure\nreason: timeout\nexecution time: {time}s"),
    "broken": (
        "</reason><tool_call>{print</tool_call>",
        "Tool call failure\nreason: Tool call is not valid JSON: "
        "Expecting property name enclosed in double quotes at character 1.",
    ),
}


def problem(query_id: str) -> Problem:
    return Problem(query_id, [{"role": "user", "content": f"{query_id}?"}], ["42"])


def memorise(directory: Path) -> None:
    """Train the model of `directory` on the conversations and write it back."""
    torch.manual_seed(0)
    rng = random.Random(0)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    template = ChatTemplate(tokenizer, SETTINGS)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    loss = torch.tensor(1.0)
    for step in range(4 * _STEPS):
        if step >= _STEPS and loss.item() < 0.05:  # a last step may be a bad one
            break
        rows = []
        for query_id, (first, response) in CONVERSATIONS.items():
            time = f"{rng.randint(0, 1)}.{rng.randint(0, 99):02d}"
            segments = template.conversation(problem(query_id), [first, ANSWER], [[response.replace("{time}", time)]])
            ids: list[int] = []
            labels: list[int] = []
            for text, trained in segments:
                piece = tokenizer.encode(text, add_special_tokens=False)
                ids += piece
                labels += piece if trained else [-100] * len(piece)
            rows.append((ids, labels))
        longest = max(len(ids) for ids, _ in rows)
        input_ids = torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in rows])
        labels_t = torch.tensor([labels + [-100] * (longest - len(labels)) for _, labels in rows])
        loss = model(input_ids, labels=labels_t).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.05, f"the conversations were not learnt: loss {loss.item():.3f}"
    model.save_pretrained(directory)
