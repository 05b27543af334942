"""A model ready to be measured: its blocks, its tokenizer, and the types of its tokens."""

import math
import re
import threading
from dataclasses import dataclass, field
from functools import cached_property

import torch
import transformers
from jaxtyping import Int
from torch import Tensor, nn

from analysis_lib.errors import AnalysisError
from analysis_lib.models.architectures import CharacterBertTokenizer
from analysis_lib.models.devices import weights
from analysis_lib.models.parts import Layout, Stack, layout_for
from analysis_lib.models.tokenization import Tokenizer, text_frame

# The types a token can have, in the order of every table: those of Maruta and Matsuzaki (2024, sec. 2.2), and the first
# token where the model has no [CLS], which causal models use as a sink of attention in its place.
TOKEN_TYPES = ("cls", "sep", "first", "punct", "other")
# A comma or a full stop, in Latin, CJK, Arabic or Devanagari script.
PUNCTUATION = frozenset(",.，．、。،।")
# Under these names a configuration says how many tokens its model reads.
_LENGTHS = ("max_position_embeddings", "n_positions", "max_length_inputs")
# A model without a limit of its own (T5's positions are relative) reads this many tokens at once.
LONGEST_TEXT = 1024


@dataclass(frozen=True)
class ModelSpec:
    """What another process needs to load the same model."""

    name: str
    revision: str | None
    dtype: str
    device: str
    device_map: str | dict | None = field(default=None, hash=False)


@dataclass(eq=False, repr=False)
class LoadedModel:
    """A model with what prepares its input, ready to be measured.

    Attributes:
        name: the name, hub id or folder it was asked for by.
        revision: what identifies its weights: a package's hash, a hub commit, or the hash of the files.
        model: the transformers model; while it is measured, it is in evaluation mode.
        processor: its tokenizer, image processor or feature extractor.
        spec: how another process loads it; None for a model that lives in this process alone.
        files: sha256 of the files it was read from, by name.
        layout: where its parts are.
    """

    name: str
    revision: str
    model: transformers.PreTrainedModel
    processor: object
    spec: ModelSpec | None = None
    files: dict[str, str] = field(default_factory=dict)
    layout: Layout = field(init=False)
    # One captured pass at a time: the hooks are on the modules, which threads of a worker share.
    lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    def __post_init__(self) -> None:
        self.layout = layout_for(self.name, self.model.config)
        self.model = self.model.get_submodule(self.layout.part)
        for stack, blocks in self.stacks.items():
            if not blocks:
                raise AnalysisError(f"{self.name} has no transformer block ({stack.name}): its config.json says so")
        _refuse_non_finite(self)
        _refuse_strange_tokens(self)

    def __repr__(self) -> str:
        layers = sum(map(len, self.stacks.values()))
        form = f"{type(self.model).__name__} of {layers} layers, reads {self.kind}, {self.model.dtype} on {self.device}"
        return f"<LoadedModel {self.name}: {form}>"

    @property
    def kind(self) -> str:
        """What it reads: ``text``, ``image`` or ``audio``."""
        return self.layout.kind

    @cached_property
    def stacks(self) -> dict[Stack, list[nn.Module]]:
        """The blocks of each stack, in order. A block that runs several times, as in ALBERT, is there once."""
        found = {}
        for stack in self.layout.stacks:
            pattern = re.compile(re.escape(stack.blocks).replace(r"\*", r"\d+"))
            found[stack] = [module for name, module in self.model.named_modules() if pattern.fullmatch(name)]
        return found

    @property
    def device(self) -> torch.device:
        device = self.model.device
        if device.type == "meta":  # Its first weights lie on disk.
            device = torch.device(self.model._hf_hook.execution_device)
        return device

    @property
    def tokenizer(self) -> Tokenizer:
        """What turns text into tokens.

        Raises:
            AnalysisError: the model reads no text.
        """
        if self.kind != "text":
            raise AnalysisError(f"{self.name} reads {self.kind}s and has no tokenizer: use its processor")
        return self.processor

    @cached_property
    def max_length(self) -> int:
        """How many tokens of a text the model reads at once, special tokens included."""
        config = self.model.config
        limits = [self.tokenizer.model_max_length]
        limits += [getattr(config, name, None) or math.inf for name in _LENGTHS]
        for name, module in self.model.named_modules():
            if name.endswith("embeddings.position_embeddings") and isinstance(module, nn.Embedding):
                # RoBERTa counts positions from the padding index on, which its table leaves unused.
                offset = 0 if module.padding_idx is None else module.padding_idx + 1
                limits.append(module.num_embeddings - offset)
        longest = min(limits)
        # Tokenizers without a limit say so with a number like 1e30.
        return int(longest) if longest < 1e9 else LONGEST_TEXT

    @cached_property
    def special_ids(self) -> dict[str, list[int | list[int]]]:
        """The token ids of the types cls, sep and punct. A model without [CLS] or [SEP] may put <s> and </s> there."""
        tokenizer = self.tokenizer
        ids = {"cls": tokenizer.cls_token_id, "sep": tokenizer.sep_token_id}
        if isinstance(tokenizer, CharacterBertTokenizer):
            return {"punct": [tokenizer.word_ids(sign) for sign in PUNCTUATION], **{n: [ids[n]] for n in ids}}
        if ids["cls"] is None and tokenizer.bos_token_id in text_frame(tokenizer)[0]:
            ids["cls"] = tokenizer.bos_token_id
        if ids["sep"] is None and tokenizer.eos_token_id in text_frame(tokenizer)[1]:
            ids["sep"] = tokenizer.eos_token_id
        found = {name: [index] for name, index in ids.items() if index is not None}
        return {**found, "punct": _punctuation_ids(tokenizer)}

    def token_types(self, ids: Int[Tensor, "utterance token *character"]) -> Int[Tensor, "utterance token"]:
        """The type of every token, as an index into ``TOKEN_TYPES``; a token is an id, or a word of characters."""
        types = torch.full(ids.shape[:2], TOKEN_TYPES.index("other"), device=ids.device)
        # Special tokens last: what a tokenizer says of a token goes before how it reads, and where it stands.
        for name in ("punct", "first", "sep", "cls"):
            if name == "first" and "cls" not in self.special_ids:
                types[:, 0] = TOKEN_TYPES.index("first")
            for index in self.special_ids.get(name, ()):
                found = ids == torch.tensor(index, device=ids.device)
                types[found.all(-1) if isinstance(index, list) else found] = TOKEN_TYPES.index(name)
        return types


