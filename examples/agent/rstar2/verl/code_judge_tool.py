"""verl's tool on this project's Code Judge; `compare_with_verl.sh NAME --export DIR` copies this file to DIR."""

from __future__ import annotations

from typing import Any

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse

from rstar2_megatron.judge.client.client import JudgeClient
from rstar2_megatron.rollout.tool_response import format_tool_response


class CodeJudgeTool(BaseTool):
    """`config.judge_url` is the judge's address. A judge that stays away raises, which verl shows to the model as an error."""

    _client: JudgeClient | None = None

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        if self._client is None:
            self._client = JudgeClient(self.config["judge_url"])
        result = await self._client.run(str(parameters.get("code", "")), str(parameters.get("input", "")))
        return ToolResponse(text=format_tool_response(result)), 0.0, {}
