"""How pairs are given to a processor, which tokens they become, and what is refused."""

import composite
import naive
import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from reference import DoublePrecision
from tokenizers.processors import TemplateProcessing
from torch import Tensor, nn

from analysis_lib import AnalysisError, load_corpus, load_model, measure
from analysis_lib.capture.batching import batches
from analysis_lib.capture.inputs import Reading, Settings
from analysis_lib.corpora import Corpus
from analysis_lib.models import LoadedModel
from analysis_lib.models.calls import first_of_call

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message.role }}]"
    "{% for part in message.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endfor %}"
)


def picture() -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 50, 3), dtype=np.uint8))


def pairs(*texts: str):
    return load_corpus([{"image": picture(), "text": text} for text in texts])


def live(model_type: str = "llava", template: str | None = None) -> LoadedModel:
    model, processor = composite.build(model_type)
    if template:
        processor.chat_template = template
    return load_model(model, processor=processor)


def test_a_model_reads_texts_until_it_is_given_pairs():
    model = live()
    assert model.kind == "text"
    assert model.reading("text") is model
    of_pairs = model.reading("image+text")
    assert of_pairs.kind == "image+text"
    assert model.reading("image+text") is of_pairs
    assert [stack.name for stack in of_pairs.layout.stacks] == ["vision_tower", "language_model"]
    assert len(measure(model, ["One tree.", "an owl"], "anisotropy", progress=False)) == 1
    tables = measure(model, pairs("One tree.", "an owl"), "anisotropy", progress=False)
    assert tables.run["kind"] == "image+text"


def test_a_chat_template_is_rendered_as_transformers_documents_it():
    model = live(template=TEMPLATE).reading("image+text")
    assert model.processor.placeholder is None
    [batch] = batches(model, pairs("One tree").items, [0], Settings(), Reading())
    content = [{"type": "image", "image": picture()}, {"type": "text", "text": "One tree"}]
    documented = model.processor.processor.apply_chat_template(
        [{"role": "user", "content": content}],
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )
    for name, values in documented.items():
        assert torch.equal(batch.inputs[name], values)
    # The template has put the first token there; it is not doubled.
    assert batch.inputs["input_ids"][0, :2].tolist().count(model.tokenizer.bos_token_id) == 1


def test_a_folder_is_measured_like_the_model_it_was_saved_from(tmp_path):
    folder = composite.save(tmp_path / "model", "qwen2_vl")
    model, processor = composite.build("qwen2_vl")
    corpus = pairs("One tree.", "an owl")
    ours = measure(str(folder), corpus, "anisotropy,attention_entropy", progress=False)
    live = measure(
        model, corpus, "anisotropy,attention_entropy", processor=processor, progress=False
    )
    for name in ours:
        pd.testing.assert_frame_equal(ours[name], live[name], rtol=1e-5, atol=1e-5)
    alone = measure(str(folder), corpus, "anisotropy", progress=False)
    by_two = measure(str(folder), corpus, "anisotropy", workers=2, progress=False)
    assert by_two["anisotropy"].equals(alone["anisotropy"])


@pytest.mark.parametrize(
    ("text", "words"),
    [("a " * 2000, "shorten its text"), ("an <image> of an owl", "holds <image>, .* leave it out")],
)
def test_a_pair_that_cannot_be_read_is_one_line(text, words):
    with pytest.raises(AnalysisError, match=words) as raised:
        measure(live(), pairs(text), "anisotropy", long_texts="window", progress=False)
    assert "\n" not in str(raised.value)
    assert "LlavaModel" in str(raised.value)


@pytest.mark.parametrize(("model_type", "length"), [("clip", 16), ("llava", 30)])
def test_a_text_that_is_too_long_is_cut_as_the_tokenizer_cuts_it(model_type, length):
    model = live(model_type).reading("image+text")
    processor = model.processor.processor
    # A token before a text, and one behind it.
    tokenizer = model.tokenizer
    ends = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("<s>", "</s>")]
    framed = TemplateProcessing(single="<s> $A </s>", special_tokens=ends)
    tokenizer.backend_tokenizer.post_processor = framed
    tokenizer.model_max_length = length
    reading = Reading()
    items = pairs("an owl sees a tree, and waits", "owls").items
    batch, short = batches(model, items, [0, 0], Settings(), reading)
    text = model.processor.placeholder + items[0].text
    given = {"images": items[0].media[0].load(), "text": text, "return_tensors": "pt"}
    cut = processor(**given, truncation=True, max_length=length)
    assert {*cut} == {*batch.inputs} - {"use_cache"}
    for name, values in cut.items():
        assert torch.equal(batch.inputs[name], values.to(batch.inputs[name].dtype))
    assert batch.inputs["input_ids"].shape == (1, length)
    assert reading.cut == 1
    # Types are those of the whole text.
    type_names = [batch.type_names[index] for index in batch.tokens.types[0]]
    assert type_names.count("image") == (16 if model_type == "llava" else 0)
    assert type_names[-2:] == ["other", "sep"]
    assert short.inputs["input_ids"].shape[1] < length


