"""The residual stream of networks of maps is changed as by hooks on a plain model of transformers,
image by image.
"""

from collections.abc import Callable
from contextlib import ExitStack

import pytest
import tiny
import torch
from torch import Tensor, nn
from torch.nn import functional

from analysis_lib import AnalysisError, Corpus, LoadedModel, Replace, load_model, measure
from analysis_lib.capture import Activations, Reading, Settings, batches, run
from analysis_lib.measurement.interventions import changes_of
from analysis_lib.metrics.accumulator import GROUPS

NAMES = (
    "cvt",
    "resnet-basic",
    "resnet-basic-wide",
    "resnet-bottleneck",
    "convnext",
    "convnextv2",
    "efficientnet",
    "van",
)
# Of a CvT of three stages of 1, 2 and 3 blocks, the layers of the last have a class token first.
OF_CLASS = (4, 5, 6)
Visit = Callable[[int, Tensor], Tensor]


def blocks_of(model: nn.Module) -> list[nn.Module]:
    encoder = model.encoder
    return (
        [*encoder.blocks]
        if hasattr(encoder, "blocks")
        else [b for stage in encoder.stages for b in stage.layers]
    )


def ran(model: nn.Module, pixels: Tensor, visit: Visit) -> Tensor:
    """The output of a model of one image, in which ``visit`` is given every hidden state, by layer,
    and gives another.

    What it is given is channel x position, of a map, or token x channel transposed.
    """

    def visited(layer: int, hidden: Tensor) -> Tensor:
        if hidden.dim() == 3:
            return visit(layer, hidden[0].T).T[None]
        return visit(layer, hidden[0].flatten(1)).view(hidden.shape)

    with torch.no_grad(), ExitStack() as handles:
        blocks = blocks_of(model)
        hooks = [
            blocks[0].register_forward_pre_hook(lambda _, args: (visited(0, args[0]), *args[1:]))
        ]
        for layer, block in enumerate(blocks, 1):
            hooks.append(
                block.register_forward_hook(lambda _m, _a, out, layer=layer: visited(layer, out))
            )
        for hook in hooks:
            handles.callback(hook.remove)
        return model(pixels).last_hidden_state


def by_hand(
    model: nn.Module, images: list[Tensor], replace: Replace
) -> list[tuple[dict[int, Tensor], tuple]]:
    """Of each image, the hidden states by layer, channel x position; and the output without the
    change and with it.
    """
    seen: dict[int, list[Tensor]] = {}

    def see(layer: int, hidden: Tensor) -> Tensor:
        seen.setdefault(layer, []).append(hidden)
        return hidden

    before, expected = [ran(model, pixels, see) for pixels in images], []
    means = {layer: torch.cat(states, 1).mean(1) for layer, states in seen.items()}
    for pixels, plain in zip(images, before, strict=True):
        found = {}

        def change(layer: int, hidden: Tensor, found: dict = found) -> Tensor:
            hidden = found[layer] = hidden.clone()
            # A sequence has its class token first.
            places = (
                range(hidden.shape[1])
                if replace.tokens is None
                else [0]
                if layer in OF_CLASS
                else []
            )
            for channel in range(len(hidden)) if replace.dimensions is None else replace.dimensions:
                for place in places if replace.layers is None or layer in replace.layers else ():
                    mean = means[layer][channel]
                    new = {"zero": 0, "mean": mean, "centre": hidden[channel, place] - mean}[
                        replace.by
                    ]
                    hidden[channel, place] = new
            return hidden

        expected.append((found, (plain, ran(model, pixels, change))))
    return expected


@pytest.fixture(scope="module", params=NAMES)
def plain(request) -> tuple[nn.Module, LoadedModel, Corpus, list[Tensor]]:
    """A model; the same, loaded; and a few images, as a corpus and as the model reads them."""
    model, processor = tiny.build(request.param.removesuffix("-wide"))
    if request.param.endswith("-wide"):
        # A block that reads 64 positions gives 64 channels.
        model.config.hidden_sizes = [8, 64]
        torch.manual_seed(0)
        model = type(model)(model.config)
    model, items = model.double().eval(), tiny.corpus("resnet-basic").items[:3]
    images = [
        processor(item.load().convert("RGB"), return_tensors="pt")["pixel_values"].double()
        for item in items
    ]
    return (
        model,
        load_model(model, processor=processor),
        Corpus(request.param, items, kind="image"),
        images,
    )


