"""Tools: a tool server of the taskset's, whose address the harness is handed."""

import re

import verifiers.v1 as vf


class ToolData(vf.TaskData):
    answer: str


class ToolTask(vf.Task[ToolData]):
    @vf.reward(weight=1.0)
    async def right(self, task, trace) -> float:
        said = [message.content or "" for message in trace.messages if message.role == "assistant"]
        found = re.findall(r"-?\d+", said[-1]) if said else []
        return float(bool(found) and found[-1] == task.answer)

    @vf.reward(weight=0.3)
    async def used(self, trace) -> float:
        return float(any(message.role == "tool" for message in trace.messages))


class CalculatorConfig(vf.SharedToolsetConfig):
    pass


class Calculator(vf.Toolset[CalculatorConfig]):
    TOOL_PREFIX = None

    @vf.tool
    async def calculate(self, expression: str) -> str:
        """One operation on two numbers."""
        a, sign, b = re.fullmatch(r"\s*(\d+)\s*([-+*])\s*(\d+)\s*", expression).groups()
        return str({"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[sign])


class ToolTaskset(vf.Taskset[ToolTask]):
    def load(self):
        for a in range(100, 112):
            for b in range(20, 27):
                prompt = f"Ann has {a} coins and finds {b} more. How many coins is that?"
                yield ToolTask(ToolData(prompt=prompt, answer=str(a + b)), self.config.task)

    @classmethod
    def toolsets(cls, config):
        return [Calculator(CalculatorConfig())]


__all__ = ["ToolTaskset"]

if __name__ == "__main__":
    Calculator.run()
