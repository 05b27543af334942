"""Answers of a model to prompts: those of transformers' ``generate``, one prompt at a time."""

import json

import generated
import pandas as pd
import pytest
import tiny
import torch
import transformers
from reference import DoublePrecision
from tokenizers import processors

from analysis_lib import AnalysisError, generate, load_corpus, load_model
from analysis_lib.capture import run
from analysis_lib.capture.batching import make_batches
from analysis_lib.cli import main
from analysis_lib.measurement import save_answers
from analysis_lib.models.tokenization import Encoded

PROMPTS = [*tiny.TEXTS[:6], "Hi there"]
NEW = 12
NAMES = ("llama", "gpt2", "bloom")
HEADS = {
    "llama": transformers.LlamaForCausalLM,
    "gpt2": transformers.GPT2LMHeadModel,
    "bloom": transformers.BloomForCausalLM,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of a random language model, whose answer to the first prompt ends early."""
    made = {}

    def folder(name: str):
        if name not in made:
            made[name] = tmp_path_factory.mktemp("generation") / name
            save(made[name], name)
        return made[name]

    return folder


def save(path, name: str) -> None:
    base, tokenizer = tiny.build(name)
    torch.manual_seed(0)
    model = HEADS[name](base.config)
    tiny.randomise(model)
    model.generation_config.update(eos_token_id=[], bos_token_id=None, pad_token_id=0)
    ids = tokenizer(PROMPTS[0], return_tensors="pt")["input_ids"]
    answer = model.generate(input_ids=ids, do_sample=False, max_new_tokens=NEW)
    model.generation_config.eos_token_id = [answer[0, len(ids[0]) + 2].item()]
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def one_by_one(folder, **settings) -> tuple[list[list[int]], transformers.GenerationConfig]:
    """The answers as transformers documents them, without a batch."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    answers = []
    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt")
        given = model.generate(**inputs, do_sample=False, max_new_tokens=NEW, **settings)
        answers.append(given[0, inputs["input_ids"].shape[1] :].tolist())
    return answers, model.generation_config


@pytest.mark.parametrize("name", NAMES)
def test_greedy_answers_are_those_of_each_prompt_alone(name, folder):
    expected, settings = one_by_one(folder(name))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder(name))
    model = load_model(str(folder(name)), dtype="float64")
    for batch_size in (1, 3, 16):
        answers = generate(
            model, PROMPTS, max_new_tokens=NEW, batch_size=batch_size, progress=False
        )
        assert [answer.prompt for answer in answers] == PROMPTS
        assert [answer.answer_ids for answer in answers] == expected
        for answer in answers:
            assert answer.prompt_ids == tokenizer(answer.prompt)["input_ids"]
            assert answer.ended == (answer.answer_ids[-1] in settings.eos_token_id)
            assert answer.answer == tokenizer.decode(answer.answer_ids, skip_special_tokens=True)
    assert answers[0].ended
    assert len(answers[0].answer_ids) <= 3
    assert any(len(answer.answer_ids) == NEW for answer in answers)


def test_the_model_keeps_its_own_settings_but_for_beams(folder, tmp_path):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder("llama"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder("llama"))
    model.generation_config.update(repetition_penalty=5.0, do_sample=True, temperature=0.1, top_k=3)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    penalised, _ = one_by_one(tmp_path, temperature=None, top_k=None)
    plain, _ = one_by_one(folder("llama"))
    assert penalised != plain
    loaded = load_model(str(tmp_path), dtype="float64")
    answers = generate(loaded, PROMPTS, max_new_tokens=NEW, progress=False)
    assert [answer.answer_ids for answer in answers] == penalised


