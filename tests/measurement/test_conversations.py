"""Conversations and answers, from files to tables, against transformers' own chat templates."""

import json

import generated
import numpy as np
import pandas as pd
import pytest
import tokenizers
import torch
import transformers

from analysis_lib import (
    Corpus,
    generate,
    load_corpus,
    load_model,
    measure,
    merge_parts,
    similarity,
)
from analysis_lib.capture import Reading, Settings, batches, run
from analysis_lib.corpora import Answered, Conversation
from analysis_lib.corpora.token_types import ANSWER_TYPES, CONVERSATION_TYPES
from analysis_lib.errors import AnalysisError
from analysis_lib.measurement import save_answers
from analysis_lib.models.chat import answers, conversations

HEADED = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content | trim }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
# As SmolLM2 and Qwen do.
USUAL = (
    "{% if messages[0].role != 'system' %}<|start|>system\nYou help.<|end|>\n{% endif %}" + HEADED
)
# As Gemma does: the system message belongs to the first turn, and turns must alternate.
FOLDED = (
    "{% set first = '' %}"
    "{% if messages[0].role == 'system' %}{% set first = messages[0].content + '\n\n' %}"
    "{% set messages = messages[1:] %}{% endif %}"
    "{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate!') }}"
    "{% endif %}"
    "<|start|>{{ 'model' if m.role == 'assistant' else 'user' }}\n"
    "{{ first if loop.first else '' }}{{ m.content | trim }}<|end|>\n{% endfor %}"
)
# As Qwen3 does: only the last answer keeps its reasoning.
REASONING = (
    "{% for m in messages %}<|start|>{{ m.role }}\n"
    "{{ m.content if loop.last else m.content.split('</think>')[-1] }}<|end|>\n{% endfor %}"
)
# As models with tools do.
TOOLS = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<call>{{ call.function.name }}</call>{% endfor %}"
    "<|end|>\n{% endfor %}"
)
TEMPLATES = {"usual": USUAL, "folded": FOLDED, "reasoning": REASONING, "tools": TOOLS}


def message(role, content, **more):
    return {"role": role, "content": content, **more}


TALK = [
    message("system", "Be kind."),
    message("user", " user? "),
    message("assistant", "user?"),
    message("user", "Again, user"),
    message("assistant", "end"),
]
TALKS = [TALK, TALK[1:], TALK[1:3], [*TALK[1:4], message("assistant", "Ünïcode 🙂 and more")]]


def a_tokenizer(template=USUAL):
    """Every byte is a token, and so are the two marks of a template."""
    model = tokenizers.models.BPE(
        vocab={letter: n for n, letter in enumerate(sorted(bytes_to_letters()))}, merges=[]
    )
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<|start|>", eos_token="<|end|>", pad_token="<|end|>"
    )
    fast.chat_template = template
    fast.model_max_length = 512
    return fast


def bytes_to_letters():
    return tokenizers.pre_tokenizers.ByteLevel.alphabet()


