"""Checkers for the 23 classes of IFEval's verifiable instructions whose rule is about plain text.

The two classes that need a language detector or a sentence splitter (`UNCHECKED`) are not scored. Upper and lower case
are checked without detecting that the text is English. Written from the classes' descriptions (Zhou et al. 2023,
arXiv:2311.07911), not from their code, so that counts may differ at the margin.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping

from kvrepro.experiment.measure import one_form

UNCHECKED = ("language:response_language", "length_constraints:number_sentences")
CHOICES = ("My answer is yes.", "My answer is no.", "My answer is maybe.")


def checks(instructions: Iterable[tuple[str, Mapping]], answer: str) -> dict[str, bool]:
    """Whether an answer obeys the instructions, by class; an empty answer obeys none. Classes without a checker are
    left out; a class that occurs twice must be obeyed twice. instructions: (class, arguments), as in the data set."""
    obeyed: dict[str, bool] = {}
    for kind, arguments in instructions:
        if kind in CHECKS:
            obeyed[kind] = obeyed.get(kind, True) and bool(answer.strip()) and CHECKS[kind](answer, **arguments)
    return obeyed


def _bound(count: int, relation: str, number: int) -> bool:
    return count < number if relation == "less than" else count >= number


def _words(answer: str) -> list[str]:
    return re.findall(r"\w+", answer)


def _has_word(word: str, answer: str) -> bool:
    return re.search(rf"\b{re.escape(word)}\b", answer, re.IGNORECASE) is not None


def _paragraph_starts(answer: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    blocks = [block for block in re.split(r"\n\s*\n", answer.strip()) if block.strip()]
    if len(blocks) != num_paragraphs or nth_paragraph > len(blocks):
        return False
    return [word.lower() for word in _words(blocks[nth_paragraph - 1])[:1]] == [first_word.lower()]


def _is_json(answer: str) -> bool:
    try:
        json.loads(re.sub(r"^```(?:json)?|```$", "", answer.strip(), flags=re.IGNORECASE).strip())
    except ValueError:
        return False
    return True


def _two_responses(answer: str) -> bool:
    parts = [part.strip() for part in answer.split("******") if part.strip()]
    return len(parts) == 2 and parts[0] != parts[1]


def _count(pattern: str, answer: str) -> int:
    return len(re.findall(pattern, answer, re.MULTILINE))


def _ends(answer: str, end_phrase: str) -> bool:
    return answer.strip().strip('"').lower().endswith(end_phrase.strip().lower())


CHECKS: dict[str, Callable[..., bool]] = {
    "keywords:existence": lambda a, keywords: all(word.lower() in a.lower() for word in keywords),
    "keywords:frequency": lambda a, keyword, frequency, relation:
        _bound(a.lower().count(keyword.lower()), relation, frequency),
    "keywords:forbidden_words": lambda a, forbidden_words: not any(_has_word(word, a) for word in forbidden_words),
    "keywords:letter_frequency": lambda a, letter, let_frequency, let_relation:
        _bound(a.lower().count(letter.lower()), let_relation, let_frequency),
    "length_constraints:number_words": lambda a, num_words, relation: _bound(len(_words(a)), relation, num_words),
    "length_constraints:number_paragraphs": lambda a, num_paragraphs:
        len([part for part in re.split(r"\s?\*\*\*\s?", a) if part.strip()]) == num_paragraphs,
    "length_constraints:nth_paragraph_first_word": _paragraph_starts,
    "detectable_content:number_placeholders": lambda a, num_placeholders:
        _count(r"\[[^\[\]]+\]", a) >= num_placeholders,
    "detectable_content:postscript": lambda a, postscript_marker: postscript_marker.lower() in a.lower(),
    "detectable_format:number_bullet_lists": lambda a, num_bullets:
        _count(r"^\s*(?:\*(?!\*)|-)\s*\S", a) == num_bullets,
    "detectable_format:number_highlighted_sections": lambda a, num_highlights:
        _count(r"\*\*[^*\n]+\*\*|(?<!\*)\*[^*\n]+\*(?!\*)", a) >= num_highlights,
    "detectable_format:multiple_sections": lambda a, section_spliter, num_sections:
        _count(rf"{re.escape(section_spliter)}\s*\d+", a) >= num_sections,
    "detectable_format:json_format": _is_json,
    "detectable_format:title": lambda a: _count(r"<<[^\n<>]*\S[^\n<>]*>>", a) > 0,
    "detectable_format:constrained_response": lambda a: any(choice in a for choice in CHOICES),
    "combination:repeat_prompt": lambda a, prompt_to_repeat:
        a.strip().lower().startswith(prompt_to_repeat.strip().lower()),
    "combination:two_responses": _two_responses,
    "startend:end_checker": _ends,
    "startend:quotation": lambda a: re.fullmatch(r'".*"', a.strip(), re.DOTALL) is not None and len(a.strip()) > 2,
    "change_case:capital_word_frequency": lambda a, capital_frequency, capital_relation:
        _bound(sum(word.isupper() for word in _words(a)), capital_relation, capital_frequency),
    "change_case:english_capital": str.isupper,
    "change_case:english_lowercase": str.islower,
    "punctuation:no_comma": lambda a: "," not in a,
    "answer:contains": lambda a, answers:  # of the reader's own file
        any(one_form(text).lower() in one_form(a).lower() for text in answers),
}  # fmt: skip
