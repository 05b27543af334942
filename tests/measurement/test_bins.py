"""``bins="position"``: the table of a bin is that of the plain metric where its tokens alone count;
against the naive float64 reference, in which no other token counts.
"""

import json

import numpy as np
import pandas as pd
import pytest
import reference
import tiny
import torch
import transformers
from torch.nn import functional

from analysis_lib import AnalysisError, load_model, measure, measure_vectors, merge_parts, metrics
from analysis_lib.cli import main
from analysis_lib.corpora import Corpus
from analysis_lib.metrics import Metric

LONG = (" ".join(tiny.TEXTS)[:110], " ".join(tiny.TEXTS[2:5]))
CORPUS = Corpus("texts", (*tiny.TEXTS[:4], *LONG))
BOUNDS = {"1": (1, 1), "2": (2, 2), "3-4": (3, 4), "5-8": (5, 8), "9-16": (9, 16)}
BOUNDS |= {"17-32": (17, 32), "33-64": (33, 64), "65-128": (65, 128)}
FLOAT64 = (1e-9, 1e-12)


class OfBin(reference.Reference):
    """The reference where only tokens at some positions count, and texts that reach them."""

    def __init__(self, first: int, last: int, *given, **settings):
        self.first, self.last = first, last
        super().__init__(*given, **settings)
        self.utterances = [
            text for text in self.utterances if any(layer.counted.any() for layer in text.layers)
        ]

    def _tokens(self, step, count, about):
        types, counted = super()._tokens(step, count, about)
        positions = np.arange(1, count + 1)
        return types, counted & (positions >= self.first) & (positions <= self.last)


def of_bin(tables: dict[str, pd.DataFrame], label: str) -> dict[str, pd.DataFrame]:
    """The rows of a bin of each table, as those of a table without bins."""
    parts = {}
    for name, table in tables.items():
        part = table[table["positions"] == label].drop(columns="positions")
        if "key_type" in part:
            part["key_type"] = part["key_type"].astype(str)
        parts[name] = part.reset_index(drop=True)
    return parts


CASES = [("bert", True), ("bert", False), ("llama", True), ("deberta-v3", True)]


@pytest.mark.parametrize(("name", "special_tokens"), CASES)
def test_a_bin_is_a_measurement_in_which_only_its_tokens_count(name, special_tokens, tiny_folder):
    folder = tiny_folder(name)
    model = load_model(str(folder), dtype="float64")
    given = {"special_tokens": special_tokens, "progress": False}
    tables = measure(model, CORPUS, bins="position", **given)
    assert [*tables] == [*measure(model, CORPUS, **given)]
    reached = []
    for label, bounds in BOUNDS.items():
        naive = OfBin(*bounds, folder, CORPUS.texts, special_tokens=special_tokens, max_length=160)
        found = of_bin(tables, label)
        if not naive.utterances:
            assert not any(len(table) for table in found.values())
            continue
        reached.append(label)
        if name != "bert" and label not in ("1", "3-4", "17-32"):
            continue
        # The reference forms pairs of vectors, and has none in a bin of one position.
        pairs = {"utterance_similarity"} if label in ("1", "2") else set()
        expected = {table: getattr(naive, table)() for table in found.keys() - pairs}
        found = {table: found[table] for table in expected}
        reference.assert_agree(found, expected, FLOAT64)
    occur = tables["anisotropy"]["positions"]
    assert occur.cat.ordered
    assert occur.cat.categories.tolist() == reached
    assert len(reached) >= 5


REQUESTED = [*reference.ON_REQUEST.keys() - {"resultant_by_position"}]


@pytest.mark.parametrize("name", ["gpt_neox", "t5"])
def test_what_is_made_on_request_has_bins_too(name, tiny_folder):
    folder = tiny_folder(name)
    model = load_model(str(folder), dtype="float64")
    of_encoder_decoder = {"rotary_pairs", "qk_alignment_unrotated"} if name == "t5" else set()
    asked = [metric for metric in REQUESTED if metric not in of_encoder_decoder]
    tables = measure(model, CORPUS, ",".join(asked), bins="position", progress=False)
    for label in ("5-8", "17-32"):
        naive = OfBin(*BOUNDS[label], folder, CORPUS.texts, max_length=160)
        expected = {metric: getattr(naive, metric)() for metric in asked}
        # The reference has no cross-attention, whose layers come last.
        found = {
            metric: table[table["layer"] < len(naive.layers)]
            for metric, table in of_bin(tables, label).items()
        }
        reference.assert_agree(found, expected, FLOAT64)


def test_bins_add_up_to_the_plain_counts(tiny_folder):
    model = load_model(str(tiny_folder("llama")), dtype="float64")
    counts = {
        "anisotropy": "tokens",
        "score_contributions": "pairs",
        "token_norms": "tokens",
        "norms_by_type": "tokens",
    }
    plain = measure(model, CORPUS, ",".join(counts), progress=False)
    tables = measure(model, CORPUS, ",".join(counts), bins="position", progress=False)
    for name, column in counts.items():
        rows = [key for key in (*reference.KEYS, "position") if key in plain[name]]
        first, wanted = (
            table.astype(dict.fromkeys(rows, str)).groupby(rows)[column].sum()
            for table in (tables[name], plain[name])
        )
        # Position 1 is a bin of its own, and a slot of token_norms in it.
        pd.testing.assert_series_equal(first, wanted, check_like=True)