def a_model():
    """A small Llama whose attention is far from even."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=258,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.6,
    )
    return transformers.LlamaModel(config).eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    home = tmp_path_factory.mktemp("talker")
    a_model().save_pretrained(home)
    a_tokenizer().save_pretrained(home)
    return home


@pytest.fixture(scope="module")
def talker(folder):
    return load_model(folder, dtype="float64")


@pytest.fixture
def plain(folder):
    """The same model as transformers loads it, whose norms and softmax are in float32 still."""
    return transformers.AutoModel.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager"
    )


def items(talks):
    return [Conversation.of(f"talk {number}", talk) for number, talk in enumerate(talks)]


def spelt(tokenizer, encoded, names):
    """The text of the tokens of each type."""
    texts = {}
    for kind in dict.fromkeys(encoded.types):
        ids = [
            i for i, of_token in zip(encoded.ids, encoded.types, strict=True) if of_token == kind
        ]
        texts[names[kind]] = tokenizer.decode(ids)
    return texts


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_tokens_are_those_of_transformers(name):
    tokenizer = a_tokenizer(TEMPLATES[name])
    for talk, read in zip(TALKS, conversations("it", tokenizer, items(TALKS)), strict=True):
        wanted = tokenizer.apply_chat_template(talk, tokenize=True)["input_ids"]
        assert [*read.ids] == wanted


@pytest.mark.parametrize("name", TEMPLATES)
def test_each_token_has_the_role_of_its_message(name):
    tokenizer = a_tokenizer(TEMPLATES[name])
    for talk, read in zip(TALKS, conversations("it", tokenizer, items(TALKS)), strict=True):
        texts = spelt(tokenizer, read, CONVERSATION_TYPES)
        for role in ("system", "user", "assistant"):
            of_role = [each["content"] for each in talk if each["role"] == role]
            if name in ("usual", "folded"):
                of_role = [text.strip() for text in of_role]
            assert texts.get(role, "") == "".join(of_role)
        assert texts["first"] == "<|start|>"
        assert texts["template"].count("<|end|>") >= len(talk) - 1


def test_a_system_message_of_the_template_is_the_template_s():
    tokenizer = a_tokenizer(USUAL)
    (read,) = conversations("it", tokenizer, items([TALK[1:3]]))
    assert "You help." in spelt(tokenizer, read, CONVERSATION_TYPES)["template"]


def test_reasoning_that_the_template_drops_is_no_token_of_an_answer():
    talk = [
        message("user", "1?"),
        message("assistant", "<think>one</think>1"),
        message("user", "2?"),
        message("assistant", "<think>two</think>2"),
    ]
    tokenizer = a_tokenizer(REASONING)
    (read,) = conversations("it", tokenizer, items([talk]))
    texts = spelt(tokenizer, read, CONVERSATION_TYPES)
    assert texts["assistant"] == "1<think>two</think>2"


def test_a_call_of_a_tool_is_the_assistant_s_and_its_result_the_tool_s():
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    talk = [
        message("user", "1+1?"),
        {"role": "assistant", "tool_calls": [call]},
        message("tool", "two", name="add"),
        message("developer", "be short"),
    ]
    tokenizer = a_tokenizer(TOOLS)
    (read,) = conversations("it", tokenizer, items([talk]))
    texts = spelt(tokenizer, read, CONVERSATION_TYPES)
    assert texts["assistant"] == "<call>add</call>"
    assert texts["tool"] == "two"
    assert texts["system"] == "be short"


def naive_masses(model, tokenizer, talks):
    """Mean attention to keys of each type, by layer and head: by transformers' eager attention."""
    masses = []
    for talk, read in zip(talks, conversations("it", tokenizer, items(talks)), strict=True):
        inputs = tokenizer.apply_chat_template(talk, return_tensors="pt", return_dict=True)
        with torch.no_grad():
            attentions = model(**inputs, output_attentions=True).attentions
        weights = torch.stack(attentions)[:, 0].numpy()
        types = np.array(read.types)
        masses.append([weights[..., types == kind].sum(-1) for kind in range(7)])
    return np.concatenate(masses, -1).mean(-1)


def test_attention_by_role_is_that_of_transformers(talker, plain):
    table = measure(talker, Corpus("talks", items(TALKS)), "attention_by_token_type")
    table = table["attention_by_token_type"]
    wanted = naive_masses(plain, a_tokenizer(), TALKS)
    for row in table.itertuples():
        kind = CONVERSATION_TYPES.index(row.key_type)
        assert row.mass == pytest.approx(wanted[kind, row.layer - 1, row.head - 1], abs=1e-6)
    present = {CONVERSATION_TYPES[kind] for kind in range(7) if wanted[kind].any()}
    assert {*table.key_type} == present == {"template", "first", "system", "user", "assistant"}


