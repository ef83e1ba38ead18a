"""The README's example runs as it stands there, and its tree names every module."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_example_runs(capsys):
    [code] = re.findall(r"```python\n(.*?)```", README, flags=re.S)
    exec(code, {})
    lines = capsys.readouterr().out.strip().splitlines()
    assert [line.split(" C=")[0].split("  ")[0] for line in lines] == ["full cache", "lru", "lru"]
    kept = [int(re.search(r"(\d+) tokens kept", line)[1]) for line in lines]
    assert kept[0] > 1000
    assert all(256 <= count < 256 + 8 for count in kept[1:])


def test_the_tree_names_every_module():
    tree = README.split("## What lies where")[1]
    modules = {file.name for folder in ("kvrepro", "kernels/kvrepro_kernels") for file in (ROOT / folder).glob("*.py")}
    missing = {name for name in modules - {"__init__.py"} if name not in tree}
    assert not missing
