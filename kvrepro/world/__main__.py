"""`python -m kvrepro.world sample --task needle --n 3 --seed 7 --tokens 1900` prints items as JSON lines."""

import dataclasses
import json

import typer

from kvrepro.errors import one_line_errors
from kvrepro.world import world

app = typer.Typer(add_completion=False, help=__doc__)


@app.command()
def tasks() -> None:
    """Name the tasks, one a line."""
    print("\n".join(world.KNOWN))


@app.command()
@one_line_errors()
def sample(task: str = "needle", n: int = 1, seed: int = 0, tokens: int = 1900) -> None:
    """Print n evaluation items: id, task, messages, answer, spans, meta."""
    for item in world.sample(task, n, seed, tokens):
        row = {k: v for k, v in dataclasses.asdict(item).items() if v is not None}
        print(json.dumps(row, ensure_ascii=False))


if __name__ == "__main__":
    app()