def captured(loaded: LoadedModel, corpus: Corpus, intervention: object) -> dict[int, list[Tensor]]:
    """Of each layer and image, the vectors at its positions."""
    settings, found = Settings(intervention=intervention, maps="positions"), {}
    changes, groups = changes_of(loaded, corpus, settings), corpus.groups(GROUPS)

    def receive(activations: Activations) -> None:
        found.setdefault(activations.layer, []).extend(activations.spaces["hidden"].values[:, 0])

    for batch in batches(loaded, corpus.items, groups, settings, Reading()):
        run(loaded, batch, frozenset({"hidden"}), receive, "positions", changes)
    return found


@pytest.mark.parametrize("by", ["zero", "mean", "centre"])
@pytest.mark.parametrize("layers", [(0,), (1,), (3,), None])
def test_a_changed_map_is_that_of_hooks(plain, by, layers):
    model, loaded, corpus, images = plain
    for more in ({"dimensions": (0, 5)}, {}):
        # Taken away everywhere, there is nothing left to compare.
        if layers is None and not more:
            continue
        replace = Replace("residual", layers=layers, by=by, **more)
        assert_equal(loaded, corpus, by_hand(model, images, replace), replace)


@pytest.mark.parametrize("by", ["zero", "mean", "centre"])
def test_the_class_token_of_a_cvt_is_changed_alone(plain, by):
    model, loaded, corpus, images = plain
    if corpus.name != "cvt":
        with pytest.raises(AnalysisError, match="no token of type cls"):
            captured(loaded, corpus, Replace("residual", tokens=["cls"], by=by))
        return
    replace = Replace("residual", layers=(4,), tokens=["cls"], by=by)
    assert_equal(loaded, corpus, by_hand(model, images, replace), replace)
    before, after = captured(loaded, corpus, None), captured(loaded, corpus, replace)
    for layer in range(7):
        same = all(torch.equal(*pair) for pair in zip(before[layer], after[layer], strict=True))
        assert same == (layer < 5), layer


def assert_equal(loaded: LoadedModel, corpus: Corpus, expected: list, replace: Replace) -> None:
    found = captured(loaded, corpus, replace)
    for image, (states, _) in enumerate(expected):
        assert [*found] == [*states]
        for layer, hidden in states.items():
            class_tokens = layer in OF_CLASS and corpus.name == "cvt"
            ours = found[layer][image].double().T
            torch.testing.assert_close(
                ours, hidden[:, class_tokens:], rtol=1e-9, atol=1e-9, msg=str(replace)
            )
    cosines = [
        functional.cosine_similarity(after, before, dim=1).flatten()
        for _, (before, after) in expected
    ]
    table = measure(loaded, corpus, "output_change", intervention=replace, progress=False)[
        "output_change"
    ]
    assert table["cosine"].item() == pytest.approx(torch.cat(cosines).mean().item(), abs=1e-9)
    assert table["cosine"].item() < 1 - 1e-7


def test_nothing_that_is_changed_gives_the_same_bytes(plain):
    _, loaded, corpus, _ = plain
    asked = {"metrics": "anisotropy,mean_vector", "progress": False}
    before = measure(loaded, corpus, **asked)
    nothing = [
        Replace("residual", by="nothing"),
        Replace("residual", dimensions=()),
        Replace("residual", layers=()),
    ]
    for intervention in (*nothing, nothing):
        after = measure(loaded, corpus, intervention=intervention, **asked)
        assert all(table.equals(after[name]) for name, table in before.items())


@pytest.mark.parametrize("by", ["zero", "mean"])
@pytest.mark.parametrize(
    ("where", "path"), [("attention_input", ""), ("query_side", "projection_query")]
)
@pytest.mark.parametrize("plain", ["cvt"], indirect=True)
def test_what_the_attention_of_a_cvt_reads_is_changed(plain, where, path, by):
    model, loaded, corpus, images = plain
    module, seen = blocks_of(model)[2].attention.attention.get_submodule(path), []
    handle = module.register_forward_pre_hook(lambda _, args: seen.append(args[0][0]))
    before = [ran(model, pixels, lambda _, hidden: hidden) for pixels in images]
    handle.remove()
    new = torch.cat(seen).mean(0) * (by == "mean")
    cut = torch.arange(len(new)) < 3
    handle = module.register_forward_pre_hook(
        lambda _, args: (torch.where(cut, new, args[0]), *args[1:])
    )
    after = [ran(model, pixels, lambda _, hidden: hidden) for pixels in images]
    handle.remove()
    replace = Replace(where, layers=3, dimensions=range(3), by=by)
    found = measure(loaded, corpus, "output_change", intervention=replace, progress=False)[
        "output_change"
    ]
    cosines = torch.cat(
        [
            functional.cosine_similarity(*pair, dim=1).flatten()
            for pair in zip(before, after, strict=True)
        ]
    )
    assert found["cosine"].item() == pytest.approx(cosines.mean().item(), abs=1e-9)
    assert found["cosine"].item() < 1 - 1e-7
