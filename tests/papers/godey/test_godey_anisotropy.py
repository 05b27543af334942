"""Anisotropy of trained models and their twins: planted cosines give the verdicts that were
planted.
"""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from planted import Planted, run_cells
from sklearn.metrics.pairwise import cosine_similarity

from analysis_book.papers import claims
from analysis_book.papers.godey.anisotropy import isotropic_excess
from analysis_book.papers.godey.batch_norm import around_batch_norm
from analysis_lib import load_corpus, load_model
from analysis_lib.measurement import Comparison, largest, shipped
from analysis_lib.metrics.anisotropy import isotropic_cosine_quantile
from analysis_lib.metrics.intervals import Estimate


def hidden(*cosines: float, reach: float = 0.01) -> pd.DataFrame:
    """An ``anisotropy`` table of these layers, and of queries that no claim on hidden states may
    read.
    """
    layers = pd.DataFrame({"space": "hidden", "layer": range(len(cosines)), "cosine": cosines})
    table = pd.concat([layers, layers.assign(space="query", cosine=0.99 * (-1) ** layers["layer"])])
    return table.assign(ci_low=table["cosine"] - reach, ci_high=table["cosine"] + reach)


def measured(*cosines: float, decoder: int = 0, name: str = "m", width: int = 100) -> Planted:
    """The tables of a model with these cosines, the last layers of which are those of a decoder."""
    stacks = [*["encoder"] * (len(cosines) - decoder), *["decoder"] * decoder]
    layers = pd.DataFrame({"layer": range(len(cosines)), "width": width, "stack": stacks})
    tables = Planted(anisotropy=hidden(*cosines), layers=layers)
    tables.run["model"] = name
    return tables


def on_page(page: str, *cells: str, **names) -> pd.Series:
    """The verdicts of cells of a page by the id of the claim."""
    return run_cells(f"anisotropy/{page}", *cells, **names)["verdicts"].set_index("id")["verdict"]


def test_each_layer_is_held_to_the_percentile_of_its_own_width():
    # The 95th percentile is 0.165 in 100 dimensions and 0.017 in 10,000.
    some, planted = {"godey-anisotropic-layer": largest(isotropic_excess)}, measured(0.1, 0.1)
    assert claims.verdicts(some, planted)["verdict"].tolist() == ["does not hold"]
    planted.layers["width"] = [100, 10_000]
    assert claims.verdicts(some, planted)["verdict"].tolist() == ["holds"]
    assert isotropic_excess(planted)[1] == pytest.approx(0.1 - isotropic_cosine_quantile(10_000))


@pytest.mark.parametrize(
    ("cosines", "some", "most"),
    [
        ((0.1, 0.1, 0.1), "does not hold", "does not hold"),
        ((0.1, 0.2, 0.1), "holds", "does not hold"),
        ((0.2, 0.1, 0.2), "holds", "holds"),
        # Half of the layers are not most.
        ((0.1, 0.2, 0.2, 0.1), "holds", "does not hold"),
    ],
)
def test_one_layer_or_more_than_half_of_them_are_anisotropic(cosines, some, most):
    comparison = Comparison({("m", None): measured(*cosines)})
    found = on_page("text", "def upper_half", "statistics = {", comparison=comparison)
    assert found["godey-anisotropic-layer"] == some
    assert found["godey-most-layers"] == most
    assert found["godey-decoder-extreme"] == "not applicable"


@pytest.mark.parametrize(("last", "expected"), [(0.81, "holds"), (0.79, "does not hold")])
def test_the_decoder_alone_decides_the_claim_on_decoders(last, expected):
    comparison = Comparison({("m", None): measured(0.95, 0.5, last, decoder=2)})
    found = on_page("text", "def upper_half", "statistics = {", comparison=comparison)
    assert found["godey-decoder-extreme"] == expected


def test_a_shipped_model_brings_its_verdicts():
    runs = {("real", None): measured(0.1, name="real"), ("mpnet-base", None): shipped("mpnet-base")}
    found = run_cells(
        "anisotropy/text", "def upper_half", "statistics = {", comparison=Comparison(runs)
    )["verdicts"]
    found = found[found["id"] == "godey-anisotropic-layer"]
    assert dict(zip(found["model"], found["verdict"], strict=True)) == {
        "real": "does not hold",
        "MPNet": "holds",
    }


