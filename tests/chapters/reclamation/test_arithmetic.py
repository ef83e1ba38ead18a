"""Sums of memory, against numbers worked out by hand."""

from types import SimpleNamespace

from kvrepro.chapters.reclamation import arithmetic
from kvrepro.chapters.reclamation.settings import Settings
from kvrepro.experiment import verdict


def test_bytes_of_a_token_and_tokens_beside_the_weights():
    token = 2 * 64 * 8 * 128 * 2  # keys and values, layers, KV heads, dimensions, bytes
    rows = arithmetic.memory().set_index("check").value
    assert rows["tokens in 24 x 10^9 bytes, four bits for every weight"] == (24_000_000_000 - 16_400_000_000) // token
    ends = 2 * 151_936 * 5_120  # embeddings and output layer, two bytes a weight; the others 4.15625 bits
    held = 2 * ends + (32_800_000_000 - ends) * 4.15625 / 8
    assert rows["tokens in 24 x 2^30 bytes"] == (24 * 2**30 - held) // token == 24_512
    assert rows["smaller by GQA"].tolist()[0] == 32 / 8


def test_one_model_with_four_times_as_many_query_heads_refutes_eight_and_is_named():
    table, model = arithmetic.memory(), SimpleNamespace(name="none")
    few = table[(table.check != "smaller by GQA") | (table.value >= 8)]
    for rows, expected in ((table, "not reproduced"), (few, "reproduced")):
        frame = verdict.verdicts("reclamation", {"memory": rows}, model, Settings(), ["R8"])
        assert frame.verdict.tolist() == [expected]
