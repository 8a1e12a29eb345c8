"""An agent that owns its loop, as a user writes it; env_host imports it too."""

from typing import Any

import opentinker as ot


class Chatty(ot.LoopEnvironment):
    """Says something twice; how much of it is vowels is the reward."""

    run_timeout_s = 300.0
    splits = ("train", "test")

    def tasks(self, split: str) -> list[dict[str, Any]]:
        return [{"about": f"{split} {number}"} for number in range(4)]

    async def run(self, *, endpoint: ot.Endpoint, seed: int, task: dict[str, Any]) -> float:
        messages: list[Any] = [{"role": "user", "content": f"Talk about {task['about']}."}]
        said = ""
        async with endpoint.client(timeout=280.0) as client:
            for _ in range(2):
                reply = await client.chat.completions.create(
                    model=endpoint.model, messages=messages, max_tokens=8
                )
                said += reply.choices[0].message.content or ""
                messages += [reply.choices[0].message.model_dump(), {"role": "user", "content": "More."}]
        return sum(letter in "aeiou" for letter in said) / 16

    def metrics(self) -> dict[str, float]:
        return {"agents": 1.0}
