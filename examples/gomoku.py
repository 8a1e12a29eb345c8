"""Train a policy to play Gomoku: against a script, against itself, or against its own past.

    python examples/gomoku.py
    python examples/gomoku.py --play itself --size 7
    python examples/gomoku.py --play past

Whoever it trains against, it is measured against the script, from openings that training never sees.
"""

import argparse
import random
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import opentinker as ot

PLAYERS = ("x", "o")
EMPTY = "."
DIRECTIONS = ((1, 0), (0, 1), (1, 1), (1, -1))
HELD_OUT = 64
MISTAKES = 2
"""So many moves that are none are forgiven a player; the next one loses the game."""
Cell = tuple[int, int]
"""Column and row, from 0."""

_MOVE = re.compile(r"\b([a-o])(1[0-5]|[1-9])\b", re.IGNORECASE)


def name(cell: Cell) -> str:
    """As players call it: a1 is the top left one."""
    return f"{'abcdefghijklmno'[cell[0]]}{cell[1] + 1}"


@lru_cache(maxsize=16)
def windows(size: int, line: int) -> Mapping[Cell, Sequence[tuple[Cell, ...]]]:
    """For each cell the lines through it that win, without the cell itself."""
    found: dict[Cell, list[tuple[Cell, ...]]] = {(c, r): [] for c in range(size) for r in range(size)}
    for column, row in found:
        for right, down in DIRECTIONS:
            cells = [(column + i * right, row + i * down) for i in range(line)]
            for cell in cells if cells[-1] in found else ():
                found[cell].append(tuple(each for each in cells if each != cell))
    return found


class Board:
    """Stones on `size` by `size` places; `line` of one colour in a row, column or diagonal win."""

    def __init__(self, size: int, line: int, stones: Mapping[Cell, str] | None = None) -> None:
        self.size = size
        self.line = line
        self.stones = dict(stones or {})

    def free(self) -> list[Cell]:
        """Where a stone may be put, row by row."""
        places = ((column, row) for row in range(self.size) for column in range(self.size))
        return [cell for cell in places if cell not in self.stones]

    def wins(self, player: str, cell: Cell) -> bool:
        """Whether a stone of the player there makes a line."""
        around = windows(self.size, self.line)[cell]
        return any(all(self.stones.get(each) == player for each in rest) for rest in around)

    def winning(self, player: str) -> list[Cell]:
        """Where the player would win at once."""
        return [cell for cell in self.free() if self.wins(player, cell)]

    def double(self, player: str) -> list[Cell]:
        """Where a stone of the player would threaten to win in two places, of which one can be blocked."""
        already = set(self.winning(player))
        found = []
        for cell in self.free():
            places = already - {cell}
            for rest in windows(self.size, self.line)[cell]:
                owners = [self.stones.get(each) for each in rest]
                if owners.count(player) == self.line - 2 and owners.count(None) == 1:
                    places.add(rest[owners.index(None)])
            if len(places) > 1:
                found.append(cell)
        return found

    def promise(self, player: str, cell: Cell) -> int:
        """How much a stone of the player there adds to lines that can still be made."""
        other = PLAYERS[1 - PLAYERS.index(player)]
        held = ([self.stones.get(each) for each in rest] for rest in windows(self.size, self.line)[cell])
        return sum(4 ** owners.count(player) for owners in held if other not in owners)

    def with_stone(self, cell: Cell, player: str) -> "Board":
        """Another board, with one stone more."""
        return Board(self.size, self.line, {**self.stones, cell: player})

    def __str__(self) -> str:
        rows = [
            " ".join((f"{row + 1}", *(self.stones.get((column, row), EMPTY) for column in range(self.size))))
            for row in range(self.size)
        ]
        return "\n".join(("  " + " ".join("abcdefghijklmno"[: self.size]), *rows))


