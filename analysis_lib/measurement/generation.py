"""Answers of a causal language model to prompts, by transformers' own ``generate``."""

import copy
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers
from torch import nn

from analysis_lib import files
from analysis_lib.capture.memory import is_out_of_memory
from analysis_lib.corpora import Conversation, Corpus, load_corpus
from analysis_lib.corpora.corpus import item_kind
from analysis_lib.errors import (
    AnalysisError,
    require_flag,
    require_number,
    require_seed,
    require_whole,
)
from analysis_lib.measurement.description import say
from analysis_lib.measurement.measuring import refuse_kind, refuse_template
from analysis_lib.models import LoadedModel, load_model
from analysis_lib.models.chat import conversations
from analysis_lib.models.devices import without_gradients
from analysis_lib.models.loading import lacks_head, with_head
from analysis_lib.models.outer import parameters_of, without_adapters
from analysis_lib.models.probe import evaluated
from analysis_lib.models.tokenization import Encoded, encoded
from analysis_lib.progress import bar

# Below it, logits divided by it may be infinite.
LEAST_TEMPERATURE = 1e-6
# Settings of transformers that choose among the likeliest tokens.
OF_SAMPLING = (
    *("temperature", "top_k", "top_p", "min_p", "top_h"),
    *("typical_p", "epsilon_cutoff", "eta_cutoff"),
)


@dataclass(frozen=True)
class Generated:
    """The answer of a model to a prompt.

    Attributes:
        prompt: the text of the prompt.
        answer: the text of the answer, without special tokens.
        prompt_ids: the tokens that the model read.
        answer_ids: the tokens that the model gave, with the one that ends the answer. Tokens of
            the text ``answer`` may be others: read these ids to see what the model saw.
        ended: whether the model ended the answer by itself, before ``max_new_tokens``.
    """

    prompt: str
    answer: str
    prompt_ids: list[int]
    answer_ids: list[int]
    ended: bool


