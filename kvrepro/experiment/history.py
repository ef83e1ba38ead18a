"""The verdicts of a book's claims and of their first forms, by its older name."""

from typing import Any

import pandas as pd

from kvrepro.experiment import judge


def verdicts(*given: Any, **named: Any) -> pd.DataFrame:
    """`judge.verdicts`."""
    return judge.verdicts(*given, **named)
