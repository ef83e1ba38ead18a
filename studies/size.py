"""Lines and files of each folder beside their bounds: `make size`; exit status 1 where one is passed."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
BOUNDS = {"kvrepro/engine": 5800, "kvrepro/experiment": 3300, "kvrepro/world": 1100, "kvrepro/chapters": 5500}
BOUNDS |= {"kvrepro": 16500, "kernels": 2700, "studies": 2800, "book/_ext": 200, "tests": 16000}
BOUNDS |= {"README.md": 80, "CHANGELOG.md": 150}
FILES, LONGEST, SKIPS = 90, 550, 40  # of kvrepro; and how many `fmt: skip` there may be in all
TRADE = 300  # lines by which a folder of kvrepro may pass its bound, as long as the sum holds


def lines(path: Path) -> int:
    """Of a file, or of all Python files below a folder."""
    files = [path] if path.is_file() else path.rglob("*.py")
    return sum(file.read_text(encoding="utf-8").count("\n") for file in files)


def main() -> int:
    """Print the table; returns the exit status."""
    package = sorted((ROOT / "kvrepro").rglob("*.py"))
    longest = max(package, key=lines)
    folders = ("kvrepro", "kernels", "studies", "book", "tests")
    every = [file for name in folders for file in (ROOT / name).rglob("*.py")]
    skips = sum(len(re.findall(r"# fmt: (?:skip|off)", file.read_text(encoding="utf-8"))) for file in every)
    rows = [(name, lines(ROOT / name), most) for name, most in BOUNDS.items()]
    rows += [("files of kvrepro", len(package), FILES), (f"the longest, {longest.name}", lines(longest), LONGEST)]
    rows += [("# fmt: skip", skips - 1, SKIPS)]  # but for the pattern above
    passed = False
    for name, count, most in rows:
        too_many = count > most + TRADE * name.startswith("kvrepro/")
        passed |= too_many
        note = "   too many" if too_many else "   by a trade" if count > most else ""
        print(f"{name:<26}{count:>8,} of {most:>6,}{note}")
    return int(passed)


if __name__ == "__main__":
    sys.exit(main())