def generate(
    model: LoadedModel | str | Path | nn.Module,
    data: Corpus | str | Path | Iterable,
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    seed: int = 0,
    batch_size: int = 16,
    tokenizer: object = None,
    column: str | None = None,
    chat_template: str | None = None,
    progress: bool = True,
) -> list[Generated]:
    """The answers of a causal language model to prompts.

    Each prompt is read as the tokenizer gives it, without the special tokens that it puts behind a
    text, which would end it. Answers are those of transformers' ``generate`` with the model's own
    ``generation_config``, such as its end tokens and penalties, but for the arguments below and
    beams, of which there is one. Greedy answers do not depend on the size of a batch, up to
    rounding: where two tokens are equally likely, the lowest digits decide. Prompts of one batch
    are padded on the left, or are of one length if the model cannot mask padding.

    Args:
        model: from ``load_model``, or one of its arguments.
        data: the prompts: from ``load_corpus``, or one of its arguments, such as
            ``prompts.csv:text`` or a list. Of conversations, the answer is the assistant's next
            message: the prompt is the text that the chat template makes, up to where that begins.
        max_new_tokens: the length at which an answer is cut, in tokens.
        temperature: 0 takes the likeliest token. Above, tokens are drawn, from the 50 likeliest
            ones unless the ``generation_config`` says otherwise, as in transformers.
        seed: with which tokens are drawn: the same answers for the same prompts, batches and
            machine.
        batch_size: the number of prompts that are answered at once.
        tokenizer: for a model object, its tokenizer.
        chat_template: the template of conversations, in Jinja, in place of the tokenizer's.
        column: the column of prompts, if ``data`` is a DataFrame or the like.
        progress: whether to show a bar.

    Returns:
        The answers, in the order of the prompts. A note gives the number of empty ones.

    Raises:
        AnalysisError: a model that is no causal language model, or whose head is not at hand;
            prompts that are no texts, or so long that the model has no room for an answer.

    >>> [answer] = generate("smollm2-135m", ["The capital of France is"], max_new_tokens=3)
    >>> answer.answer
    ' Paris.\\n'
    """
    max_new_tokens = require_whole("max_new_tokens", max_new_tokens, 1)
    temperature = require_number("the temperature", temperature, least=0)
    if 0 < temperature < LEAST_TEMPERATURE:
        raise AnalysisError(
            f"the temperature is {temperature:g}: give 0 for the likeliest token, or "
            f"{LEAST_TEMPERATURE:g} and more"
        )
    seed = require_seed("seed", seed)
    batch_size = require_whole("batch_size", batch_size, 1)
    require_flag("progress", progress)
    corpus = load_corpus(data, column=column)
    loaded = model if isinstance(model, LoadedModel) else load_model(model, processor=tokenizer)
    refuse_kind(loaded.name, loaded.layout, corpus)
    refuse_template(corpus, chat_template)
    headed = _language_model(loaded)
    prompts = _prompts(loaded, corpus, max_new_tokens, chat_template)
    settings = _settings(headed, temperature)
    settings.update(max_new_tokens=max_new_tokens, pad_token_id=loaded.pad_id)
    answers: list[Generated | None] = [None] * len(corpus)
    shown_as = {"unit": "prompt", "description": f"{loaded.name} answers {corpus.name}"}
    with (
        bar(total=len(corpus), show=progress, **shown_as) as shown,
        evaluated(headed),
        without_gradients(headed),
        torch.random.fork_rng(),
    ):
        torch.manual_seed(seed)
        for batch in _batches(prompts, batch_size, _masks_padding(loaded, headed)):
            ids = _answer_ids(loaded, headed, [prompts[index] for index in batch], settings)
            for index, answer_ids in zip(batch, ids, strict=True):
                prompt = corpus.items[index]
                if not isinstance(prompt, str):
                    prompt = loaded.tokenizer.decode(prompts[index])
                answers[index] = _generated(loaded, prompt, prompts[index], answer_ids, settings)
            shown.update(len(batch))
    empty = sum(answer.ended and len(answer.answer_ids) == 1 for answer in answers)
    if empty:
        say(loaded.name, [f"{empty} of {len(answers)} answers are empty: it ended them at once"])
    return answers


def save_answers(answers: Iterable[Generated], path: Path) -> None:
    """Write answers as JSON lines, one object per prompt, or leave the file as it was."""
    lines = [json.dumps(asdict(answer), ensure_ascii=False) for answer in answers]
    files.write(path, "\n".join(lines) + "\n")


def _language_model(loaded: LoadedModel) -> nn.Module:
    """The language model around a loaded model.

    Raises:
        AnalysisError: there is none.
    """
    wanted = "give a causal language model with its head, such as smollm2-135m"
    if loaded.headed is None:
        if reason := lacks_head(loaded, "next"):
            raise AnalysisError(f"{loaded.name} cannot answer: {reason}; {wanted}")
        return with_head(loaded, "next")
    base = without_adapters(loaded.headed)
    if not base.can_generate():
        reason = f"a {type(base).__name__} predicts no next token"
        raise AnalysisError(f"{loaded.name} cannot answer: {reason}; {wanted}")
    return loaded.headed


def _prompts(
    loaded: LoadedModel, corpus: Corpus, max_new_tokens: int, chat_template: str | None
) -> list[list[int]]:
    """The tokens of each prompt.

    Raises:
        AnalysisError: the chat template refuses a conversation; or a prompt has no token, or
            leaves no room for an answer.
    """
    limit = loaded.max_length
    room = limit - max_new_tokens
    if room < 1:
        raise AnalysisError(
            f"{loaded.name} reads {limit} tokens, and an answer of {max_new_tokens} leaves none to "
            f"a prompt: give fewer new tokens, {limit - 1} at most"
        )
    prompts = []
    for text in _read(loaded, corpus, chat_template):
        prompts.append([*text.ids[: text.body.stop]])
    lengths = [len(ids) for ids in prompts]
    if not min(lengths):
        number = lengths.index(0) + 1
        raise AnalysisError(f"{corpus.name}: prompt {number} has no token: leave it out")
    long = [index for index, length in enumerate(lengths) if length > room]
    if long:
        first = long[0]
        others = f" ({len(long) - 1} more are too long)" if len(long) > 1 else ""
        raise AnalysisError(
            f"{corpus.name}: prompt {first + 1} has {lengths[first]} tokens, and {loaded.name} has "
            f"room for {room} beside {max_new_tokens} new ones{others}: give shorter prompts, or "
            "fewer new tokens"
        )
    return prompts


