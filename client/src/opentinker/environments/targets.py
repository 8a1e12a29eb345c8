"""Targets: how an environment class is named where only text can travel.

    my_package.games:MyGame
    opentinker.environments.adapters.textarena:textarena_environment("TicTacToe-v0", players=2)

The second calls a function that makes the class. Its arguments are Python literals, read and never evaluated.
"""

import ast
from dataclasses import dataclass
from typing import Any

from opentinker.environments.errors import EnvironmentDefinitionError


@dataclass(frozen=True, slots=True)
class Target:
    """What a target says, before anything is imported."""

    module: str
    attributes: tuple[str, ...]
    arguments: tuple[tuple[Any, ...], dict[str, Any]] | None = None
    """Of the call, where it is one."""

    @classmethod
    def read(cls, text: str) -> "Target":
        """EnvironmentDefinitionError if it is none."""
        module, _, rest = text.partition(":")
        try:
            node = ast.parse(rest, mode="eval").body
            if not isinstance(node, ast.Call):
                return cls(module, _dotted(node))
            positional = tuple(ast.literal_eval(each) for each in node.args)
            named = {each.arg: ast.literal_eval(each.value) for each in node.keywords if each.arg}
            if len(named) < len(node.keywords):
                raise ValueError("**")
            return cls(module, _dotted(node.func), (positional, named))
        except (SyntaxError, ValueError):
            raise EnvironmentDefinitionError(
                f"{text!r} does not name a class as module:Class, or a function that makes one as "
                "module:function(literal, name=literal)"
            ) from None

    def made_of(self, module: Any) -> Any:
        """What it names in its imported module."""
        value = module
        for name in self.attributes:
            value = getattr(value, name)
        if self.arguments is None:
            return value
        positional, named = self.arguments
        return value(*positional, **named)


def _dotted(node: ast.expr) -> tuple[str, ...]:
    if isinstance(node, ast.Attribute):
        return (*_dotted(node.value), node.attr)
    if isinstance(node, ast.Name):
        return (node.id,)
    raise ValueError(node)