def test_means_by_role_are_those_of_transformers(talker, plain):
    tables = measure(talker, Corpus("talks", items(TALKS)), "dimension_means")
    table = tables["dimension_means"]
    vectors, types = [], []
    for talk, read in zip(TALKS, conversations("it", a_tokenizer(), items(TALKS)), strict=True):
        inputs = a_tokenizer().apply_chat_template(talk, return_tensors="pt", return_dict=True)
        with torch.no_grad():
            vectors.append(plain(**inputs, output_hidden_states=True).hidden_states[1][0])
        types += read.types
    vectors = torch.cat(vectors).numpy()
    for kind, rows in table[table.layer == 1].groupby("token_type", observed=True):
        chosen = [kind in ("all", CONVERSATION_TYPES[of_token]) for of_token in types]
        wanted = vectors[chosen].mean(0)
        assert rows["mean"].to_numpy() == pytest.approx(wanted, abs=2e-5)


@pytest.mark.parametrize("metric", ["largest_logits", "attention_received", "token_norms"])
def test_every_table_of_types_knows_the_roles(talker, metric):
    table = measure(talker, Corpus("talks", items(TALKS)), metric)[metric]
    column = next(name for name in ("key_type", "token_type") if name in table)
    assert {"first", "template", "user", "assistant"} <= {*table[column]}


def test_the_template_does_not_count_without_special_tokens(talker):
    corpus = Corpus("talks", items(TALKS))
    every = measure(talker, corpus, "anisotropy")["anisotropy"].tokens.max()
    without = measure(talker, corpus, "anisotropy", special_tokens=False)["anisotropy"]
    reads = conversations("it", a_tokenizer(), items(TALKS))
    of_template = sum(read.types.count(CONVERSATION_TYPES.index("template")) for read in reads)
    assert without.tokens.max() == every - of_template


def test_an_intervention_names_a_role(talker):
    from analysis_lib import Replace

    corpus = Corpus("talks", items(TALKS))
    change = Replace("weights", layers=[2], tokens=["system"], by="zero")
    table = measure(talker, corpus, "attention_by_token_type", intervention=change)
    table = table["attention_by_token_type"]
    mass = table[table.key_type == "system"].groupby("layer")["mass"].sum()
    # No query sees such a key there.
    assert [*mass.index] == [1]


def test_parts_of_conversations_merge_to_the_same_bytes(talker, tmp_path, monkeypatch):
    from analysis_lib.measurement import shards

    monkeypatch.setattr(shards, "UTTERANCES_PER_SHARD", 4)
    corpus = Corpus("talks", items(TALKS * 3))
    names = "attention_by_token_type,dimension_means"
    for number in (1, 2):
        measure(talker, corpus, names, part=(number, 2), checkpoints=tmp_path)
    merged = merge_parts(tmp_path)
    whole = measure(talker, corpus, names)
    for name in whole:
        pd.testing.assert_frame_equal(merged[name], whole[name], check_exact=True)


# --- Files and objects ----------------------------------------------------------------------------


@pytest.fixture
def stored(tmp_path):
    path = tmp_path / "talks.jsonl"
    path.write_text("".join(json.dumps({"id": 1, "messages": talk}) + "\n" for talk in TALKS))
    return path


def test_conversations_come_from_files_and_objects(stored, tmp_path):
    wanted = items(TALKS)
    frame = pd.DataFrame({"messages": TALKS, "n": range(4)})
    frame.to_parquet(tmp_path / "talks.parquet")
    given = [
        load_corpus(stored),
        load_corpus(f"{stored}:messages"),
        load_corpus(tmp_path / "talks.parquet"),
        load_corpus(TALKS),
        load_corpus(frame, column="messages"),
        load_corpus([{"messages": talk} for talk in TALKS], column="messages"),
    ]
    for corpus in given:
        assert [item.messages for item in corpus.items] == [item.messages for item in wanted]
        assert corpus.sha256 == given[0].sha256
        assert corpus.token_types == CONVERSATION_TYPES


def test_a_message_in_parts_is_one_text():
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    assert Conversation.of("it", [message("user", parts)]).texts == ("a b",)


