"""Named switches."""

import pytest

from kvrepro.chapters.protection.reading import AS_DESCRIBED, AS_RUN, resolve
from kvrepro.errors import InputError


def test_presets_differ_where_paper_and_artifact_do():
    differing = {k for k in vars(AS_RUN) if getattr(AS_RUN, k) != getattr(AS_DESCRIBED, k)}
    assert differing == set(vars(AS_RUN)) - {"first_reduction"}


def test_a_single_switch_overrides_its_preset():
    mixed = resolve("as_run", (("tie_break", "integer"),))
    assert mixed.tie_break == "integer"
    assert mixed.n_prot == "floor"


@pytest.mark.parametrize(("name", "switches"), [("as_told", ()), ("as_run", (("x", 1),)), ("as_run", (("n_prot", 1),))])
def test_unknown_names_are_refused_with_the_known_ones(name, switches):
    with pytest.raises(InputError, match="choose one of"):
        resolve(name, switches)