def test_an_option_of_a_metric_is_that_of_measure(tiny_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("ANALYSIS_LIB_MEASUREMENTS", str(tmp_path))
    name = str(tiny_folder("bert"))
    plain = measure(name, CORPUS, "anisotropy", progress=False)
    table = measure(name, CORPUS, [metrics.Anisotropy(bins="position")], progress=False)
    kept = [*tmp_path.rglob("anisotropy-*.npz")]
    again = measure(name, CORPUS, "anisotropy", bins="position", progress=False)
    # Both are kept, each by its own name, and the second call reads what the first has kept.
    assert len(kept) == len([*tmp_path.rglob("anisotropy-*.npz")]) == 2
    assert again["anisotropy"].equals(table["anisotropy"])
    assert measure(name, CORPUS, "anisotropy", progress=False)["anisotropy"].equals(
        plain["anisotropy"]
    )
    described = table.run["formulas"]["metrics"]["anisotropy"]["parameters"]
    assert described == {"binned_by": "position"}
    assert plain.run["formulas"]["metrics"]["anisotropy"]["parameters"] == {}
    requested = metrics.Isotropy(["query"], bins="position")
    assert "positions" in measure(name, CORPUS, [requested], progress=False)["isotropy"]


class LongVectors(Metric):
    """A metric of the user's, with an attribute that is called as the option is."""

    name, needs = "long_vectors", frozenset({"hidden"})
    interval, counts = "share", "tokens"

    def __init__(self, bins: int):
        super().__init__()
        self.bins = bins

    def update(self, activations):
        hidden, layer = activations.spaces["hidden"], activations.layer
        self.add(("long", layer), (hidden.norms > self.bins).sum((1, 2)), activations)
        self.add(("tokens", layer), hidden.counts, activations)

    def rows(self, sums):
        tokens = sums["tokens"]
        return {"share": sums["long"] / tokens, "tokens": tokens.astype(int)}


def test_a_metric_of_ones_own(tiny_folder):
    folder = tiny_folder("llama")
    model = load_model(str(folder), dtype="float64")
    plain = measure(model, CORPUS, [LongVectors(4)], progress=False)["long_vectors"]
    assert "positions" not in plain
    tables = measure(model, CORPUS, [LongVectors(4)], bins="position", progress=False)
    table = tables["long_vectors"].query("positions == '3-4'")
    naive = OfBin(3, 4, folder, CORPUS.texts, max_length=160)
    for row in table.itertuples():
        norms = [
            np.linalg.norm(text.layers[row.layer].vectors, axis=1) for text in naive.utterances
        ]
        norms = np.concatenate(norms)
        assert row.tokens == len(norms)
        assert row.share == pytest.approx((norms > 4).mean())
    assert 0 < table["share"].mean() < 1


METRICS_OF_SUMS = "anisotropy,attention_entropy,attention_by_token_type,score_contributions"


def test_workers_and_parts_give_the_same_bytes(
    tiny_folder, tmp_path, monkeypatch, copied_workers, small_shards
):
    monkeypatch.setenv("ANALYSIS_LIB_MEASUREMENTS", "")
    name = str(tiny_folder("bert"))
    texts = Corpus("texts", (*tiny.TEXTS, *LONG) * 4)
    given = {"metrics": METRICS_OF_SUMS, "bins": "position", "progress": False}
    one = measure(name, texts, **given)
    two = measure(name, texts, workers=2, **given)
    for number in (1, 2):
        measure(name, texts, part=(number, 2), checkpoints=tmp_path, **given)
    parts = merge_parts(tmp_path)
    for table in one:
        assert two[table].equals(one[table])
        assert parts[table].equals(one[table])
        assert two[table]["positions"].cat.categories.equals(one[table]["positions"].cat.categories)


def test_a_statistic_of_bins_has_the_interval_of_the_table(tiny_folder):
    tables = measure(
        str(tiny_folder("bert")), CORPUS, "anisotropy", bins="position", progress=False
    )
    rows = "space == 'hidden' and layer == 2 and positions == '1'"
    estimate = tables.interval(lambda given: given["anisotropy"].query(rows)["cosine"].iloc[0])
    row = tables["anisotropy"].query(rows).iloc[0]
    assert estimate.row == pytest.approx((row["cosine"], row["ci_low"], row["ci_high"]))


def test_positions_of_a_window_count_from_its_beginning(tiny_folder):
    folder = tiny_folder("bert")
    model = load_model(str(folder), dtype="float64")
    long = [" ".join(tiny.TEXTS * 3), tiny.TEXTS[0]]
    naive = reference.Reference(folder, long, long_texts="window", max_length=160)
    lengths = [len(text.layers[0].types) for text in naive.utterances]
    assert len(lengths) > 2
    tables = measure(
        model, long, "anisotropy", long_texts="window", bins="position", progress=False
    )
    tokens = tables["anisotropy"].query("space == 'hidden' and layer == 0")
    tokens = tokens.set_index("positions")["tokens"]
    assert tokens["1"] == tokens["2"] == len(lengths)
    assert tokens["65-128"] == sum(min(length, 128) - 64 for length in lengths if length > 64)


def test_the_loss_of_a_model_along_its_texts(tmp_path):
    base, tokenizer = tiny.build("llama")
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(base.config).double()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), dtype="float64")
    table = measure(loaded, CORPUS, "next_token_loss", bins="position", progress=False)
    table = table["next_token_loss"].set_index("positions")
    losses = []
    for text in CORPUS.texts:
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            logits = model(ids).logits[0]
        losses.append(functional.cross_entropy(logits[:-1], ids[0, 1:], reduction="none"))
    # Position 3 predicts the fourth token.
    expected = torch.cat([loss[2:4] for loss in losses])
    assert table.loc["3-4", "tokens"] == len(expected)
    assert table.loc["3-4", "loss"] == pytest.approx(float(expected.mean()))