BAD = {
    "no content: the conversation ends there": [{"role": "assistant"}],
    "the role 'human': give one of system, user": [message("human", "hi")],
    "message 1 is 'hi': give its role and content": ["hi", message("user", "hi")],
    "give texts alone": [message("user", [{"type": "image"}])],
}


@pytest.mark.parametrize("fault", BAD)
def test_a_bad_conversation_is_one_line(fault, tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps({"messages": TALK}) + "\n" + json.dumps({"messages": BAD[fault]}))
    with pytest.raises(AnalysisError, match=fault) as raised:
        load_corpus(path)
    assert "row 2: message" in str(raised.value)


def test_a_template_that_raises_is_one_line(talker):
    corpus = Corpus("talks", items([TALK[1:3], [message("assistant", "I begin.")]]))
    with pytest.raises(AnalysisError, match=r"refuses a conversation of assistant \(alternate!\)"):
        measure(talker, corpus, "anisotropy", chat_template=FOLDED)


def test_a_tokenizer_without_a_template_names_the_remedy(folder, tmp_path):
    model = transformers.AutoModel.from_pretrained(folder)
    tokenizer = a_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(AnalysisError, match="--chat-template FILE"):
        measure(model, TALKS, "anisotropy", tokenizer=tokenizer)
    given = measure(model, TALKS, "anisotropy", tokenizer=tokenizer, chat_template=USUAL)
    known = measure(load_model(folder), TALKS, "anisotropy")
    pd.testing.assert_frame_equal(given["anisotropy"], known["anisotropy"])
    assert given.run["settings"]["chat_template"] == USUAL
    assert "chat_template" not in known.run["settings"]


def test_a_conversation_without_an_answer_is_noted(talker):
    notes = measure(talker, [TALK, TALK[:2]], "anisotropy").run["notes"]
    assert "1 conversations end without an answer of the assistant" in notes


# --- Answers --------------------------------------------------------------------------------------


