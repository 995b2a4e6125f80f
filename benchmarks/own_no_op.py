"""An own tool and an own reward that do nothing, for what the doors of docs/extend.md cost.

    python -m benchmarks.step_cpu --trees . . --override ... \\
      --second-override "agentloop.tools=[benchmarks/own_no_op.py:python_code_with_standard_io]" \\
      "reward.function=benchmarks/own_no_op.py:score"
"""

from __future__ import annotations

from rstar2_megatron.trajectory import Problem, Trajectory


def python_code_with_standard_io(code: str, input: str) -> str:
    """Execute Python code with standard input and standard output.

    Args:
        code: The program.
        input: Its standard input.
    """
    return "Tool call success\nstdout: 0\nstderr: \nexecution time: 0.00s"


def score(problem: Problem, trajectory: Trajectory) -> float:
    """1 where the answer stands in the last turn."""
    return float(any(solution in trajectory.assistant_texts[-1] for solution in problem.solutions))