def _punctuation_ids(tokenizer: Tokenizer) -> list[int]:
    if isinstance(tokenizer, transformers.CanineTokenizer):
        # Its tokens are code points: a vocabulary of a million.
        return [ord(sign) for sign in PUNCTUATION]
    return [
        index
        for token, index in tokenizer.get_vocab().items()
        # Decoding strips the marks of sub-word tokenizers; few tokens hold such a sign, so it is cheap.
        if PUNCTUATION & set(token) and tokenizer.decode([index]).strip() in PUNCTUATION
    ]


def _refuse_non_finite(loaded: LoadedModel) -> None:
    for name, weight in weights(loaded.model):
        if not torch.isfinite(weight).all():
            places = (
                f"layer {layer}" if len(loaded.stacks) == 1 else f"layer {layer} of the stack {stack.name}"
                for stack, blocks in loaded.stacks.items()
                for layer, block in enumerate(blocks, 1)
                if loaded.model.get_submodule(name.rpartition(".")[0]) in set(block.modules())
            )
            raise AnalysisError(
                f"{loaded.name}: the weights {name} ({next(places, 'outside the blocks')}) hold NaN or infinity: "
                f"repair the checkpoint"
            )


def _refuse_strange_tokens(loaded: LoadedModel) -> None:
    """A tokenizer with more tokens than the model embeds would stop a measurement at the first of them."""
    if not isinstance(loaded.processor, transformers.PreTrainedTokenizerFast):
        return
    words = loaded.model.get_input_embeddings().num_embeddings
    largest = max(loaded.processor.get_vocab().values(), default=-1)
    if largest >= words:
        raise AnalysisError(
            f"{loaded.name}: its tokenizer has token {largest} and its embeddings end at {words - 1}: "
            f"give the tokenizer that belongs to the weights"
        )
