"""The benchmark runs what it says."""

from typer.testing import CliRunner

from kvrepro.engine.catalogue import CATALOGUE
from kvrepro.tools import bench
from kvrepro.tools.bench import app, protection_conditions, random_model


def test_the_papers_conditions_are_forty_three():
    conditions = protection_conditions()
    assert len(set(conditions)) == 43
    assert {c.budget for c in conditions} == {None, 128, 256, 512}


def test_the_random_model_has_the_embedded_models_shape():
    config = random_model().config
    heads = (config.num_attention_heads, config.num_key_value_heads, config.hidden_size // config.num_attention_heads)
    assert (config.num_hidden_layers, config.hidden_size, *heads) == (8, 384, 6, 2, 64)


def test_the_harness_prints_both_ways_and_their_ratio():
    result = CliRunner().invoke(
        app, ["harness", "--items", "2", "--conditions", "3", "--tokens", "300", "--new-tokens", "9"]
    )
    assert result.exit_code == 0, result.output
    assert "3 conditions x 2 items" in result.output
    assert "one by one" in result.output
    assert "identical tokens: 6 of 6 rows" in result.output


def test_nothing_to_run_is_refused():
    result = CliRunner().invoke(app, ["harness", "--conditions", "0"])
    assert result.exit_code == 2
    assert "conditions 0: a whole number, above 0" in result.output


def test_bad_input_is_one_line_and_exit_code_2():
    result = CliRunner().invoke(
        app, ["harness", "--model", "random", "--items", "1", "--conditions", "2", "--tokens", "1"]
    )
    assert result.exit_code == 2
    assert "prompt of 1 tokens < 2" in result.output


def test_scratch_measures_every_scorer_of_the_catalogue(monkeypatch):
    seen = []

    class Peak(bench.Peak):
        def __exit__(self, *error):
            super().__exit__(*error)
            seen.append(self.bytes)

    monkeypatch.setattr(bench, "Peak", Peak)
    result = CliRunner().invoke(app, ["scratch", "--tokens", "512"])
    assert result.exit_code == 0, result.output
    evicting = [name for name, policy in CATALOGUE.items() if policy.frees and not policy.shared]
    assert {line.split()[0] for line in result.output.splitlines()[2:]} == set(evicting)
    assert len(seen) == 2 * len(evicting)
    assert max(seen) > 2**16


def test_scratch_refuses_what_it_cannot_measure():
    for given, words in ((["--policies", "quest_pages"], "no scorer of an evicting policy called 'quest_pages'"),
                         (["--tokens", "64"], "tokens 64: at least 256")):  # fmt: skip
        result = CliRunner().invoke(app, ["scratch", *given])
        assert result.exit_code == 2
        assert words in result.output
        assert result.output.count("\n") == 1


def test_memory_prints_what_a_prefill_holds():
    result = CliRunner().invoke(app, ["memory", "--tokens", "400", "--share", "0.5"])
    assert result.exit_code == 0, result.output
    assert "layer_defensive_kv" in result.output
