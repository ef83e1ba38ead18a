"""Where the project's files lie."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]  # the clone
DATA = ROOT / "data"
GPU = DATA / "gpu"  # tables measured on a GPU
