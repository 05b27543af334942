"""A model ready to be measured: its blocks, its tokenizer, and the types of its tokens."""

import copy
import itertools
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
import transformers
from jaxtyping import Bool, Int
from torch import Tensor, nn
from transformers import ProcessorMixin

from analysis_lib.corpora.token_types import TOKEN_TYPES
from analysis_lib.errors import AnalysisError
from analysis_lib.models.devices import device_of, embedded_words, weights, without_gradients
from analysis_lib.models.layouts import find_layout, is_of, model_part
from analysis_lib.models.outer import Answer, answer, is_plain_head
from analysis_lib.models.pair_layouts import find_pair_layout
from analysis_lib.models.pairs import MEDIA, is_composite, pair_kinds, part_of
from analysis_lib.models.parts import Attention, Layout, Stack, listed_layout
from analysis_lib.models.probe import evaluated, example, kind_of
from analysis_lib.models.tokenization import Tokenizer, WordTokenizer

# Special tokens of a tokenizer that start an input, and those that end or divide it.
ENDS = {"cls": ("cls", "bos"), "sep": ("sep", "eos")}
# Commas and full stops in Latin, CJK, Arabic and Devanagari script.
PUNCTUATION = frozenset(",.，．、。،।")
# Settings that limit the number of tokens a model reads.
_LENGTHS = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "max_length_inputs"),
    *("max_encoder_position_embeddings", "max_decoder_position_embeddings"),
)
# A tokenizer with fewer tokens than a tenth of the embeddings was made from files of another kind.
LEAST_SHARE = 10
# Samples per second of sound: more would fill the memory.
MOST_SAMPLES = 1_000_000
# Number of tokens read at once by a model without a limit of its own (T5's positions are relative).
LONGEST_TEXT = 1024


@dataclass(frozen=True)
class ModelSpec:
    """Arguments with which another process loads the same model."""

    name: str
    revision: str | None
    dtype: str
    device: str
    device_map: str | dict | None = field(default=None, hash=False)
    processor: str | None = None


