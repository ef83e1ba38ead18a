"""IFEval's checkers on answers whose verdict is plain."""

import pytest

from kvrepro.chapters.leakage import scores
from kvrepro.item import Item

YES_NO = [
    ("keywords:existence", {"keywords": ["Dog", "day"]}, "a DOG a day", "a dog"),
    ("keywords:frequency", {"keyword": "knot", "frequency": 2, "relation": "at least"}, "knot Knot", "knot"),
    ("keywords:frequency", {"keyword": "knot", "frequency": 2, "relation": "less than"}, "knot", "knot Knot"),
    ("keywords:forbidden_words", {"forbidden_words": ["damn"]}, "damned", "oh Damn!"),
    ("keywords:letter_frequency", {"letter": "j", "let_frequency": 2, "let_relation": "at least"}, "Jj", "j"),
    ("length_constraints:number_words", {"num_words": 3, "relation": "less than"}, "two words", "now three words"),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "one\n***\ntwo", "one\n***\ntwo\n***\nthree"),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "it"},
        "One.\n\nIt is.",
        "It is.\n\nOne.",
    ),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[name] [age]", "[name]"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Bye. p.s. more", "Bye."),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n- b", "* a\n* b\n* c"),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*a b* and **c**", "*a* and b"),
    ("detectable_format:multiple_sections", {"section_spliter": "Part", "num_sections": 2}, "Part 1 Part 2", "Part 1"),
    ("detectable_format:json_format", {}, '```json\n{"a": 1}\n```', "{a: 1}"),
    ("detectable_format:title", {}, "<<A poem>>\nla", "<< >> la"),
    ("detectable_format:constrained_response", {}, "My answer is no.", "No."),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say it."}, "say it. It.", "It. Say it."),
    ("combination:two_responses", {}, "one\n******\ntwo", "one\n******\none"),
    ("startend:end_checker", {"end_phrase": "So there."}, "No. so there.", "So there. No."),
    ("startend:quotation", {}, '"all of it"', '"some" of it'),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "at least"},
        "TWO WORDS here",
        "ONE word",
    ),
    ("change_case:english_capital", {}, "LOUD 1!", "Loud"),
    ("change_case:english_lowercase", {}, "soft 1!", "Soft"),
    ("punctuation:no_comma", {}, "a; b", "a, b"),
]


def checks(instructions, answer):
    return scores.checks(Item("a", "follow", (), "", meta={"ifeval": instructions}), answer)


@pytest.mark.parametrize(
    ("kind", "given", "yes", "no"), YES_NO, ids=lambda value: value if isinstance(value, str) else ""
)
def test_each_class_accepts_and_refuses(kind, given, yes, no):
    assert checks([(kind, given)], yes) == {kind: True}
    assert checks([(kind, given)], no) == {kind: False}
    assert checks([(kind, given)], " ") == {kind: False}


def test_every_class_has_a_case_and_the_others_are_left_out():
    assert {case[0] for case in YES_NO} == set(scores.CHECKS)
    assert checks([("language:response_language", {})], "anything") == {}


def test_a_class_asked_twice_must_be_obeyed_twice():
    twice = [("keywords:existence", {"keywords": ["a"]}), ("keywords:existence", {"keywords": ["z"]})]
    assert checks(twice, "a") == {"keywords:existence": False}
    assert checks(twice, "a z") == {"keywords:existence": True}