def written(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_tokens_of_an_answer_are_read_as_they_were_written(talker, tmp_path):
    # The model wrote "ab" as it would not be read again: with a token of padding between.
    row = {"prompt": "Hi", "answer": "ab", "prompt_ids": [256, 41], "answer_ids": [64, 257, 65]}
    corpus = load_corpus(written(tmp_path / "answers.jsonl", row))
    assert corpus.items == [Answered("Hi", "ab", (256, 41), (64, 257, 65))]
    (read,) = answers("it", a_tokenizer(), corpus.items)
    assert read.ids == [256, 41, 64, 257, 65]
    assert [ANSWER_TYPES[kind] for kind in read.types] == [
        *("first", "prompt", "answer", "answer", "answer")
    ]


def test_vectors_of_answers_are_those_of_the_given_tokens(talker, plain, tmp_path):
    row = {"prompt": "Hi", "answer": "ab", "prompt_ids": [256, 41], "answer_ids": [64, 257, 65]}
    corpus = load_corpus(written(tmp_path / "answers.jsonl", row))
    table = measure(talker, corpus, "dimension_means")["dimension_means"]
    with torch.no_grad():
        ids = torch.tensor([[256, 41, 64, 257, 65]])
        states = plain(ids, output_hidden_states=True).hidden_states
    for kind, part in {"first": slice(0, 1), "prompt": slice(1, 2), "answer": slice(2, 5)}.items():
        rows = table[(table.layer == 1) & (table.token_type == kind)]
        wanted = states[1][0, part].mean(0).numpy()
        assert rows["mean"].to_numpy() == pytest.approx(wanted, abs=2e-5)


def test_answers_without_tokens_follow_their_prompts(tmp_path):
    path = written(tmp_path / "answers.jsonl", {"prompt": "Hi ", "answer": "you"})
    corpus = load_corpus(path)
    tokenizer = a_tokenizer()
    (read,) = answers("it", tokenizer, corpus.items)
    assert [*read.ids] == tokenizer("Hi you")["input_ids"]
    assert read.types.count(ANSWER_TYPES.index("answer")) == 3


@pytest.fixture(scope="module")
def answering(tmp_path_factory):
    """The folder of a small Llama with its head."""
    home = tmp_path_factory.mktemp("answering")
    torch.manual_seed(1)
    config = a_model().config
    transformers.LlamaForCausalLM(config).save_pretrained(home)
    a_tokenizer().save_pretrained(home)
    return home


def test_the_answer_to_a_conversation_is_that_of_transformers(answering, tmp_path):
    talks = [TALK[:4], TALK[:2]]
    corpus = Corpus("talks", items(talks))
    given = generate(load_model(answering), corpus, max_new_tokens=6, progress=False)
    model = transformers.AutoModelForCausalLM.from_pretrained(answering)
    tokenizer = a_tokenizer()
    for talk, answer in zip(talks, given, strict=True):
        inputs = tokenizer.apply_chat_template(
            talk, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        ids = model.generate(**inputs, max_new_tokens=6, do_sample=False, pad_token_id=257)[0]
        prompt = inputs["input_ids"].shape[1]
        assert answer.prompt_ids == ids[:prompt].tolist()
        assert answer.answer_ids == ids[prompt:].tolist()
    save_answers(given, tmp_path / "answers.jsonl")
    corpus = load_corpus(tmp_path / "answers.jsonl")
    assert [len(item.answer_ids) for item in corpus.items] == [len(a.answer_ids) for a in given]
    table = measure(load_model(answering), corpus, "dimension_means")["dimension_means"]
    assert {*table.token_type} == {"all", "first", "prompt", "answer"}


def test_the_clean_pass_has_the_vectors_of_the_generation(answering):
    """With its cache, a model has the same vectors while it answers as our pass over all tokens."""
    model = transformers.AutoModelForCausalLM.from_pretrained(answering, dtype=torch.float64)
    prompt_ids = [256, 41, 75, 2]
    ids, states = generated.as_generated(model, prompt_ids, 5)
    item = Answered("", a_tokenizer().decode(ids), tuple(prompt_ids), tuple(ids))
    loaded = load_model(answering, dtype="float64")
    (batch,) = batches(loaded, [item], [0], Settings(), Reading())
    layers = []
    run(loaded, batch, frozenset({"hidden"}), layers.append)
    for activations in layers:
        # The last one of transformers has passed the norm.
        if activations.layer < 2 and "hidden" in activations.spaces:
            read = activations.spaces["hidden"].values[0, 0, :-1]
            torch.testing.assert_close(read, states[activations.layer], rtol=1e-5, atol=1e-5)
    assert len(layers) > 2


def test_tokens_of_another_model_are_refused(tmp_path):
    row = {"prompt": "Hi", "answer": "ab", "prompt_ids": [1], "answer_ids": [2, 3]}
    corpus = load_corpus(written(tmp_path / "answers.jsonl", row))
    with pytest.raises(AnalysisError, match="give the model that wrote it"):
        [*answers("it", a_tokenizer(), corpus.items)]
    with pytest.raises(AnalysisError, match=r"has 3 tokens, .* comes with token 3: give the model"):
        [*answers("it", a_tokenizer(), corpus.items, words=3)]


def test_every_answer_is_checked(tmp_path):
    tokenizer = a_tokenizer()
    ids = tokenizer("Hi", add_special_tokens=False)["input_ids"]
    right = {"prompt": "Hi", "answer": "Hi", "prompt_ids": ids, "answer_ids": ids}
    corpus = load_corpus(written(tmp_path / "answers.jsonl", right, right | {"answer": "Ho"}))
    with pytest.raises(AnalysisError, match=r"tokens of an answer spell 'Hi' here, .* 'Ho'"):
        [*answers("it", tokenizer, corpus.items)]


def test_a_template_for_what_are_no_conversations_is_refused(talker):
    for data in (["a text"], Corpus("a", [Answered("a", "b")])):
        with pytest.raises(AnalysisError, match="no conversations: leave the chat template out"):
            measure(talker, data, "anisotropy", chat_template="{{ x }}", progress=False)
    with pytest.raises(AnalysisError, match="no conversations: leave the chat template out"):
        generate(talker, ["a text"], chat_template="{{ x }}", progress=False)


def test_a_template_that_is_no_jinja_is_named_with_its_line(talker):
    with pytest.raises(AnalysisError, match=r"that was given is no Jinja \(.* line 2\): mend it"):
        measure(
            talker,
            Corpus("talks", items(TALKS)),
            "anisotropy",
            chat_template="\n{{ }",
            progress=False,
        )


def test_lists_of_other_things_are_neither_messages_nor_pictures(tmp_path):
    path = written(tmp_path / "lists.jsonl", {"messages": []}, {"messages": ["hello"]})
    with pytest.raises(AnalysisError, match="holds a list: give texts; in a list, messages"):
        load_corpus(f"{path}:messages")


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ({"prompt": "Hi", "answer": ""}, "an answer without a token: leave it out"),
        ({"prompt": "Hi", "answer": None}, "its answer is None: give a text"),
        ({"prompt": "Hi", "answer": "a", "answer_ids": [1]}, "give both, or neither"),
        (
            {"prompt": "Hi", "answer": "a", "answer_ids": ["a"], "prompt_ids": [1]},
            "one of its tokens is 'a': give a whole number",
        ),
        (
            {"prompt": "Hi", "answer": "a", "answer_ids": [True], "prompt_ids": [1]},
            "one of its tokens is True: give a whole number",
        ),
        (
            {"prompt": "Hi", "answer": "a", "answer_ids": [1.5], "prompt_ids": [1]},
            "one of its tokens is 1.5: give a whole number",
        ),
        (
            {"prompt": "Hi", "answer": "a", "answer_ids": [10**30], "prompt_ids": [1]},
            "one of its tokens is 10+: give a whole number, 9",
        ),
        (
            {"prompt": "Hi", "answer": "a", "answer_ids": 7, "prompt_ids": [1]},
            "its tokens are 7: give a list of whole numbers",
        ),
    ],
)
def test_a_bad_answer_is_one_line(row, fault, tmp_path):
    with pytest.raises(AnalysisError, match=fault):
        load_corpus(written(tmp_path / "answers.jsonl", row))


