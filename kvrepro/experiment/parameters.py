"""Parameters that papermill injects into a notebook, checked before anything is computed."""

import ast
import sys
from collections.abc import Sequence

from kvrepro.errors import InputError, meant

INJECTED = "# Parameters"  # the first line of the cell that papermill adds


def check_parameters(cells: Sequence[str] | None = None) -> None:
    """Raise InputError for a name that papermill was given and no cell before its own sets, which papermill only logs,
    and for a list that it was given as text.

    cells: source of the cells that were run; None: of this notebook. Outside a notebook nothing is looked at.
    """
    if cells is None:
        shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
        cells = shell.user_ns.get("In", []) if shell is not None else []
    known: set[str] = set()
    for source in cells:
        names = _set(source)
        if source.startswith(INJECTED):
            for name in sorted(names - known):
                raise InputError(
                    f"this notebook has no parameter {name!r}{meant(name, known)}: see its cell tagged parameters"
                )
            _refuse_lists_as_text(source)
        known |= names


def _refuse_lists_as_text(source: str) -> None:
    for line in ast.parse(source).body:
        if isinstance(line, ast.Assign) and isinstance(line.value, ast.Constant):
            value, name = line.value.value, ast.unparse(line.targets[0])
            if isinstance(value, str) and value.startswith(("[", "{")):
                raise InputError(
                    f'{name} is the text {value!r}: papermill passes text with -p, use -y "{name}: {value}"'
                )


def _set(source: str) -> set[str]:
    try:
        tree = ast.parse(source)
    except SyntaxError:  # magics
        return set()
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
