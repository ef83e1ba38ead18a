"""The README's example runs as it stands there, and each package names its modules."""

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
