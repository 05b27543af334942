"""``analysis-lib explain``: the card of a model at hand, from a probe of that very model."""

import copy
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

from analysis_book.atlas.cards import (
    FACTS,
    NO_TEXT,
    TRAPS,
    measured_by_library,
    measured_lines,
    plain_lines,
    traps,
)
from analysis_book.atlas.probing import dtypes_of, listed, probe, quiet
from analysis_book.atlas.small import NotBuiltError, read_by, readable_input
from analysis_lib.errors import AnalysisError, shown
from analysis_lib.models.checkpoint import tensors_of, weight_files
from analysis_lib.models.configurations import refuse_named_code
from analysis_lib.models.folders import located
from analysis_lib.models.live import bare_model
from analysis_lib.models.names import ModelName
from analysis_lib.models.probe import evaluated
from analysis_lib.models.reading import LOCALLY, reading


@dataclass
class Card:
    """What transformers returns of one model.

    Attributes:
        name: of the model.
        row: the facts, as a row of the table of the atlas.
    """

    name: str
    row: dict[str, str]

    @property
    def table(self) -> pd.DataFrame:
        """What each fact is about, what one might expect, what is so, and whether they differ."""
        rows = []
        for fact in FACTS:
            cell = self.row[fact.name]
            if cell and cell != NO_TEXT:
                rows.append((fact.label, fact.expected, cell, fact.surprises(cell)))
        return pd.DataFrame(rows, columns=["fact", "expected", "given", "differs"])

    @property
    def warnings(self) -> list[str]:
        """What would go wrong with the usual code, a sentence each."""
        return [TRAPS[name] for name in traps(self.row)]

    @property
    def code(self) -> dict[str, str]:
        """The lines that get the right thing, with transformers alone and with the library."""
        code = {"With transformers alone": plain_lines(self.row, self.name)}
        if lines := measured_lines(self.row, self.name):
            code["With analysis_lib"] = lines
        return code

    @property
    def title(self) -> str:
        """The model, its class and the version of transformers."""
        made, model_type = self.row["class"], self.row["type"]
        return f"{self.name}: {made} ({model_type}) in transformers {self.row['transformers']}"


def explain(model: str | Path | nn.Module, name: str = "") -> Card:
    """The card of a model.

    Args:
        model: a known name, a folder, a hub id, or a model object of transformers, which stays as
            it is.
        name: what a model object is called in the card.

    Raises:
        AnalysisError: there is no such model, it cannot be loaded, or it reads none of the inputs
            that are tried.

    >>> explain("minilm").row["last_state"]
    'output of the last block (no norm follows)'
    """
    if isinstance(model, nn.Module):
        if not isinstance(model, PreTrainedModel):
            raise AnalysisError(
                f"a {type(model).__name__} is no model of transformers: give one, or a name or "
                "folder"
            )
        body = bare_model(model)
        name = name or body.config.name_or_path or type(model).__name__
        dtype = ""
        if body.dtype != torch.float32:
            body = copy.deepcopy(body).float()
    elif isinstance(model, str | Path):
        name = str(model)
        body, stored = _loaded(name)
        dtype = dtypes_of(body)
        dtype = f"as saved ({dtype})" if dtype == stored else f"{dtype}; saved in {stored}"
        body.float()
    else:
        raise AnalysisError(f"the model is {shown(model)}: give a name, a folder or a model object")
    return Card(name, _row(name, body) | {"dtype": dtype})


def _loaded(name: str) -> tuple[PreTrainedModel, str]:
    """A model as ``from_pretrained`` gives it, and the precisions of its stored weights."""
    parsed = ModelName.parse(name)
    if parsed.part or parsed.adapter or parsed.untrained or parsed.dtype:
        raise AnalysisError(f"{name} is more than a model: give {parsed.base} alone")
    folder, _ = located(name, None)
    refuse_named_code(name, folder)
    with reading(f"{name} cannot be loaded", folder), quiet():
        model = transformers.AutoModel.from_pretrained(folder, **LOCALLY)
        return model, _stored(folder, model)


def _stored(folder: Path, model: PreTrainedModel) -> str:
    """The precisions in which the weights of a model are stored, by their number."""
    counts: Counter[str] = Counter()
    names = {name for name, _ in model.named_parameters()}
    prefix = f"{model.base_model_prefix}."
    for path in weight_files(folder):
        for key, tensor in tensors_of(path).items():
            if key in names or key.removeprefix(prefix) in names:
                counts[str(tensor.dtype).removeprefix("torch.")] += 1
    return listed(counts)


def _row(name: str, model: PreTrainedModel) -> dict[str, str]:
    model_type = model.config.model_type
    with quiet(), evaluated(model):
        try:
            inputs = readable_input(model)
        except NotBuiltError as error:
            raise AnalysisError(
                f"{name} is a {model_type} model, which reads none of the inputs that are tried "
                f"({error}): give one of its parts"
            ) from error
        facts = probe(model, inputs)
    return {
        "type": model_type,
        "class": type(model).__name__,
        "reads": read_by(model, inputs),
        "transformers": transformers.__version__,
        "measured": measured_by_library(model_type),
        **facts,
    }