def test_a_cut_is_noted():
    model = live()
    model.tokenizer.model_max_length = 30
    tables = measure(model, pairs("an owl sees a tree, and waits"), "anisotropy", progress=False)
    assert "longer than the 30 tokens" in " ".join(tables.run["notes"])
    model.tokenizer.model_max_length = 10
    with pytest.raises(AnalysisError, match="give a smaller image, or a model that reads more"):
        measure(model, pairs("an owl"), "anisotropy", progress=False)


def test_padding_that_siglip_reads_counts_as_keys_alone():
    model, processor = composite.build("siglip")
    model = naive.in_double(model)
    # As in the published tokenizers.
    processor.tokenizer.model_input_names = ["input_ids"]
    texts = ("One tree.", "an owl")
    metrics = "anisotropy,attention_entropy"
    tables = measure(model, pairs(*texts), metrics, processor=processor, progress=False)
    of_text = tables.layers["stack"] == "text_model"
    layers = [*tables.layers["layer"][of_text]]
    counted = sum(len(ids) for ids in processor.tokenizer([*texts])["input_ids"])
    hidden = tables["anisotropy"].query("space == 'hidden' and layer in @layers")
    assert len(hidden) == len(layers)
    assert (hidden["tokens"] == counted).all()
    positions = model.config.text_config.max_position_embeddings
    entropies = []
    for text in texts:
        ids = processor.tokenizer(
            text, padding="max_length", max_length=positions, return_tensors="pt"
        )
        own = len(processor.tokenizer(text)["input_ids"])
        with torch.no_grad(), DoublePrecision():
            output = model.text_model(**ids, output_attentions=True)
        weights = torch.cat(output.attentions)[:, :, :own]
        entropies.append(torch.special.entr(weights).sum(-1))
    wanted = torch.cat(entropies, -1).mean(-1).flatten().numpy()
    rows = tables["attention_entropy"].query("layer in @layers")
    assert rows["entropy_nats"].to_numpy() == pytest.approx(wanted, abs=1e-8)


def test_a_template_that_raises_is_one_line():
    template = TEMPLATE.replace("{{ bos_token }}", "{{ raise_exception('no system') }}")
    model = live(template=template)
    # A placeholder does not stand in for the documented template.
    with pytest.raises(AnalysisError, match="no system") as raised:
        measure(model, pairs("One tree"), "anisotropy", progress=False)
    assert "\n" not in str(raised.value)


# --- Several images with a text -------------------------------------------------------------------

# As in Qwen's own template.
AROUND = "<|vision_start|><|image_pad|><|vision_end|>"


def pictures() -> list[Image.Image]:
    draws = np.random.default_rng(1)
    return [Image.fromarray(draws.integers(0, 256, (40, 50, 3), dtype=np.uint8)) for _ in range(2)]


@pytest.mark.parametrize(
    ("model_type", "prompt"),
    [
        ("llava", "<image><image>a cat"),
        ("llava_next", "<image><image>a cat"),
        ("paligemma", "<image><image>a cat"),
        ("gemma3", None),
        ("idefics3", None),
        ("qwen2_vl", f"[user]{AROUND}{AROUND}a cat"),
    ],
)
def test_several_images_are_read_as_transformers_documents_it(model_type, prompt):
    """Images nested by text, and hidden states of ``output_hidden_states``."""
    model, processor = composite.build(model_type)
    model = naive.in_double(model)
    if model_type == "qwen2_vl":
        processor.chat_template = TEMPLATE.replace("<image>", AROUND).replace("{{ bos_token }}", "")
    loaded = load_model(model, processor=processor).reading("image+text")
    corpus = load_corpus([{"images": pictures(), "text": "a cat"}])
    tables = measure(loaded, corpus, "mean_vector,attention_by_token_type", progress=False)
    if prompt is None:
        prompt = loaded.processor.placeholder * 2 + "a cat"
    given = processor(images=[pictures()], text=[prompt], return_tensors="pt")
    for name, values in given.items():
        given[name] = values.double() if values.is_floating_point() else values
    with torch.no_grad(), DoublePrecision():
        output = model(**given, output_hidden_states=True)
    *_, stack = loaded.layout.stacks
    layers = [*tables.layers.loc[tables.layers["stack"] == stack.name, "layer"]]
    table = tables["mean_vector"].query("space == 'hidden'").set_index("layer")
    # The last entry may be behind the final norm.
    for layer, hidden in zip(layers[:-1], output.hidden_states[:-1], strict=True):
        expected = hidden[0].mean(0).norm().item()
        assert table.loc[layer, "norm_of_mean"] == pytest.approx(expected, rel=1e-9)
    by_type = tables["attention_by_token_type"].query("layer in @layers")
    assert "image" in {*by_type["key_type"]}


