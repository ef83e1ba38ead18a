"""data/ and notebooks/ as an installed package holds them, in this folder; in a clone they lie at its top."""

from pathlib import Path

ROOT = Path(__file__).parent