class Gomoku(ot.Environment):
    """Put stones in turn; five in a line win (or as many as `line` says).

    Who wins gets 1, who loses 0, and in a draw both get `draw`: where that is 0, the mean reward is the
    share of games won. A game begins with a stone of each at random places, x or o to move.
    """

    agents = PLAYERS
    splits = ("test",)
    tell_legal_actions = False  # the board says them

    def __init__(self, size: int = 9, line: int = 5, threats: bool = False, draw: float = 0.0) -> None:
        """`threats`: tell the player to move where it wins, must block, or can threaten twice."""
        if not 3 <= line <= size <= 15:
            raise ValueError(f"gomoku needs 3 <= line <= size <= 15, not line={line}, size={size}")
        if not 0 <= draw < 1:
            raise ValueError(f"draw must be in [0, 1), not {draw}")
        self.size, self.line, self.threats, self.draw = size, line, threats, draw

    def reset(self, *, seed: int, task: dict[str, Any]) -> Mapping[str, ot.Observation]:
        opening = task or self.opening(seed)
        stones = {cell_of(opening[player]): player for player in PLAYERS}
        self.board = Board(self.size, self.line, stones)
        self.mistakes = dict.fromkeys(PLAYERS, 0)
        self.moves = 0
        self.scores = dict.fromkeys(PLAYERS, 0.0)
        self.met: set[str] = set()
        return {opening["begins"]: self.seen_by(opening["begins"])}

    def step(self, actions: Mapping[str, ot.Action]) -> ot.JointStep:
        ((player, action),) = actions.items()
        other = PLAYERS[1 - PLAYERS.index(player)]
        cell = self.read(action.text)
        if cell is None:
            self.mistakes[player] += 1
            if self.mistakes[player] > MISTAKES:
                return self.ended({other: 1.0})
            return ot.JointStep({player: self.seen_by(player, "That is no free place.\n")})
        won = self.board.wins(player, cell)
        self.board = self.board.with_stone(cell, player)
        self.moves += 1
        if won:
            return self.ended({player: 1.0})
        if not self.board.free():
            return self.ended(dict.fromkeys(PLAYERS, self.draw))
        return ot.JointStep({other: self.seen_by(other, f"{player} played {name(cell)}.\n")})

    def ended(self, scores: Mapping[str, float]) -> ot.JointStep:
        """The end of the game; who is left out gets 0."""
        self.scores |= scores
        return ot.JointStep(rewards=self.scores, terminated=True)

    def finalize(self) -> Mapping[str, float]:
        # A game that a limit stops has not been won: that is 0, not an episode without a reward.
        return self.scores

    def read(self, text: str) -> Cell | None:
        """The place that a player names; None if it names none, several, or one that is not free."""
        named = {cell_of("".join(each)) for each in _MOVE.findall(text)}
        free = self.board.free()
        return next(iter(named)) if len(named) == 1 and named <= set(free) else None

    def seen_by(self, player: str, before: str = "") -> ot.Observation:
        """The board as the player to move sees it."""
        text = before
        if player not in self.met:
            self.met.add(player)
            text += f"Gomoku: {self.line} in a line win. You are {player}. Answer with a place, like b2.\n"
        text += str(self.board)
        if self.threats:
            text += self.told(player)
        info = {"size": self.size, "line": self.line, "player": player}
        info["stones"] = {name(cell): owner for cell, owner in self.board.stones.items()}
        return ot.Observation(text, info=info, legal_actions=map(name, self.board.free()))

    def told(self, player: str) -> str:
        """What stands out, in words: the most urgent only."""
        other = PLAYERS[1 - PLAYERS.index(player)]
        for word, find, owner in (
            ("Win", self.board.winning, player),
            ("Block", self.board.winning, other),
            ("Attack", self.board.double, player),
            ("Defend", self.board.double, other),
        ):
            if cells := find(owner):
                return f"\n{word}: {' '.join(map(name, cells))}"
        return ""

    def opening(self, seed: int) -> dict[str, Any]:
        """How a game of training begins."""
        dice = random.Random(f"train {seed}")
        while held_out(opening := self.any_opening(dice)):
            pass
        return opening

    def any_opening(self, dice: random.Random) -> dict[str, Any]:
        """Two stones, and who begins."""
        x, o = dice.sample(Board(self.size, self.line).free(), 2)
        return {"x": name(x), "o": name(o), "begins": dice.choice(PLAYERS)}

    def tasks(self, split: str) -> Sequence[dict[str, Any]] | None:
        if split != "test":
            return None
        found: dict[str, dict[str, Any]] = {}
        for seed in range(10_000):
            opening = self.any_opening(random.Random(f"test {seed}"))
            if held_out(opening):
                found[str(opening)] = opening
            if len(found) == HELD_OUT:
                break
        return list(found.values())

    def metrics(self) -> dict[str, float]:
        return {"moves": float(self.moves), "mistakes": float(sum(self.mistakes.values()))}