def test_a_cone_is_made_by_training_where_less_than_half_of_it_is_there_before():
    runs = {
        ("made", None): measured(0.2, 0.6, 0.3, name="made"),
        **{("made", i): measured(0.9, 0.2 + i / 100, 0.9, name="made") for i in range(5)},
        ("born", None): measured(0.5, 0.4, name="born"),
        **{("born", i): measured(0.3, 0.9, name="born") for i in range(5)},
        ("flat", None): measured(0.1, name="flat"),
        **{("flat", i): measured(0.1, name="flat") for i in range(5)},
    }
    shown = []
    cosine = Comparison(runs).by_weights("anisotropy", "cosine")
    cosine["isotropic"] = cosine["width"].map(isotropic_cosine_quantile)
    names = {
        "cosine": cosine,
        "display": shown.append,
        "Finding": lambda text, **_: text,
    }
    names["limit"] = 40
    found = run_cells("anisotropy/text", "peaks = ", "text += ", **names)["peaks"].set_index(
        "model"
    )
    assert found["cone"].dropna().to_dict() == {"made": "by training", "born": "before it"}
    assert found.loc["made", ["layer", "trained", "untrained"]].tolist() == pytest.approx(
        [1, 0.6, 0.22]
    )
    assert shown[-1] == (
        "Tokens reach a mean cosine of **0.60** in made. made acquired a cone in training. "
        "born had one before."
    )


def test_models_of_bytes_are_set_against_the_mean_peak_of_the_others():
    peaks = {"low": 0.2, "high": 0.6, "bytes": 0.45, "canine": 0.35}
    runs = Comparison(
        {(name, None): measured(0.0, peak, name=name) for name, peak in peaks.items()}
    )
    names = {
        "comparison": runs,
        "text_models": ["low", "high"],
        "character_models": ["bytes", "canine"],
    }
    found = run_cells(
        "anisotropy/characters", "def higher", "rows, cone", display=lambda _: None, **names
    )["rows"]
    found = pd.DataFrame(found).set_index(["id", "model"])
    assert found.loc["godey-anisotropic-layer", "verdict"].tolist() == ["holds", "holds"]
    assert found.loc["godey-bytes-higher", "verdict"].to_dict() == {
        "bytes": "holds",
        "canine": "does not hold",
    }
    np.testing.assert_allclose(found.loc["godey-bytes-higher", "value"], [0.05, -0.05])


def of_type(model_type: str):
    return lambda _: SimpleNamespace(
        model=SimpleNamespace(config=SimpleNamespace(model_type=model_type))
    )


def heard_and_seen(*cosines: float, speech: bool, model_type: str = "vit") -> pd.Series:
    names = {
        "speech_models": ["m"] * speech,
        "image_models": ["m"] * (not speech),
        "load_model": of_type(model_type),
    }
    comparison = Comparison({("m", None): measured(*cosines)})
    return on_page("speech-and-vision", "low = {", "statistics |= ", comparison=comparison, **names)


@pytest.mark.parametrize(("least", "expected"), [(0.21, "holds"), (0.19, "does not hold")])
def test_every_layer_decides_the_claim_on_speech(least, expected):
    found = heard_and_seen(0.9, least, 0.5, speech=True)
    assert found.to_dict() == {"godey-anisotropic-layer": "holds", "godey-speech-cosine": expected}


@pytest.mark.parametrize(
    ("highest", "low", "isotropic"),
    [
        (0.16, "holds", "holds"),
        (0.19, "holds", "does not hold"),
        (0.21, "does not hold", "does not hold"),
    ],
)
def test_every_layer_decides_the_claims_on_vision(highest, low, isotropic):
    found = heard_and_seen(0.1, highest, 0.15, speech=False)
    assert found[["godey-vision-low", "godey-vision-isotropic"]].tolist() == [low, isotropic]


def test_claims_on_vit_and_mit_do_not_apply_to_others():
    found = heard_and_seen(0.1, 0.5, speech=False, model_type="dinov2")
    assert found[["godey-vision-low", "godey-vision-isotropic"]].tolist() == ["not applicable"] * 2
    assert found["godey-anisotropic-layer"] == "holds"


