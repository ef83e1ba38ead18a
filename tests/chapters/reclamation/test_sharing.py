"""A shared prefix under compaction, and a control that breaks it."""

from types import SimpleNamespace

import tiny

from kvrepro.chapters.reclamation import members, sharing


def test_a_prefix_outlives_compactions_and_the_control_breaks_it():
    loaded = SimpleNamespace(model=tiny.model(), context=512, tokenizer=None)
    rows = sharing.sharing(loaded, tiny.prompts(180)[0], budget=48, new_tokens=4)
    sound, broken = rows[rows.layout != sharing.IGNORED], rows[rows.layout == sharing.IGNORED].iloc[0]
    assert (sound.slot_copies > 0).all()
    assert (sound[["hits", "logit_gap"]] == [1.0, 0.0]).all(axis=None)
    assert broken.hits < 1
    assert broken.logit_gap > 1e-2
    frame = members.verdicts({"sharing": rows.assign(item="a")}, "tiny", "quick").set_index("claim")
    assert (frame.verdict[["R6c", "R6h", "R6i"]] == "reproduced").all()
    frame = members.verdicts({"sharing": rows.assign(item="a", hits=0.9)}, "tiny", "quick").set_index("claim")
    assert frame.verdict["R6c"] == "not reproduced"