def _read(loaded: LoadedModel, corpus: Corpus, chat_template: str | None) -> Iterable[Encoded]:
    """The prompts as the model reads them; a conversation ends where the assistant begins."""
    name = loaded.name
    tokenizer = loaded.tokenizer
    if item_kind(corpus.items) is Conversation:
        return conversations(name, tokenizer, corpus.items, chat_template, answering=True)
    return encoded(name, tokenizer, corpus.texts, loaded.max_length)


def _settings(headed: nn.Module, temperature: float) -> transformers.GenerationConfig:
    """The model's own settings of ``generate``, with one beam, and with a temperature."""
    settings = copy.deepcopy(headed.generation_config)
    settings.update(do_sample=temperature > 0, num_beams=1, num_return_sequences=1)
    settings.update(max_length=None, return_dict_in_generate=False)
    if temperature > 0:
        settings.update(temperature=temperature)
    else:
        settings.update(**dict.fromkeys(OF_SAMPLING))
    return settings


def _masks_padding(loaded: LoadedModel, headed: nn.Module) -> bool:
    """Whether padding before a prompt changes nothing but rounding."""
    taken = parameters_of(without_adapters(headed))
    return not loaded.layout.equal_lengths and "position_ids" in taken


def _batches(
    prompts: Sequence[Sequence[int]], size: int, is_masked: bool
) -> Iterator[Sequence[int]]:
    """Indices of the prompts of each batch, shorter ones first; of one length without a mask."""
    lengths = [len(ids) for ids in prompts]
    order = sorted(range(len(prompts)), key=lengths.__getitem__)
    runs = [order]
    if not is_masked:
        runs = [[*run] for _, run in itertools.groupby(order, lengths.__getitem__)]
    for run in runs:
        for start in range(0, len(run), size):
            yield run[start : start + size]


def _answer_ids(
    loaded: LoadedModel,
    headed: nn.Module,
    prompts: Sequence[Sequence[int]],
    settings: transformers.GenerationConfig,
) -> list[list[int]]:
    """What the model adds to each prompt of a batch, with padding after its end."""
    longest = max(map(len, prompts))
    ids = torch.full((len(prompts), longest), loaded.pad_id)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        begin = longest - len(prompt)
        ids[row, begin:] = torch.tensor(prompt)
        mask[row, begin:] = 1
    inputs = {"input_ids": ids.to(loaded.device), "attention_mask": mask.to(loaded.device)}
    try:
        given = headed.generate(**inputs, generation_config=settings)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        words = f"out of memory on {loaded.device} for {len(prompts)} prompts"
    else:
        return given[:, longest:].tolist()
    raise AnalysisError(f"{loaded.name}: {words} of {longest} tokens: give a smaller batch_size")


def _generated(
    loaded: LoadedModel,
    prompt: str,
    prompt_ids: list[int],
    ids: list[int],
    settings: transformers.GenerationConfig,
) -> Generated:
    ends = settings.eos_token_id
    ends = {*ends} if isinstance(ends, list | tuple) else {ends}
    count = next((count for count, index in enumerate(ids, 1) if index in ends), None)
    answer_ids = ids[:count]
    answer = loaded.tokenizer.decode(answer_ids, skip_special_tokens=True)
    return Generated(prompt, answer, prompt_ids, answer_ids, count is not None)