def of_network(
    *cosines: float, norms: int = 0, removed: float = 0.1, centred: float = 0.1
) -> pd.DataFrame:
    flat = Comparison({("m", None): measured(*cosines)})
    apart = measured(0.0)
    apart._parts["centred"] = hidden(0.0, centred)
    number = Estimate(removed, removed - 0.01, removed + 0.01) if norms else Estimate(np.nan)
    around = pd.DataFrame({"norm": range(norms)}), number
    names = {"conv_models": ["m"], "runs": {"maps flattened": flat}, "flattened": flat}
    names |= {"apart": {"m": apart}, "around": {"m": around}}
    cells = ("def loose", "def network", "verdicts = pd.concat")
    return on_page("convolution", *cells, **names)


@pytest.mark.parametrize(
    ("cosines", "strict", "loose", "blocks"),
    [
        ((0.0, 0.1), "holds", "holds", "holds"),
        ((0.0, 0.18), "does not hold", "holds", "holds"),
        ((0.3, 0.1), "does not hold", "does not hold", "holds"),
        ((0.0, 0.3), "does not hold", "does not hold", "does not hold"),
    ],
)
def test_convolutions_are_isotropic_strictly_or_loosely_or_in_their_blocks(
    cosines, strict, loose, blocks
):
    found = of_network(*cosines)
    names = [f"godey-convolution-{reading}" for reading in ("strict", "loose", "blocks")]
    assert found[names].tolist() == [strict, loose, blocks]
    assert found["godey-without-batch-norm"] == loose


@pytest.mark.parametrize(
    ("cosines", "expected"),
    [((0.6, 0.4, 0.5, 0.1), "holds"), ((0.1, 0.5, 0.4, 0.6), "does not hold")],
)
def test_depth_and_cosine_are_compared_by_rank(cosines, expected):
    assert of_network(*cosines)["godey-convolution-deeper"] == expected


@pytest.mark.parametrize(("removed", "expected"), [(0.05, "holds"), (-0.05, "does not hold")])
def test_networks_speak_for_those_with_batch_normalisation_or_for_those_without(removed, expected):
    with_it, without = of_network(0.0, 0.1, norms=2, removed=removed), of_network(0.0, 0.1)
    assert with_it["godey-batch-norm"] == expected
    assert with_it["godey-without-batch-norm"] == "not applicable"
    assert without["godey-batch-norm"] == "not applicable"


@pytest.mark.parametrize(("left", "expected"), [(0.1, "holds"), (0.3, "does not hold")])
def test_a_network_is_judged_without_the_mean_map_too(left, expected):
    found = of_network(0.0, 0.9, centred=left)
    assert found["godey-convolution-centred"] == expected
    assert found["godey-convolution-loose"] == "does not hold"


def test_cosines_around_batch_normalisations_are_those_of_all_pairs_of_positions(
    tiny_folder, tmp_path
):
    draws = np.random.default_rng(0).integers(0, 256, (4, 24, 24, 3), dtype=np.uint8)
    for i, pixels in enumerate(draws):
        Image.fromarray(pixels).save(tmp_path / f"{i}.png")
    model, images = load_model(str(tiny_folder("resnet-basic"))), load_corpus(str(tmp_path))
    norm = next(
        module for module in model.model.modules() if isinstance(module, torch.nn.BatchNorm2d)
    )
    maps = []
    hook = norm.register_forward_hook(lambda _, given, output: maps.append((given[0], output)))
    with torch.no_grad():
        for image in images.items:
            model.model(**model.processor(images=image.load().convert("RGB"), return_tensors="pt"))
    hook.remove()
    table, removed = around_batch_norm(model, images)
    for side, name in enumerate(("before", "after")):
        vectors = torch.cat([pair[side][0].flatten(1).T for pair in maps]).double()
        pairs = cosine_similarity(vectors)[~np.eye(len(vectors), dtype=bool)]
        assert table[name].iloc[0] == pytest.approx(pairs.mean(), abs=1e-5)
    assert removed.value == pytest.approx((table["before"] / 2 - table["after"]).mean())
    assert removed.draws == len(images)


def test_a_network_without_batch_normalisation_has_no_number(tiny_folder, tmp_path):
    Image.fromarray(np.zeros((24, 24, 3), np.uint8)).save(tmp_path / "a.png")
    table, removed = around_batch_norm(
        load_model(str(tiny_folder("vit"))), load_corpus(str(tmp_path))
    )
    assert table.empty
    assert np.isnan(removed.value)