def test_the_cone_of_a_role_is_that_of_its_tokens_alone(talker, plain):
    corpus = Corpus("talks", items(TALKS))
    table = measure(talker, corpus, "anisotropy", bins="type")["anisotropy"]
    table = table[(table.space == "hidden") & (table.layer == 1)]
    vectors, types = [], []
    for talk, read in zip(TALKS, conversations("it", a_tokenizer(), items(TALKS)), strict=True):
        inputs = a_tokenizer().apply_chat_template(talk, return_tensors="pt", return_dict=True)
        with torch.no_grad():
            vectors.append(plain(**inputs, output_hidden_states=True).hidden_states[1][0])
        types += read.types
    units = torch.nn.functional.normalize(torch.cat(vectors), dim=-1).numpy()
    for row in table.itertuples():
        chosen = units[np.array(types) == CONVERSATION_TYPES.index(row.type)]
        cosines = chosen @ chosen.T
        pairs = cosines[~np.eye(len(chosen), dtype=bool)]
        assert row.tokens == len(chosen)
        assert row.cosine == pytest.approx(pairs.mean(), abs=1e-6)
    assert [*table.type.cat.categories] == ["template", "first", "system", "user", "assistant"]


def test_two_models_are_compared_on_conversations(talker, folder):
    again = load_model(folder, dtype="float64")
    tables = similarity(talker, again, Corpus("talks", items(TALKS * 8)), progress=False)
    assert tables.run["compared_by"] == "token"
    table = tables["representation_similarity"]
    same = table[(table["layer"] == table["other_layer"]) & (table["measure"] == "cka")]
    assert same["value"].to_list() == pytest.approx([1] * 3)