def held_out(opening: Mapping[str, Any]) -> bool:
    """One in eight openings is for tests only, whoever draws it."""
    return zlib.crc32(f"{opening['x']} {opening['o']} {opening['begins']}".encode()) % 8 == 0


def cell_of(place: str) -> Cell:
    """The cell of a name."""
    return "abcdefghijklmno".index(place[0].lower()), int(place[1:]) - 1


def board_of(seen: ot.Observation) -> tuple[Board, str, str]:
    """The board that a script sees, who it is, and the other."""
    player = seen.info["player"]
    stones = {cell_of(place): owner for place, owner in seen.info["stones"].items()}
    return Board(seen.info["size"], seen.info["line"], stones), player, PLAYERS[1 - PLAYERS.index(player)]


def best(board: Board, player: str, cells: Iterable[Cell], dice: random.Random) -> Cell:
    """The cell that promises the player most; one of those at random."""
    worth = {cell: board.promise(player, cell) for cell in cells}
    return dice.choice([cell for cell, value in worth.items() if value == max(worth.values())])


def script(seen: ot.Observation, dice: random.Random) -> str:
    """The opponent: it wins where it can, sees two threats in three, and otherwise builds lines
    of its own or, every other time, plays beside any stone. It does not look ahead.
    """
    board, player, other = board_of(seen)
    if wins := board.winning(player):
        return name(dice.choice(wins))
    if (threats := board.winning(other)) and dice.random() < 2 / 3:
        return name(dice.choice(threats))
    free = board.free()
    if dice.random() < 1 / 2:
        near = [
            cell
            for cell in free
            if any(max(abs(cell[0] - c), abs(cell[1] - r)) == 1 for c, r in board.stones)
        ]
        return name(dice.choice(near or free))
    return name(best(board, player, free, dice))


def expert(seen: ot.Observation, dice: random.Random) -> str:
    """What a good player does: a script to compare with, and for demonstrations."""
    board, player, other = board_of(seen)
    urgent = board.winning(player) or board.winning(other) or board.double(player) or board.double(other)
    return name(best(board, player, urgent or board.free(), dice))


def opponents(play: str) -> Mapping[str, Any]:
    """Who plays o in training."""
    if play == "itself":
        return {}
    return {"o": script if play == "script" else ot.OpponentPool(every=5, others=(script,))}


def main() -> None:
    """Evaluate, train, evaluate, draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument(
        "--play", choices=("script", "itself", "past"), default="script", help="whom it trains against"
    )
    parser.add_argument("--size", type=int, default=5)
    parser.add_argument("--line", type=int, default=4)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--groups", type=int, default=4, help="groups of 8 games in each step")
    parser.add_argument("--tasks", type=int, default=HELD_OUT, help="held-out openings")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", help='"vllm" or "transformers"; default: what the cluster has')
    parser.add_argument("--out", type=Path, default=Path("runs/gomoku"))
    arguments = parser.parse_args()
    with ot.connect():
        trained = ot.fit(
            env=Gomoku,
            env_options={"size": arguments.size, "line": arguments.line, "threats": True},
            agents=opponents(arguments.play),
            model=arguments.model,
            tuning=ot.LoRA(rank=16, alpha=32),
            algorithm=ot.GRPO(group_size=8),
            groups_per_step=arguments.groups,
            steps=arguments.steps,
            learning_rate=2e-4,
            sampling=ot.SamplingParams(max_tokens=5),
            evaluation=ot.Evaluation(tasks=arguments.tasks, agents={"o": script}),
            seed=arguments.seed,
            run_dir=arguments.out,
            inference=ot.ServerOptions(engine=arguments.engine),
        )
    plot = trained.plot(arguments.out / "wins.png", f"Gomoku, trained against {arguments.play}")
    print(f"{trained.summary}; saved {plot}")


if __name__ == "__main__":
    main()
