"""The cache to play with: it holds what the engine kept, and its script gets data that cannot leave their element."""

import base64
import json
import re
import shutil
import subprocess
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from kvrepro.chapters.protection import player, study
from kvrepro.chapters.protection.settings import Settings
from kvrepro.experiment import data


class Tokenizer:
    """Words with spaces between them, full stops without; one token would end a script."""

    words = ("The", "door", ".", "</script>", "opens")

    def decode(self, ids):
        return re.sub(r" \.", ".", " ".join(self.words[i] for i in ids))


@pytest.fixture
def held(monkeypatch):
    prompt = SimpleNamespace(ids=[0, 1, 2, 3, 4, 0, 1, 2, 3, 4], spans={"question": [8, 9], "none": []})
    monkeypatch.setattr(data, "build_prompt", lambda *given: prompt)
    monkeypatch.setattr(study, "paper_limit", lambda *given: 100)
    monkeypatch.setattr(study, "retention", lambda loaded, item, budgets, *rest: pd.concat(map(kept, budgets)))
    return player.kept_at(SimpleNamespace(tokenizer=Tokenizer()), None, [2, 4], ["lru"], "both", Settings())


def kept(budget):
    """The newest tokens with the text, the oldest with the code."""
    rows = [("lru", "as_described", False, 9 - i) for i in range(budget)]
    return pd.DataFrame(
        rows + [("lru", "as_run", True, i) for i in range(budget)],
        columns=["policy", "reading", "protected", "position"],
    ).assign(capacity=budget)


def test_tokens_have_their_spaces_and_spans_their_ends(held):
    assert "".join(held["tokens"][:5]) == "The door. </script> opens"
    assert held["spans"] == {"question": [8, 9]}


def test_what_is_kept_is_packed_a_bit_for_each_token(held):
    kept = {
        key: np.unpackbits(np.frombuffer(base64.b64decode(bits), np.uint8))[:10].nonzero()[0].tolist()
        for key, bits in held["kept"].items()
    }
    text, code = "lru|as_described|0", "lru|as_run|1"
    assert kept == {f"{text}|2": [8, 9], f"{text}|4": [6, 7, 8, 9], f"{code}|2": [0, 1], f"{code}|4": [0, 1, 2, 3]}


def test_the_page_holds_its_data_and_no_token_ends_its_script(held):
    text = player.player(held, ["lru"]).data
    [shown] = re.findall(r'<script type="application/json">(.*?)</script>', text, re.S)
    assert json.loads(shown) == held
    assert text.count("</script>") == 2
    assert text.index("authors&#x27; code") < text.index("authors&#x27; text")
    assert not re.search(r"https?://", text)


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_the_script_is_javascript():
    assert subprocess.run(["node", "--check", player.SCRIPT]).returncode == 0
