"""Adapters in a folder, which peft applies to the model with the head that their settings name."""

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path

import safetensors
import torch
import transformers
from torch import nn

from analysis_lib import files
from analysis_lib.errors import AnalysisError
from analysis_lib.models.devices import input_embeddings
from analysis_lib.models.folders import ADAPTER

# Files in which peft keeps the weights of an adapter.
WEIGHTS, PICKLED_WEIGHTS = "adapter_model.safetensors", "adapter_model.bin"
# Prefix of peft for the names of the modules of a model.
PREFIX = "base_model.model."
# Heads that belong to the tasks of peft.
TASKS = {
    "CAUSAL_LM": transformers.MODEL_FOR_CAUSAL_LM_MAPPING,
    "SEQ_2_SEQ_LM": transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    "SEQ_CLS": transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    "TOKEN_CLS": transformers.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    "QUESTION_ANS": transformers.MODEL_FOR_QUESTION_ANSWERING_MAPPING,
    "FEATURE_EXTRACTION": transformers.MODEL_MAPPING,
}


class Adapter:
    """The adapter of a folder.

    Attributes:
        name: the name of the model, for errors.
        folder: the folder of the adapter.
        settings: the content of its ``adapter_config.json``.
        shapes: the shapes of its weights, by the names that they have in the model with its head.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.folder = folder
        self.settings = files.read_json(folder / ADAPTER)
        if self.settings.get("megatron_config"):
            # peft would import the module that megatron_core names.
            raise AnalysisError(
                f"{name}: its adapter names code to run (megatron_core), which is never run: save "
                "it without"
            )
        self.shapes = dict(self._read_shapes())

    def _read_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        if (self.folder / WEIGHTS).is_file():
            with safetensors.safe_open(self.folder / WEIGHTS, "pt") as stored:
                for key in stored.keys():  # noqa: SIM118 (it is no mapping)
                    yield key.removeprefix(PREFIX), tuple(stored.get_slice(key).get_shape())
        elif (self.folder / PICKLED_WEIGHTS).is_file():
            stored = torch.load(
                self.folder / PICKLED_WEIGHTS, weights_only=True, map_location="meta"
            )
            for key, weight in stored.items():
                yield key.removeprefix(PREFIX), tuple(weight.shape)
        else:
            raise FileNotFoundError(f"{WEIGHTS} is missing")

    def class_of_base(
        self, config: transformers.PreTrainedConfig
    ) -> type[transformers.PreTrainedModel] | None:
        """Class of the model whose modules the adapter names, with the head it was made with.

        None if no class is known: the model without a head is then used.
        """
        candidates = [*self._candidates(config)]
        fitting = [made for made in candidates if self._fits(made, config)]
        return next(iter(fitting or candidates), None)

    def _candidates(
        self, config: transformers.PreTrainedConfig
    ) -> Iterator[type[transformers.PreTrainedModel]]:
        task = TASKS.get(str(self.settings.get("task_type")), {})
        yield from _model_classes(task.get(type(config), None))
        saved = self.settings.get("auto_mapping")
        names = [saved.get("base_model_class")] if isinstance(saved, Mapping) else []
        for name in [*names, *(config.architectures or [])]:
            if isinstance(name, str):
                yield from _model_classes(getattr(transformers, name, None))
        yield from _model_classes(transformers.MODEL_MAPPING.get(type(config), None))

    def _fits(
        self, made: type[transformers.PreTrainedModel], config: transformers.PreTrainedConfig
    ) -> bool:
        with torch.device("meta"):
            model = made(config)
        children = {name for name, _ in model.named_children()}
        return {name.partition(".")[0] for name in self.shapes} <= children

    def applied(self, model: transformers.PreTrainedModel) -> nn.Module:
        """The model with the adapter, a model of peft in evaluation mode.

        Raises:
            AnalysisError: the adapter does not fit the model, or puts vectors before a text.
        """
        import peft

        config = peft.PeftConfig.from_pretrained(str(self.folder))
        if config.is_prompt_learning:
            raise AnalysisError(
                f"{self.name}: its adapter cannot be applied: it puts vectors before a text: give "
                "one such as LoRA"
            )
        self._make_room_for_tokens(model)
        adapted = peft.PeftModel.from_pretrained(model, str(self.folder), torch_device="cpu")
        own = {
            key.removeprefix(PREFIX)
            for key in peft.get_peft_model_state_dict(adapted, save_embedding_layers=False)
        }
        # Besides its own weights, peft saves some of the model's twice.
        mark = peft.mapping.PEFT_TYPE_TO_PREFIX_MAPPING[config.peft_type]
        misfits = sorted(key for key in own ^ {*self.shapes} if mark in key)
        if misfits:
            raise AnalysisError(
                f"{self.name}: its adapter does not fit the model ({misfits[0]}): give its own base"
            )
        return adapted

    def _make_room_for_tokens(self, model: transformers.PreTrainedModel) -> None:
        """Embed as many tokens as the adapter was made with; it stores those that were added.

        Raises:
            AnalysisError: the adapter does not hold them.
        """
        embeddings = input_embeddings(model)
        if not isinstance(embeddings, nn.Embedding):
            return
        known = len(embeddings.weight)
        path = next(path for path, module in model.named_modules() if module is embeddings)
        saved = (
            self.shapes.get(f"{path}{inner}.weight")
            for inner in ("", ".base_layer", ".modules_to_save")
        )
        whole = max((shape[0] for shape in saved if shape is not None), default=known)
        trained = self.settings.get("trainable_token_indices") or []
        if isinstance(trained, Mapping):
            trained = itertools.chain(*trained.values())
        added = {index for index in trained if index >= known}
        _, of_low_rank = self.shapes.get(f"{path}.lora_embedding_A", (0, known))
        words = max(whole, of_low_rank, known + len(added))
        if words > whole and added != {*range(known, words)}:
            raise AnalysisError(
                f"{self.name}: its adapter was made for {words} tokens, the model embeds {known}, "
                "and the others' embeddings are not there: save it with save_embedding_layers=True"
            )
        if words != known:
            model.resize_token_embeddings(words, mean_resizing=False)


def _model_classes(*classes: object) -> Iterator[type[transformers.PreTrainedModel]]:
    for each in classes:
        if isinstance(each, type) and issubclass(each, transformers.PreTrainedModel):
            yield each
