import pytest

from kvrepro.errors import InputError
from kvrepro.experiment import models
from kvrepro.item import rendered, thinking, without_thinking


def test_a_template_that_writes_the_date_says_the_same_every_day():
    tokenizer = models.tokenizer("tiny-gqa")
    tokenizer.chat_template = (
        "{{ strftime_now('%d %b %Y') }}: {% for m in messages %}{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %} Answer:{% endif %}"
    )
    turns = [{"role": "user", "content": "Who?"}]
    assert rendered(tokenizer, turns) == "26 Jul 2024: Who? Answer:"
    assert rendered(tokenizer, turns, answer=False) == "26 Jul 2024: Who?"


def test_a_template_is_told_whether_to_think_and_one_without_the_switch_is_refused():
    plain = models.tokenizer("tiny-gqa")
    with pytest.raises(InputError, match="enable_thinking False: the chat template of .* has no such switch"):
        thinking(plain, False)
    plain.chat_template = "Answer{% if enable_thinking is defined %} {{ enable_thinking }}{% endif %}:"
    turns = [{"role": "user", "content": "Who?"}]
    texts = [rendered(thinking(plain, enable), turns) for enable in (None, True, False)]
    assert texts == ["Answer:", "Answer True:", "Answer False:"]
    assert rendered(thinking(thinking(plain, True), None), turns) == "Answer True:"


@pytest.mark.parametrize(
    ("text", "answer", "thought"),
    [
        ("tea", "tea", None),
        ("<think>\nIt says tea.\n</think>\n\ntea", "\n\ntea", "\nIt says tea.\n"),
        ("It says tea.</think>tea", "tea", "It says tea."),  # the prompt opened the block
        ("<think>It says", "", "It says"),
        ("<think></think>tea", "tea", ""),
        ("I <b>think</b> tea", "I <b>think</b> tea", None),
    ],
)
def test_an_answer_is_what_follows_the_thinking(text, answer, thought):
    assert without_thinking(text) == (answer, thought)
