"""The tables of the reclamation chapter as its claims (`data/claims/reclamation.yml`) choose from them."""

from collections.abc import Mapping

import pandas as pd

from kvrepro.chapters.reclamation.study import Settings
from kvrepro.chapters.reclamation.survivors import label
from kvrepro.engine.policy import is_own
from kvrepro.experiment.models import Loaded

CONTRASTS: dict = {}
REQUIRES: dict = {}


def tidied(tables: Mapping[str, pd.DataFrame], loaded: Loaded, settings: Settings) -> dict[str, pd.DataFrame]:
    """The tables of `study.run`, in which a reader's own policies have their names. In `decoding` stand also victims by
    lot. `accepted` are the rows of `identity` by `title`; their `policy` is "given" but for a reader's own."""
    names = {label(name): name for name in settings.policies if is_own(name)}
    tidy = {name: t.assign(policy=t.policy.replace(names)) if "policy" in t else t for name, t in tables.items()}
    if "synthetic" in tidy and settings.block_size == 16:
        lot = tidy["synthetic"].query("pattern == 'random victims while decoding'").assign(policy="by lot", kept=0.1)
        lot = lot.assign(item=["draw " + str(draw) for draw in lot.draw])
        tidy["decoding"] = pd.concat([tidy.get("decoding", lot[:0]), lot], ignore_index=True)
    if "identity" in tidy:
        tidy["identity"] = rows = tidy["identity"].assign(title=tidy["identity"].policy)
        own = rows.policy.isin(names.values())
        tidy["accepted"] = rows.assign(policy=rows.policy.where(own, "given"))
    return tidy