def test_a_temperature_draws_tokens_with_the_seed(folder):
    model = load_model(str(folder("gpt2")))
    before = torch.random.get_rng_state()
    drawn = {}
    for seed in (0, 0, 1):
        given = {"max_new_tokens": NEW, "temperature": 2.0, "seed": seed, "progress": False}
        answers = generate(model, PROMPTS, **given)
        assert drawn.setdefault(seed, answers) == answers
    assert drawn[0] != drawn[1]
    assert torch.equal(torch.random.get_rng_state(), before)
    # So low a temperature leaves the likeliest token alone.
    cold = generate(model, PROMPTS, max_new_tokens=NEW, temperature=1e-4, progress=False)
    assert cold == generate(model, PROMPTS, max_new_tokens=NEW, progress=False)
    with pytest.raises(AnalysisError, match="temperature is 1e-39: give 0 for the likeliest token"):
        generate(model, PROMPTS, temperature=1e-39, progress=False)


def test_a_model_object_answers_and_is_as_it_was(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder("llama")).train()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder("llama"))
    settings = model.generation_config.to_dict()
    answers = generate(model, PROMPTS, tokenizer=tokenizer, max_new_tokens=NEW, progress=False)
    read = generate(str(folder("llama")), PROMPTS, max_new_tokens=NEW, progress=False)
    assert answers == read
    assert model.training
    assert model.generation_config.to_dict() == settings


def test_a_token_that_ends_a_text_is_not_put_behind_a_prompt(folder):
    plain = generate(str(folder("gpt2")), PROMPTS[:2], max_new_tokens=4, progress=False)
    framing = transformers.AutoTokenizer.from_pretrained(folder("gpt2"))
    end = framing.eos_token
    framing._tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {end}", special_tokens=[(end, framing.eos_token_id)]
    )
    assert framing(PROMPTS[0])["input_ids"] == [*plain[0].prompt_ids, framing.eos_token_id]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder("gpt2"))
    again = generate(model, PROMPTS[:2], tokenizer=framing, max_new_tokens=4, progress=False)
    assert again == plain


def test_an_answer_that_ends_at_once_is_kept_and_said(folder, caplog):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder("llama"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder("llama"))
    first = generate(model, PROMPTS, tokenizer=tokenizer, max_new_tokens=1, progress=False)
    ends = first[3].answer_ids
    model.generation_config.eos_token_id = ends
    answers = generate(model, PROMPTS, tokenizer=tokenizer, max_new_tokens=NEW, progress=False)
    assert answers[3].answer_ids == ends
    assert answers[3].ended
    empty = sum(answer.answer_ids == ends for answer in first)
    assert f"{empty} of {len(PROMPTS)} answers are empty" in caplog.text


REFUSED = [
    ("bert", {}, "cannot answer: it is no causal language model .*, so that it predicts no next"),
    ("t5", {}, r"cannot answer: it is no causal language model \(T5Model\).*give a causal"),
    ("llama", {"max_new_tokens": 160}, "reads 160 tokens, and an answer of 160 leaves none"),
    ("llama", {"max_new_tokens": 150}, r"prompt 1 has 2\d tokens, .* room for 10 .*more are too"),
    ("llama", {"max_new_tokens": 0}, "max_new_tokens is 0: give a whole number, 1 or more"),
    ("llama", {"temperature": -1}, "temperature is -1: give a number, 0 or more"),
    ("llama", {"batch_size": 0}, "batch_size is 0"),
    ("llama", {"data": []}, "holds no utterance"),
    ("llama", {"data": [("one", "two")]}, "holds pairs of texts where single texts are wanted"),
]


@pytest.mark.parametrize(("name", "given", "words"), REFUSED)
def test_what_cannot_be_answered_is_one_line(name, given, words, folder, tiny_folder):
    path = folder(name) if name in HEADS else tiny_folder(name)
    with pytest.raises(AnalysisError, match=words) as caught:
        generate(str(path), **{"data": PROMPTS, "progress": False, **given})
    assert "\n" not in str(caught.value)


def test_a_body_without_its_head_cannot_answer(tiny_folder):
    with pytest.raises(AnalysisError, match=r"no causal language model \(LlamaModel\)"):
        generate(str(tiny_folder("llama")), PROMPTS, progress=False)