def test_each_of_several_images_has_tokens_of_its_own():
    model = live().reading("image+text")
    corpus = load_corpus([{"images": pictures(), "text": "a cat"}])
    [batch] = batches(model, corpus.items, [0], Settings(), Reading())
    names = [batch.type_names[index] for index in batch.tokens.types[0]]
    assert names.count("image") == 32
    assert names[1:33] == ["image"] * 32
    assert names[0] == "cls"
    assert {*names[33:]} == {"other"}
    assert batch.tokens.grid is None


@pytest.mark.parametrize("model_type", ["clip", "git", "blip-2"])
def test_several_images_that_a_model_does_not_read_are_one_line(model_type):
    corpus = load_corpus([{"images": pictures(), "text": "a cat"}])
    with pytest.raises(AnalysisError, match="cannot read several images with a text") as raised:
        measure(live(model_type), corpus, "anisotropy", progress=False)
    assert "\n" not in str(raised.value)
    assert "an image of 40 x 50 pixels and 1 more" in str(raised.value)


def test_what_a_model_does_not_read_is_one_line():
    model = live()
    image = Corpus("pictures", [pairs("x").items[0].media[0]], kind="image")
    with pytest.raises(AnalysisError, match="holds images: give texts"):
        measure(model, image, progress=False)
    sounds = load_corpus([{"audio": (np.zeros(1600, np.float32), 16000), "text": "x"}])
    with pytest.raises(AnalysisError, match="reads no audios with texts"):
        measure(model, sounds, progress=False)


# --- Where the tokens of an image lie -------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "rows", "columns"),
    [
        ("llava", 4, 4),
        ("paligemma", 4, 4),
        ("gemma3", 2, 2),
        ("qwen2_vl", 4, 2),
        ("qwen2_5_vl", 4, 2),
        ("qwen3_vl", 4, 2),
    ],
)
def test_the_tokens_of_an_image_follow_one_another_row_by_row(model_type, rows, columns):
    """Without attention in the tower, a change of some pixels changes the token of their cell."""
    model, processor = composite.build(model_type)
    model = load_model(model, processor=processor).reading("image+text")
    tower, language = model.stacks.items()
    with torch.no_grad():
        for block in tower[1]:
            attention = block.get_submodule(tower[0].attention.module)
            *_, last = (part for part in attention.modules() if isinstance(part, nn.Linear))
            last.weight.zero_()
            last.bias.zero_()
    height, width = 64, 32 if columns < rows else 64
    plain = np.zeros((height, width, 3), np.uint8)

    def of_image(pixels: np.ndarray) -> Tensor:
        """The first vectors of the tokens of an image."""
        pair = load_corpus([{"image": pixels, "text": "one"}])
        [batch] = batches(model, pair.items, [0], Settings(), Reading())
        read = []
        hook = language[1][0].register_forward_pre_hook(
            lambda _, args, kwargs: read.append(first_of_call(args, kwargs)), with_kwargs=True
        )
        with torch.no_grad():
            model.model(**batch.inputs)
        hook.remove()
        ids = torch.tensor(model.processor.medium_ids)
        return read[0][0][torch.isin(batch.inputs["input_ids"][0], ids)]

    before = of_image(plain)
    assert len(before) == rows * columns
    for row, column in ((0, 0), (0, columns - 1), (rows - 1, 0), (rows // 2, 0)):
        changed = plain.copy()
        top, left = height * row // rows, width * column // columns
        changed[top + 4 : top + height // rows - 4, left + 4 : left + width // columns - 4] = 255
        difference = (of_image(changed) - before).norm(dim=-1)
        assert difference.argmax() == row * columns + column
