"""LongBench's sets: an archive of the published layout, prompts, and the cut out of the middle."""

import json
import zipfile

import checkpoint
import pytest

from kvrepro.experiment import data, measure
from kvrepro.experiment.prompt import LONGBENCH

TOKENIZER = checkpoint.tokenizer()
PUBLISHED = {  # set -> metric and new tokens, as eval.py and dataset2maxlen.json of the public code have them
    "narrativeqa": ("qa_f1", 128), "qasper": ("qa_f1", 128), "multifieldqa_en": ("qa_f1", 64),
    "hotpotqa": ("qa_f1", 32), "2wikimqa": ("qa_f1", 32), "musique": ("qa_f1", 32),
    "gov_report": ("rouge", 512), "qmsum": ("rouge", 512), "multi_news": ("rouge", 512),
    "trec": ("classification", 64), "triviaqa": ("qa_f1", 32), "samsum": ("rouge", 128),
    "passage_count": ("count", 32), "passage_retrieval_en": ("retrieval", 32),
    "lcc": ("code_similarity", 64), "repobench-p": ("code_similarity", 64),
}  # fmt: skip
PLAIN = {"trec", "triviaqa", "samsum", "lcc", "repobench-p"}  # pred.py gives these to a model as they are
ANSWERS = {"trec": ["Date"], "passage_count": ["7"], "passage_retrieval_en": ["Paragraph 12"], "lcc": ["int x = {0};"]}


@pytest.fixture
def archive(tmp_path, monkeypatch):
    """LongBench's archive as published: data/<set>.jsonl in one zip, three rows of each set here."""
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as folder:
        for name in LONGBENCH:
            same = {"dataset": name, "language": "en", "_id": "x", "all_classes": ["Date", "City"] * (name == "trec")}
            lines = []
            for i in range(3):
                answers = {"answers": ANSWERS.get(name, [f"A{i}", "B"]), "length": 5999 + i}
                texts = {"input": f"What is {i}?", "context": f"{name} {{}} {i} " * 40}
                lines.append(json.dumps(same | answers | texts) + "\n")
            folder.writestr(f"data/{name}.jsonl", "".join(lines))
    monkeypatch.setattr(data, "fetch", lambda name: tmp_path / name.split("/")[1])
    return tmp_path / "data.zip"


def test_all_english_sets_come_with_their_metric_and_length(archive):
    items = data.load_items("longbench", 48)
    assert {item.task: (item.meta["metric"], item.meta["max_new_tokens"]) for item in items} == PUBLISHED
    assert len({item.id for item in items}) == 48
    assert {item.task for item in items if item.meta["first_line"]} == {"trec", "triviaqa", "samsum"}
    first = items[0]
    assert (first.id, first.answer, first.meta["answers"]) == ("2wikimqa-000", "A0", ["A0", "B"])
    assert all(item.new_tokens(7) == PUBLISHED[item.task][1] for item in items)


@pytest.mark.parametrize("item", [*PUBLISHED])
def test_a_right_answer_has_the_full_official_score(archive, item):
    [first, *_] = data.load_items(f"longbench:{item}")
    for answer in first.meta["answers"]:
        scored = measure.official(f"\n{answer}\nmore", first.meta["answers"], first.meta)
        exact = {"official": pytest.approx(1.0), "metric": first.meta["metric"]}
        assert scored == exact or not first.meta["first_line"]
        assert measure.official(answer, first.meta["answers"], first.meta) == exact


def test_the_protection_paper_s_form_has_its_prompt_and_its_longest_passages(archive):
    items = data.load_items("longbench:protection", 12)
    assert [item.task for item in items] == [task for task in data.GROUPS["qa"] for _ in range(2)]
    assert [item.answer for item in items[:2]] == ["A0", "A1"]  # the third passage is longer than the paper's longest
    assert {item.messages[0]["content"] for item in items} == {data.SYSTEM}
    assert all("max_new_tokens" not in item.meta for item in items)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_prompt_holds_context_and_question_once_in_the_benchmark_s_order(archive, name):
    [item, *_] = data.load_items(f"longbench:{name}")
    [message] = item.messages
    before, context, after = message["content"].partition(item.context)
    assert context
    assert before
    assert after.count(item.question) == ("{}" in LONGBENCH[name].after)
    prompt = data.build_prompt(item, TOKENIZER, 10_000)
    text = TOKENIZER.decode(prompt.ids)
    assert (text == message["content"]) == (name in PLAIN)
    question_ids, passage_ids = ([prompt.ids[p] for p in prompt.spans[span]] for span in ("question", "passage"))
    assert TOKENIZER.decode(question_ids).strip() == after.strip()
    assert TOKENIZER.decode(passage_ids).strip() == (before + context).strip()
    assert prompt.turns["user"] == 0


@pytest.mark.parametrize("limit", [250, 333, 1200])
@pytest.mark.parametrize("name", ["gov_report", "trec"])
def test_the_middle_of_a_long_context_goes(archive, name, limit):
    context = " ".join(f"word{i}" for i in range(3000))
    messages, spans = LONGBENCH[name].messages(context, "What is it?")
    item = data.Item("x", name, messages, "a", spans, context, "What is it?", form=name)
    prompt = data.build_prompt(item, TOKENIZER, limit)
    assert limit - 8 <= len(prompt.ids) <= limit
    form, text = LONGBENCH[name], TOKENIZER.decode(prompt.ids)
    assert form.before in text
    assert form.after.replace("{}", "What is it?") in text
    left = TOKENIZER.decode([prompt.ids[p] for p in prompt.spans["passage"]]).removeprefix(form.before)
    ids = TOKENIZER(context, add_special_tokens=False)["input_ids"]
    kept = len(ids) - data.tokens_cut(item, TOKENIZER, limit)
    halves = [TOKENIZER.decode(part) for part in (ids[: kept // 2], ids[-(kept // 2) :])]
    assert left.strip() == "".join(halves).strip()
    assert kept % 2 == 0
    assert data.tokens_cut(item, TOKENIZER, 10**6) == 0