def test_given_vectors_have_positions(tmp_path):
    rng = np.random.default_rng(0)
    vectors = {3: rng.normal(size=(9, 5))}
    table = measure_vectors(vectors, [6, 3], "anisotropy", bins="position", progress=False)
    rows = table["anisotropy"].set_index("positions")
    assert rows["tokens"].to_dict() == {"1": 2, "2": 2, "3-4": 3, "5-8": 2}
    first = vectors[3][[0, 6]]
    first /= np.linalg.norm(first, axis=1, keepdims=True)
    assert rows.loc["1", "cosine"] == pytest.approx(first[0] @ first[1])
    # Of a single vector in a bin there is no pair: its row stays, and has no cosine.
    table = measure_vectors(vectors, [5, 4], "anisotropy", bins="position", progress=False)
    rows = table["anisotropy"].set_index("positions")
    assert rows.loc["5-8", "tokens"] == 1
    assert np.isnan(rows.loc["5-8", "cosine"])


REFUSED = [
    (lambda: metrics.Anisotropy(vectors_of="mean", bins="position"), "the mean vector of a text"),
    (lambda: metrics.Anisotropy(bins="length"), "bins is 'length'"),
    (lambda: metrics.ResultantByPosition().in_bins("position"), "rows are by position"),
    (lambda: metrics.RepresentationSimilarity().in_bins("position"), "two models"),
]


@pytest.mark.parametrize(("make", "words"), REFUSED)
def test_what_has_no_bins_is_refused_in_one_line(make, words):
    with pytest.raises(AnalysisError, match=words) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_a_map_that_is_one_vector_has_no_positions(tiny_folder):
    images = tiny.corpus("resnet-basic")
    given = {"bins": "position", "progress": False}
    for asked in ("anisotropy", "all"):
        with pytest.raises(AnalysisError, match="an image is one vector there, unless maps is pos"):
            measure(str(tiny_folder("resnet-basic")), images, asked, **given)
    table = measure(
        str(tiny_folder("resnet-basic")), images, "anisotropy", maps="positions", **given
    )
    assert table["anisotropy"]["positions"].nunique() > 2


def test_from_the_command_line(tiny_folder, tmp_path):
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join(CORPUS.texts))
    given = ["measure", "--model", str(tiny_folder("bert")), "--data", str(texts)]
    given += ["--metrics", "anisotropy,dimension_means", "--bins", "position", "--quiet"]
    assert main([*given, "--out", str(tmp_path / "out")]) == 0
    table = pd.read_parquet(tmp_path / "out" / "anisotropy.parquet")
    assert table["positions"].cat.categories[:3].tolist() == ["1", "2", "3-4"]
    run = json.loads((tmp_path / "out" / "run.json").read_text())
    parameters = run["formulas"]["metrics"]["dimension_means"]["parameters"]
    assert parameters == {"binned_by": "position"}
    for number in ("1/2", "2/2"):
        assert main([*given, "--out", str(tmp_path / "parts"), "--part", number]) == 0
    assert main(["merge", str(tmp_path / "parts"), "--quiet"]) == 0
    assert pd.read_parquet(tmp_path / "parts" / "anisotropy.parquet").equals(table)


def test_compared_models_have_bins(tiny_folder, tmp_path, capsys):
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join(CORPUS.texts))
    models = [str(tiny_folder("bert")), str(tiny_folder("llama"))]
    given = ["compare", *models, "--data", str(texts), "--twins", "0", "--quiet"]
    assert main([*given, "--bins", "position", "--out", str(tmp_path / "out")]) == 0
    table = pd.read_parquet(tmp_path / "out" / "anisotropy_difference.parquet")
    assert {"1", "2", "3-4"} <= {*table["positions"]}
    rows = table.query("positions == '3-4' and space == 'hidden' and layer == 1")
    assert len(rows) == 1
    assert main([*given, "--bins", "length", "--out", str(tmp_path / "none")]) == 1
    assert "bins is 'length': give one of position" in capsys.readouterr().err
