"""An environment: the model finds a number from 0 to 9, and the game says `higher` or `lower`."""

import re

from rstar2_megatron.trajectory import Problem


class HigherLower:
    def __init__(self, guesses: int = 4) -> None:
        self.left = guesses

    def reset(self, problem: Problem) -> str:
        """What is returned ends the prompt."""
        self.secret = int(problem.solutions[0])
        return f"You have {self.left} guesses."

    def step(self, text: str) -> tuple[str, float, bool]:
        """(observation, reward, done) of one turn: the guess is its last number."""
        self.left -= 1
        numbers = re.findall(r"\d+", text)
        guess = int(numbers[-1][:6]) if numbers else None
        if guess == self.secret:
            return "", 1.0, True
        if self.left == 0:
            return "", 0.0, True
        if guess is None:
            return "no number", 0.0, False
        return "higher" if guess < self.secret else "lower", 0.0, False