def test_from_the_command_line(folder, tmp_path, capsys):
    prompts, out = tmp_path / "prompts.csv", tmp_path / "new" / "answers.jsonl"
    pd.DataFrame({"text": PROMPTS}).to_csv(prompts, index=False)
    given = ["generate", str(folder("llama")), "--data", f"{prompts}:text", "--tokens", str(NEW)]
    assert main([*given, "--out", str(out), "--batch", "2"]) == 0
    expected = generate(str(folder("llama")), PROMPTS, max_new_tokens=NEW, progress=False)
    ended = sum(answer.ended for answer in expected)
    assert f"wrote 7 answers of {folder('llama')} to {out}; it ended {ended} of them" in (
        capsys.readouterr().out
    )
    lines = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert lines == [vars(answer) for answer in expected]
    # What is there is not overwritten, and what is refused leaves nothing.
    assert main([*given, "--out", str(out)]) == 1
    assert "is there already: move it" in capsys.readouterr().err
    other = tmp_path / "other" / "answers.jsonl"
    assert main([*given, "--out", str(other), "--seed", "1"]) == 1
    assert "--seed says which items --limit keeps" in capsys.readouterr().err
    assert not other.parent.exists()
    assert main([*given, "--out", str(other), "--seed", "1", "--temperature", "2"]) == 0
    drawn = generate(
        str(folder("llama")), PROMPTS, max_new_tokens=NEW, temperature=2, seed=1, progress=False
    )
    lines = [json.loads(line) for line in other.read_text(encoding="utf-8").splitlines()]
    assert lines == [vars(answer) for answer in drawn]
    few = tmp_path / "few.jsonl"
    assert main([*given, "--out", str(few), "--limit", "2", "--first"]) == 0
    assert len(few.read_text(encoding="utf-8").splitlines()) == 2


def test_an_answer_with_separators_of_lines_is_one_line(folder, tmp_path):
    path = tmp_path / "answers.jsonl"
    [answer] = generate(str(folder("llama")), PROMPTS[:1], max_new_tokens=2, progress=False)
    odd = "one\u2028two\nthree\x85four"
    save_answers([type(answer)(**{**vars(answer), "answer": odd})] * 2, path)
    assert load_corpus(f"{path}:answer").texts == [odd] * 2


@pytest.mark.parametrize("name", NAMES)
def test_a_pass_over_prompt_and_answer_repeats_what_generation_computed(name, folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder(name), dtype=torch.float64)
    loaded = load_model(str(folder(name)), dtype="float64")
    [answer] = generate(loaded, PROMPTS[-1:], max_new_tokens=NEW, progress=False)
    every = [*answer.prompt_ids, *answer.answer_ids]
    # Some norms, rotations and softmaxes are in single precision otherwise, whatever the model.
    with DoublePrecision():
        ids, states = generated.as_generated(model, answer.prompt_ids, len(answer.answer_ids))
        whole = generated.at_once(model, every)
        turned = generated.at_once(model, every[::-1])
        captured = hidden_of_captured_pass(loaded, every)
    assert ids == answer.answer_ids
    assert len(states) == model.config.num_hidden_layers + 1
    assert states.shape[1] == len(every) - 1
    torch.testing.assert_close(whole[:, :-1], states, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(captured[:, :-1], states, rtol=1e-9, atol=1e-11)
    # Another order of the same tokens gives other states.
    assert not torch.allclose(turned[1:, :-1], states[1:], rtol=1e-3)


def hidden_of_captured_pass(loaded, ids: list[int]) -> torch.Tensor:
    """What the library captures, as ``generated.at_once`` gives it."""
    text = Encoded({"input_ids": ids}, [False] * len(ids))
    [batch] = make_batches(loaded, [text], [0], True, 10**6)
    layers = []
    run(loaded, batch, frozenset({"hidden", "final"}), layers.append)
    # Behind its last block, transformers gives what the norm makes of it.
    *hidden, _, final = layers
    vectors = [activations.spaces["hidden"] for activations in hidden] + [final.spaces["final"]]
    return torch.stack([part.values[0, 0] for part in vectors])
