"""A verifiers taskset with a harness of its own, which runs its loop in this process."""

from collections.abc import Iterable
from typing import Any

import openai
import verifiers.v1 as vf
from verifiers.v1.runtimes import ProgramResult

__all__ = ["SumsHarness", "SumsTaskset"]


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData, vf.State]):
    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        if self.data.answer == "broken":
            raise KeyError("the grader's own fault")
        return float(trace.assistant_messages[-1].content == self.data.answer)

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return trace.num_turns


class SumsTaskset(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self) -> Iterable[SumTask]:
        for number, answer in enumerate(("two", "four", "broken")):
            yield SumTask(SumData(prompt=f"{number + 1} + {number + 1}?", answer=answer), self.config.task)


class SumsHarness(vf.Harness[vf.HarnessConfig]):
    """Asks, says "Sure?", and takes the second answer."""

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: Any,
        data: Any,
        **_: Any,
    ) -> ProgramResult:
        _, prompt = self.resolve_text_prompt(data)
        messages: list[Any] = [{"role": "user", "content": prompt}]
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            for _turn in range(2):
                reply = await client.chat.completions.create(model=ctx.model, messages=messages)
                messages += [reply.choices[0].message.model_dump(exclude_none=True)]
                messages += [{"role": "user", "content": "Sure?"}]
        return ProgramResult(0, "", "")
