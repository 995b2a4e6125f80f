"""Own rewards, in the two forms that are recognised. rewards.yaml adds them; docs/extend.md says what they may do."""

from rstar2_megatron.trajectory import Problem, Trajectory


def compute_score(data_source, solution_str, ground_truth, extra_info, **kwargs):
    """verl's form, unchanged: 1 when the last box holds the known answer."""
    answer = solution_str.rpartition("\\boxed{")[2].partition("}")[0]
    return {"score": float(answer.strip() == ground_truth), "answer_chars": len(answer)}


def tool_use(problem: Problem, trajectory: Trajectory) -> float:
    """This project's form sees turns, tool calls and the row's own columns: 1 when every call worked, and there was one."""
    return float(bool(trajectory.tool_calls) and not trajectory.num_tool_errors)
