"""The README's example runs as it stands there, and its tree names every module."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_example_runs(capsys):
    [code] = re.findall(r"```python\n(.*?)```", README, flags=re.S)
    exec(code, {})
    lines = capsys.readouterr().out.strip().splitlines()
    assert [line.split()[0] for line in lines] == ["full", "lru", "lru", "snapkv"]
    kept = [int(re.search(r"(\d+) tokens kept", line)[1]) for line in lines]
    assert kept[0] > 1000
    assert all(256 <= count < 256 + 8 for count in kept[1:3])
    assert 0.2 * kept[0] - 1 < kept[3] < 0.3 * kept[0]  # the question comes on top


def test_the_tree_names_every_module_and_folder():
    tree = README.split("## What lies where")[1]
    packages = [ROOT / "kvrepro" / name for name in ("engine", "experiment", "tools")]
    packages.append(ROOT / "kernels" / "kvrepro_kernels")
    for module in (file for package in packages for file in package.glob("*.py") if file.stem != "__init__"):
        assert re.search(rf"\b{module.stem}\b", tree) or "_kernel" in module.stem, module
    folders = [path for path in (ROOT / "kvrepro").iterdir() if (path / "__init__.py").exists()]
    assert all(f"{folder.name}/" in tree for folder in folders)