@dataclass(eq=False, repr=False)
class LoadedModel:
    """A model with the processor of its input, ready to be measured.

    Attributes:
        name: the name, hub id or folder that it was loaded by.
        revision: identifies its weights: a package's hash, a hub commit, or the hash of the files.
        model: the transformers model that is measured, without a head; it is in evaluation mode
            while it is measured.
        processor: its tokenizer, image processor or feature extractor.
        spec: arguments with which another process loads it; None for a model that exists only in
            this process.
        files: SHA-256 of the files it was read from, by name.
        part: the path of the part of a model that was loaded alone, if any.
        outer: the outermost model that the user has, such as one with a head or with adapters,
            inside which ``model`` runs: it is the one that is called. Without one, ``model``
            itself.
        layout: the places of its parts.
        headed: the language model that ``model`` is the body of, once it has been used.
        body_path: where ``headed`` holds the module of whose output it makes the logits of each
            token by itself; empty if it makes them in another way, None until that is known.
        transcriber: the tokenizer of a decoder that reads the text of a sound.
        composite: its processor of images or sounds with texts, or what reads it; None without.
        unsupported: by input of metrics, the reason why it cannot be captured; known once the model
            has been checked.
    """

    name: str
    revision: str
    model: transformers.PreTrainedModel
    processor: object
    spec: ModelSpec | None = None
    files: dict[str, str] = field(default_factory=dict)
    part: str = ""
    outer: nn.Module | None = None
    composite: ProcessorMixin | Callable[[], ProcessorMixin | None] | None = None
    layout: Layout = field(init=False)
    unsupported: dict[str, str] = field(default_factory=dict, init=False)
    headed: transformers.PreTrainedModel | None = field(default=None, init=False)
    body_path: str | None = field(default=None, init=False)
    transcriber: Tokenizer | None = field(default=None, init=False)
    # One pass at a time: threads of a worker share modules and their hooks, which would also act in
    # a plain pass.
    lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)
    # The whole model, of which the layout for texts may be that of a part.
    _body: transformers.PreTrainedModel | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        self._body = self.model
        if is_composite(self.processor) and not self.part:
            self.composite = self.processor
        try:
            self._choose_layout()
        except AnalysisError:
            kinds = [] if self._composite is None else pair_kinds(self._composite)
            if self.part or not kinds:
                raise
            # It reads nothing without an image or a sound.
            self._read_pairs(kinds[0])
        self._check()

    def _check(self) -> None:
        """Check that the layout, the weights and the processor can be used."""
        if self.outer is None:
            self.outer = self.model
        for stack, blocks in self.stacks.items():
            if not blocks:
                raise AnalysisError(
                    f"{self.name} has no transformer block ({stack.name}): its config.json says so"
                )
        shifted = any(stack.tokens == "shifted" for stack in self.layout.stacks)
        if (
            shifted
            and self.layout.listed
            and getattr(self.model.config, "decoder_start_token_id", None) is None
        ):
            raise AnalysisError(
                f"{self.name}: its config.json has no decoder_start_token_id: give the token that "
                "its decoder starts with, such as T5's padding"
            )
        _refuse_non_finite(self)
        _refuse_strange_tokens(self)
        rate = getattr(self.processor, "sampling_rate", MOST_SAMPLES)
        if not isinstance(rate, int) or not 1 <= rate <= MOST_SAMPLES:
            raise AnalysisError(
                f"{self.name}: its processor reads {rate!r} samples per second: mend its settings"
            )

    def _choose_layout(self) -> None:
        """Set the layout, the part of the model to measure, and the processor of its input."""
        listed = listed_layout(self.model.config.model_type, self.part)
        if self.part and not (listed and listed.reads_texts_too):
            self.model = model_part(self.name, self.model, self.part)
            listed = listed_layout(self.model.config.model_type)
        if listed and listed.reads_texts_too:
            if not hasattr(self.processor, "tokenizer"):
                raise AnalysisError(
                    f"{self.name}: its decoder reads texts, and a {type(self.processor).__name__} "
                    "none: give a processor with a tokenizer, such as transformers.AutoProcessor "
                    "reads"
                )
            self.transcriber = self.processor.tokenizer
        if isinstance(self.processor, ProcessorMixin):
            kind = listed.kind if listed else kind_of(self.model)
            self.processor = part_of(self.processor, kind)
        self.processor = getattr(self.processor, "feature_extractor", self.processor)
        if listed and not is_of(listed, self.model):
            # A part alone, such as the encoder of a Whisper.
            listed = None
        if self.outer is not None:
            self._wake()
        layout = listed or find_layout(self.name, self.model, self.processor)
        # The layout may be that of a part.
        modules = dict(self.model.named_modules())
        self.model = modules.get(layout.part, self.model)
        # Some heads are on an encoder alone.
        paths = dict(self.model.named_modules())
        stacks = tuple(stack for stack in layout.stacks if stack.blocks.partition(".*")[0] in paths)
        self.layout = replace(layout, stacks=stacks or layout.stacks)

    @property
    def _composite(self) -> ProcessorMixin | None:
        """The processor of images or sounds with texts."""
        if callable(self.composite) and not isinstance(self.composite, ProcessorMixin):
            self.composite = self.composite()
        return self.composite

    def _read_pairs(self, kind: str) -> None:
        """Set layout and processor for images or sounds with texts."""
        self.model = self._body
        self.layout, self.processor = find_pair_layout(self.name, self.model, self._composite, kind)

    @property
    def pair_kinds(self) -> list[str]:
        """The kinds of images or sounds with texts that it reads."""
        if self.part or self._composite is None:
            return []
        return pair_kinds(self._composite)

    def reading(self, kind: str) -> "LoadedModel":
        """The same model as it reads items of a kind, such as images with texts.

        It is itself if it reads them already, or reads nothing but one kind.

        Args:
            kind: the kind of a corpus.

        Raises:
            AnalysisError: it cannot read what its processor makes of them.
        """
        if kind == self.kind or kind not in MEDIA or self.part or self._composite is None:
            return self
        if kind not in self._readings:
            other = copy.copy(self)
            for known in ("stacks", "paths", "_readings", "_checked", "_typed_ids", "_positions"):
                vars(other).pop(known, None)
            other.unsupported = {}
            other.transcriber = None
            other.headed = None
            other.body_path = None
            if other.outer is self.model:
                other.outer = other._body
            other._read_pairs(kind)
            other._check()
            self._readings[kind] = other
        return self._readings[kind]

    @cached_property
    def _readings(self) -> dict[str, "LoadedModel"]:
        """The same model by other kinds of items that it reads."""
        return {}

    def _wake(self) -> None:
        """Run the hooks around the body that act in the first pass, such as unpacking weights."""
        if self.outer is self.model or is_plain_head(self.model, self.outer):
            return
        # If the outermost model cannot read the example, the first batch reports it.
        with suppress(Exception), evaluated(self.outer), without_gradients(self.outer):
            self.answer(example(self.model, self.processor))

    def __repr__(self) -> str:
        layers = sum(map(len, self.stacks.values()))
        form = (
            f"{type(self.model).__name__} of {layers} layers, reads {self.kind}, "
            f"{self.model.dtype} on {self.device}"
        )
        return f"<LoadedModel {self.name}: {form}>"

    @property
    def whole(self) -> list[nn.Module]:
        """The model, the outermost model, and the language model around the body, if known."""
        return [model for model in (self.model, self.outer, self.headed) if model is not None]

    def replica(self) -> "LoadedModel":
        """The same model with its own modules, for hooks of another thread, on the same weights."""
        kept = {}
        for module in self.whole:
            kept |= {
                id(weight): weight
                for weight in itertools.chain(module.parameters(), module.buffers())
            }
        with self.lock:
            other = copy.copy(self)
            for known in ("stacks", "paths", "_readings"):
                vars(other).pop(known, None)
            other.model, other.outer, other.headed = copy.deepcopy(
                (self.model, self.outer, self.headed), kept
            )
        other.lock = threading.Lock()
        return other

    def answer(self, inputs: Mapping[str, object]) -> Answer:
        """One pass of the outermost model."""
        return answer(self.name, self.model, self.outer, inputs)

    @property
    def kind(self) -> str:
        """Kind of input: ``text``, ``image``, ``audio``, ``image+text`` or ``audio+text``."""
        return self.layout.kind

    @cached_property
    def stacks(self) -> dict[Stack, list[nn.Module]]:
        """The blocks of each stack, in order.

        A block that runs several times, as in ALBERT, is listed once.
        """
        blocks = {}
        for stack in self.layout.stacks:
            blocks[stack] = [module for module, path in self.paths.items() if stack.holds(path)]
        return blocks

    @cached_property
    def paths(self) -> dict[nn.Module, str]:
        """Paths of all modules of the model."""
        return {module: name for name, module in self.model.named_modules()}

    @property
    def attending(self) -> Iterator[tuple[nn.Module, Attention]]:
        """The blocks that have attention, each with its attention."""
        for stack, blocks in self.stacks.items():
            for index, block in enumerate(blocks):
                if attention := stack.attention_of(index):
                    yield block, attention

    @property
    def device(self) -> torch.device:
        return device_of(self.model)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of texts.

        Raises:
            AnalysisError: the model reads no text, not even that of a sound.
        """
        if self.transcriber is not None:
            return self.transcriber
        if self.kind in MEDIA:
            return self.processor.tokenizer
        if self.kind != "text":
            raise AnalysisError(
                f"{self.name} reads {self.kind}s and has no tokenizer: use its processor"
            )
        return self.processor

    @property
    def max_length(self) -> int:
        """Number of tokens of a text that the model reads at once, special tokens included."""
        # Not cached, since a user may set the tokenizer's limit at any time.
        limits = {"model_max_length": self.tokenizer.model_max_length, **self._positions}
        for name, length in limits.items():
            if not isinstance(length, int | float) or not length >= 1:
                raise AnalysisError(
                    f"{self.name}: its {name} is {length!r}: give a number of tokens"
                )
        longest = min(limits.values())
        # Tokenizers without a limit use a number like 1e30.
        return int(longest) if longest < 1e9 else LONGEST_TEXT

    @property
    def positions(self) -> float:
        """Number of tokens for which the model has positions; infinite where it computes them.

        That is where it is rotary, unless angles depend on the longest text of a batch.
        """
        types = {parameters.get("rope_type") for parameters in self._rotations}
        if types and "dynamic" not in types:
            return math.inf
        return min(self._positions.values())

    @cached_property
    def _positions(self) -> dict[str, float]:
        """Number of positions in the configuration and in tables of positions, by their names."""
        config = self.model.config
        if self.kind in MEDIA:
            config = config.get_text_config()
        limits = {}
        for name in _LENGTHS:
            length = getattr(config, name, None)
            # XLNet has -1, for no limit.
            limits[name] = math.inf if length in (None, 0, -1) else length
        for name, module in self.model.named_modules():
            if name.endswith("embeddings.position_embeddings") and isinstance(module, nn.Embedding):
                # RoBERTa's table leaves the rows up to the padding index unused.
                offset = 0 if module.padding_idx is None else module.padding_idx + 1
                limits[name] = module.num_embeddings - offset
        return limits

    @cached_property
    def length_boundaries(self) -> list[int]:
        """The lengths above which a text is rotated by other angles (``longrope``)."""
        return [
            parameters["original_max_position_embeddings"]
            for parameters in self._rotations
            if parameters.get("rope_type") == "longrope"
        ]

    @cached_property
    def _rotations(self) -> list[dict]:
        """Parameters of the rotation by position: of all layers, or of each type of layers."""
        parameters = getattr(self.model.config, "rope_parameters", None) or {}
        if "rope_type" in parameters:
            return [parameters]
        return [of_type for of_type in parameters.values() if of_type]

    @cached_property
    def pad_id(self) -> int:
        """A token id for padding, which is masked, so that any id with an embedding will do."""
        words = embedded_words(self.model)
        for owner in (self.tokenizer, self.model.config):
            index = getattr(owner, "pad_token_id", None)
            if isinstance(index, int) and 0 <= index < words:
                return index
        return 0

    @cached_property
    def _typed_ids(self) -> dict[str, list]:
        """Ids of tokens that may be punctuation, or that start or end an input."""
        ids = {"punct": _punctuation_ids(self.tokenizer)}
        for end, names in ENDS.items():
            candidates = [getattr(self.tokenizer, f"{name}_token_id", None) for name in names]
            ids[end] = [index for index in candidates if index is not None]
        return ids

    @property
    def end_ids(self) -> list:
        """Ids of the special tokens that start, divide or end an input."""
        return [index for end in ENDS for index in self._typed_ids[end]]

    def token_types(
        self,
        ids: Int[Tensor, "utterance token *character"],
        special: Bool[Tensor, "utterance token"],
    ) -> Int[Tensor, "utterance token"]:
        """The type of every token, as an index into ``TOKEN_TYPES``.

        Args:
            ids: the ids of the tokens; for words of characters, the ids of the characters.
            special: True at tokens that the tokenizer has put around or between texts. Only these
                can be cls and sep.
        """
        known = {name: _among(ids, values) for name, values in self._typed_ids.items()}
        leading = special.cumprod(1).bool()
        types = torch.full(ids.shape[:2], TOKEN_TYPES.index("other"), device=ids.device)
        types[known["punct"]] = TOKEN_TYPES.index("punct")
        types[:, 0] = TOKEN_TYPES.index("first")
        types[special & known["sep"]] = TOKEN_TYPES.index("sep")
        # A token used at both ends is cls only at the start.
        types[special & known["cls"] & (leading | ~known["sep"])] = TOKEN_TYPES.index("cls")
        return types


def _among(
    ids: Int[Tensor, "utterance token *character"], values: list
) -> Bool[Tensor, "utterance token"]:
    """True at tokens with one of some ids, or at words with one of some lists of characters."""
    if ids.dim() == 2:
        return torch.isin(ids, torch.tensor(values, dtype=ids.dtype, device=ids.device))
    return (ids.unsqueeze(2) == torch.tensor(values, device=ids.device)).all(-1).any(-1)


def _punctuation_ids(tokenizer: Tokenizer) -> list:
    if isinstance(tokenizer, WordTokenizer):
        return [tokenizer.word_ids(sign) for sign in PUNCTUATION]
    if isinstance(tokenizer, transformers.CanineTokenizer):
        # Tokens are code points: a vocabulary of a million.
        return [ord(sign) for sign in PUNCTUATION]
    return [
        index
        for token, index in tokenizer.get_vocab().items()
        # Decoding strips the marks of sub-word tokenizers; few tokens contain such a sign, so it is
        # cheap.
        if PUNCTUATION & set(token) and tokenizer.decode([index]).strip() in PUNCTUATION
    ]


def _refuse_non_finite(loaded: LoadedModel) -> None:
    for name, weight in weights(loaded.model):
        if weight.numel() == 1 and weight.isinf():
            # The bound of a clamp that is switched off.
            continue
        # A sum takes a tenth of the time, and is finite only if all weights are.
        if not weight.sum().isfinite() and not weight.isfinite().all():
            module = loaded.model.get_submodule(name.rpartition(".")[0])
            raise AnalysisError(
                f"{loaded.name}: the weights {name} ({_layer_of(loaded, module)}) hold NaN or "
                "infinity: repair the checkpoint"
            )


def _layer_of(loaded: LoadedModel, module: nn.Module) -> str:
    for stack, blocks in loaded.stacks.items():
        for layer, block in enumerate(blocks, 1):
            if module in {*block.modules()}:
                return (
                    f"layer {layer}"
                    if len(loaded.stacks) == 1
                    else f"layer {layer} of the stack {stack.name}"
                )
    return "outside the blocks"


def _refuse_strange_tokens(loaded: LoadedModel) -> None:
    """Raise an AnalysisError if the ids of the tokenizer do not fit the model's embeddings."""
    tokenizer = loaded.transcriber or loaded.processor
    if loaded.kind in MEDIA:
        tokenizer = loaded.tokenizer
    if not isinstance(tokenizer, transformers.PreTrainedTokenizerFast):
        return
    words = embedded_words(loaded.model)
    remedy = "give the tokenizer that belongs to the weights"
    if words == math.inf:
        # Unknown, as in models of texts and images.
        return
    # The id of padding may lack an embedding, since padding is masked.
    ids = {*tokenizer.get_vocab().values()} - {tokenizer.pad_token_id}
    largest = max(ids, default=-1)
    if largest >= words:
        raise AnalysisError(
            f"{loaded.name}: its tokenizer has token {largest} and its embeddings end at "
            f"{words - 1}: {remedy}"
        )
    if len(ids) < words / LEAST_SHARE:
        raise AnalysisError(
            f"{loaded.name}: its tokenizer, a {type(tokenizer).__name__}, knows {len(ids)} tokens "
            f"and it embeds {words}: {remedy}, as its save_pretrained writes it"
        )
