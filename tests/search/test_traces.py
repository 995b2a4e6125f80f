"""SFT conversations from trees: the best right solutions, token for token what the policy wrote."""

from __future__ import annotations

from rstar2_megatron.reward.rewards import Rewards
from rstar2_megatron.search.expand import Expander
from rstar2_megatron.search.mcts import MCTS
from rstar2_megatron.search.step import Step
from rstar2_megatron.search.traces import best_right, conversation
from rstar2_megatron.search.tree import Node
from rstar2_megatron.search.values import Values
from rstar2_megatron.settings.schema import RewardSettings, SearchSettings
from rstar2_megatron.trajectory import ToolCall, ToolOutcome
from tests.rollout.written import ANSWER, PROBLEM, call, make_loop
from tests.search.scripted import drive, finished, name, settings


def test_two_right_solutions_of_the_highest_mean_q() -> None:
    """Under a one of two is right, under b both, under c the only one but with a failed call."""

    def propose(path: str) -> list[Step]:
        right = {"a": (1, 0), "b": (1, 1), "c": (1,)}
        if path:
            return [finished(str(i), 2.0 * r - 1, float(r)) for i, r in enumerate(right[path])]
        failed = ToolCall("python", {}, ToolOutcome.ERROR, "no")
        return [Step("a"), Step("b"), Step("c", tool_calls=[failed])]

    search = MCTS(settings(rollouts=9, depth=2))
    drive(search, propose)
    assert [name(leaf) for leaf in best_right(search.tree)] == ["b0", "b1"]
    # c ties with b and is then dropped; a's mean is 0.5
    assert [name(leaf) for leaf in best_right(search.tree, 4)] == ["b0", "b1", "a0"]


async def test_a_conversation_renders_to_the_paths_tokens(tokenizer) -> None:
    loop = make_loop(tokenizer, [call(), ANSWER])
    searching = SearchSettings(guide="answers")
    with Rewards(RewardSettings()) as pool:
        expander = Expander(loop, Values(searching, pool, None), searching)
        (first,) = await expander.expand(PROBLEM, root := Node("0"), 1)
        (last,) = await expander.expand(PROBLEM, Node("0.1", 1, root, first), 1)
    segments = conversation(loop.template, PROBLEM, [first, last])
    assert [trained for _, trained in segments] == [False, True, False, True]
    text = "".join(text for text, _ in segments)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == [*loop.template.prompt_ids(PROBLEM), *first.ids, *last.ids]
