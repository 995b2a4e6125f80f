"""The wire's requests: submissions as the public Code Judge server names them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Submission(BaseModel):
    """One program to run."""

    model_config = ConfigDict(extra="ignore")

    sub_id: str | None = None
    type: Literal["python", "cpp", "math"]
    options: dict[str, Any] | None = None
    solution: str
    input: str | None = None
    expected_output: str | None = None


class BatchSubmission(BaseModel):
    """Several programs, answered together and in order."""

    model_config = ConfigDict(extra="ignore")

    sub_id: str | None = None
    type: Literal["batch"] = "batch"
    submissions: list[Submission] = Field(min_length=1)
