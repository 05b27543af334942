"""The weights of a BERT as a script that a page loads: no fetch, which files do not allow.

The script is text in UTF-16, in which a character is a number below 2¹⁵ plus 256, so that none ends
the string or is half of a pair. Matrices are rounded in groups: a character for the scale, which is
a positive float16, then :data:`GROUP` characters, each of which has two weights of 181 levels, or
three of 31. ``bert.js`` reads it.
"""

import copy
import json
from collections.abc import Iterable, Iterator

import numpy as np
import torch

from analysis_lib.errors import AnalysisError
from analysis_lib.models import LoadedModel, load_model

# Characters with weights to a scale.
GROUP = 16
# How many weights a character has, and how many levels each: at most 2¹⁵ together.
FINE = 2, 181
COARSE = 3, 31
FIRST = 256
# Positions that a page reads: longer texts are cut.
LONGEST = 64
# Of a BERT, what has no part in attention.
UNUSED = ("pooler.", "embeddings.position_ids", "embeddings.token_type_ids")
WORDS = "embeddings.word_embeddings.weight"
POSITIONS = "embeddings.position_embeddings.weight"


def levels(name: str) -> tuple[int, int]:
    """How many weights of a matrix are in a character, and how many levels each has.

    Words are half of the parameters of a small model, and few of them are in a text.
    """
    return COARSE if name == WORDS else FINE


def rounded(matrix: np.ndarray, per: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """A matrix as whole numbers times scales.

    Args:
        matrix: with a multiple of ``GROUP * per`` numbers.
        per: how many weights are in a character.
        count: how many levels each has, an odd number.

    Returns:
        The scales, a float16 for each group, and the numbers from 0 to ``count`` - 1, of which the
        middle one stands for zero, as group x weight.
    """
    groups = matrix.reshape(-1, GROUP * per)
    middle = count // 2
    scales = (np.abs(groups).max(1) / middle).astype(np.float16)
    # Of a group of zeros, any scale will do.
    scales[scales == 0] = 1
    numbers = np.rint(groups / scales[:, None].astype(np.float64)) + middle
    return scales, numbers.clip(0, count - 1).astype(np.uint16)


def dequantised(name: str, matrix: np.ndarray) -> np.ndarray:
    """A matrix as the page computes with it, float32."""
    per, count = levels(name)
    scales, numbers = rounded(matrix, per, count)
    values = scales[:, None].astype(np.float32) * (numbers.astype(np.float32) - count // 2)
    return values.reshape(matrix.shape)


def parameters(model: LoadedModel) -> Iterator[tuple[str, np.ndarray]]:
    """The parameters that the page needs, by their names in ``BertModel``.

    Raises:
        AnalysisError: the model is not a BERT that reads lower-case word pieces.
    """
    config = getattr(model.model, "config", None)
    kind = getattr(config, "model_type", "")
    backend = getattr(model.tokenizer, "backend_tokenizer", None)
    normalizer = json.loads(backend.to_str())["normalizer"] if backend else {}
    if kind != "bert" or config.hidden_act != "gelu" or not normalizer.get("lowercase"):
        raise AnalysisError(
            f"{model.name} does not run in a page: give a BERT with gelu and lower-case word "
            "pieces, such as minilm"
        )
    for name, values in model.model.state_dict().items():
        if not name.startswith(UNUSED):
            array = values.detach().float().cpu().numpy()
            yield name, array[:LONGEST] if name == POSITIONS else array


def as_in_page(model: LoadedModel) -> LoadedModel:
    """The model with the weights with which the page computes: its matrices are rounded."""
    copied = copy.deepcopy(model.model)
    weights = copied.state_dict()
    for name, values in parameters(model):
        if values.ndim == 2:
            weights[name][: len(values)] = torch.from_numpy(dequantised(name, values))
    return load_model(copied, processor=model.tokenizer)


def moved_by_rounding(model: LoadedModel, texts: Iterable[str]) -> dict[str, float]:
    """How far the rounded weights move what a page shows of some texts.

    Returns:
        ``cosine``: of the average cosines of two tokens of a text, the largest difference in any
        layer and text; ``weight`` and ``largest_weight``: the mean and the largest difference of
        attention weights.
    """
    rounded = as_in_page(model)
    cosines = []
    weights = []
    for text in texts:
        hidden, attention = read(model, text)
        hidden_in_page, attention_in_page = read(rounded, text)
        cosines.append((average_cosines(hidden) - average_cosines(hidden_in_page)).abs().max())
        weights.append((attention - attention_in_page).abs().flatten())
    moved = torch.cat(weights)
    return {
        "cosine": max(cosines).item(),
        "weight": moved.mean().item(),
        "largest_weight": moved.max().item(),
    }


def read(model: LoadedModel, text: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A text as a page reads it.

    Returns:
        Hidden states, layer x token x width, and attention weights, layer x head x query x key, in
        float64.
    """
    encoded = model.tokenizer(text, truncation=True, max_length=LONGEST, return_tensors="pt")
    before = model.model.config._attn_implementation
    # The others keep no weights.
    model.model.set_attn_implementation("eager")
    with torch.no_grad():
        given = model.model(**encoded, output_hidden_states=True, output_attentions=True)
    model.model.set_attn_implementation(before)
    return torch.cat(given.hidden_states).double(), torch.cat(given.attentions).double()


def average_cosines(hidden: torch.Tensor) -> torch.Tensor:
    """The average cosine of two tokens of a text by layer, over all its pairs."""
    count = hidden.shape[1]
    sums = torch.nn.functional.normalize(hidden, dim=-1).sum(1)
    return (sums.square().sum(-1) - count) / (count * (count - 1))


def weights_script(model: LoadedModel) -> bytes:
    """The script: it gives its weights to ``bertWeights``.

    Raises:
        AnalysisError: as of :func:`parameters`.
    """
    vectors = {}
    matrices = {}
    codes = []
    start = 0
    for name, values in parameters(model):
        if values.ndim == 1:
            vectors[name] = [float(f"{value:.7g}") for value in values]
            continue
        per, count = levels(name)
        scales, numbers = rounded(values, per, count)
        # The first weight of a character counts ones, the next ``count``.
        digits = numbers.reshape(len(numbers), GROUP, per)
        characters = digits @ count ** np.arange(per)
        coded = np.column_stack([scales.view(np.uint16), characters]).ravel()
        matrices[name] = {"shape": values.shape, "start": start, "per": per, "levels": count}
        start += len(coded)
        codes.append(coded)
    text = (np.concatenate(codes) + FIRST).astype("<u2").tobytes()
    config = model.model.config
    words = sorted(model.tokenizer.get_vocab().items(), key=lambda item: item[1])
    header = {
        "layers": config.num_hidden_layers,
        "heads": config.num_attention_heads,
        "epsilon": config.layer_norm_eps,
        "longest": LONGEST,
        "vocabulary": [word for word, _ in words],
        "vectors": vectors,
        "matrices": matrices,
    }
    head = f'bertWeights({json.dumps(header, ensure_ascii=False)}, "'
    return b"\xff\xfe" + head.encode("utf-16-le") + text + '");'.encode("utf-16-le")
