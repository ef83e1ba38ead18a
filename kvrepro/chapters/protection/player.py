"""A cache to play with: what each policy keeps of one prompt, at a budget that the reader sets in the page."""

import base64
import html
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from IPython.display import HTML

from kvrepro.chapters.protection import study
from kvrepro.chapters.protection.settings import Settings
from kvrepro.engine.policy import READINGS
from kvrepro.experiment import data
from kvrepro.experiment.figure import look
from kvrepro.experiment.models import Loaded
from kvrepro.item import Item

SCRIPT = Path(__file__).with_suffix(".js")
STYLE = Path(__file__).with_suffix(".css")


def kept_at(
    loaded: Loaded, item: Item, budgets: Sequence[int], policies: Sequence[str], reading: str, settings: Settings
) -> dict[str, Any]:
    """What the page needs: the prompt's `tokens` as text, `spans`, `budgets`, and `kept`, by
    "policy|reading|guarded|budget", a bit for each token, in base 64."""
    prompt = data.build_prompt(item, loaded.tokenizer, study.paper_limit(loaded, [item], settings.max_new_tokens))
    rows = study.retention(loaded, item, budgets, policies, reading, settings)
    kept = {}
    for (policy, row_reading, guarded, budget), part in rows.groupby(["policy", "reading", "protected", "capacity"]):
        bits = np.isin(np.arange(len(prompt.ids)), part.position)
        kept[f"{policy}|{row_reading}|{int(guarded)}|{budget}"] = base64.b64encode(np.packbits(bits)).decode()
    spans = {name: [min(at), max(at)] for name, at in prompt.spans.items() if at}
    return {"tokens": texts(loaded.tokenizer, prompt.ids), "spans": spans, "budgets": list(budgets), "kept": kept}


def texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Each token's text as it reads after the token before, with the space between the two if there is one."""
    alone = [tokenizer.decode([token]) for token in ids]
    pairs = [tokenizer.decode(list(pair)) for pair in itertools.pairwise(ids)]
    return alone[:1] + [
        pair[len(before) :] if pair.startswith(before) else after
        for pair, before, after in zip(pairs, alone, alone[1:], strict=False)
    ]


def player(held: dict[str, Any], policies: Sequence[str]) -> HTML:
    """Controls, a strip for each policy, and the prompt's text. Where scripts do not run, nothing is shown.

    held: of `kept_at`.
    """
    shown_readings = {key.split("|")[1] for key in held["kept"]}
    readings = [reading for reading in READINGS if reading in shown_readings]
    page_data = json.dumps(held, ensure_ascii=True).replace("<", "\\u003c")
    strips = "".join(
        f'<canvas width="1400" height="26" aria-hidden="true" data-policy="{html.escape(policy)}"'
        f' data-colour="{look(policy).colour}" data-name="{html.escape(look(policy).name)}"></canvas>'
        '<p aria-live="off"></p>'
        for policy in policies
    )
    middle, last = (len(held["budgets"]) - 1) // 2, len(held["budgets"]) - 1
    return HTML(f"""<div class="cache-player" hidden><style>
{STYLE.read_text(encoding="utf-8")}</style>
<label>Budget <input type="range" data-part="budget" min="0" max="{last}" value="{middle}"></label>
<output data-part="said"></output>
<button type="button" data-part="play">Shrink step by step</button><br>
<label>Reading <select data-part="reading">{_options(readings)}</select></label>
<label><input type="checkbox" data-part="guard"> protected at both ends</label>
{strips}
<label>Text as <select data-part="policy">{_options(policies)}</select> keeps it</label>
<div class="text" data-part="text" tabindex="0" role="region" aria-label="The prompt, evicted tokens struck out">
</div>
<script type="application/json">{page_data}</script><script>{SCRIPT.read_text(encoding="utf-8")}</script></div>""")


def _options(values: Sequence[str]) -> str:
    return "".join(f'<option value="{html.escape(value)}">{html.escape(look(value).name)}</option>' for value in values)
