from kvrepro.chat import rendered
from kvrepro.experiment import models


def test_a_template_that_writes_the_date_says_the_same_every_day():
    tokenizer = models.load("tiny-gqa").tokenizer
    tokenizer.chat_template = (
        "{{ strftime_now('%d %b %Y') }}: {% for m in messages %}{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %} Answer:{% endif %}"
    )
    turns = [{"role": "user", "content": "Who?"}]
    assert rendered(tokenizer, turns) == "26 Jul 2024: Who? Answer:"
    assert rendered(tokenizer, turns, answer=False) == "26 Jul 2024: Who?"
