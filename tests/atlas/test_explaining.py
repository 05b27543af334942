"""``analysis-lib explain``: the card of a model at hand."""

import pytest
import tiny
import torch
import transformers

from analysis_book.atlas.cards import BY_NAME, values_of
from analysis_book.atlas.explaining import explain
from analysis_lib import AnalysisError
from analysis_lib.cli import main


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("gpt2")
    tiny.save(path, "gpt2")
    return path


def test_a_folder_is_explained_by_a_probe_of_its_own_model(folder, capsys):
    assert main(["explain", str(folder)]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{folder}: GPT2Model (gpt2) in transformers {transformers.__version__}")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "hidden_states[-1] output of the last block ≠ after the final norm" in lines
    assert "number of hidden states blocks + 1 blocks + 1" in lines
    assert 'attn_implementation="eager"' in out


def test_an_object_is_explained_as_its_folder_is_and_does_not_change(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    hooks = sum(len(module._forward_hooks) for module in model.modules())
    card = explain(model)
    assert model.dtype == torch.bfloat16
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert sum(len(module._forward_hooks) for module in model.modules()) == hooks
    wanted = explain(folder)
    for name in BY_NAME.keys() - {"dtype"}:
        assert card.row[name] == wanted.row[name]


def test_the_lines_of_a_card_run_and_give_the_output_of_the_last_block(folder):
    card = explain(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    known = {"inputs": tokenizer("A girl is styling her hair.", return_tensors="pt")}
    with torch.no_grad():
        exec(card.code["With transformers alone"], known)
    output, (kept,) = known["output"], known["kept"]
    kept = kept if isinstance(kept, torch.Tensor) else kept[0]
    normed = known["model"].ln_f(kept)
    torch.testing.assert_close(normed, output.hidden_states[-1])
    assert len(output.attentions) == len(known["model"].h)


@pytest.mark.parametrize("given", ["no/such/model", "minilm@part=encoder", ""])
def test_what_cannot_be_explained_is_one_line(given, capsys):
    assert main(["explain", given]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1


def test_what_is_no_model_is_refused():
    for given in (torch.nn.Linear(2, 2), 3):
        with pytest.raises(AnalysisError, match="give"):
            explain(given)


def test_what_a_cell_says_of_several_stacks_and_layers_is_told_apart():
    cell = "encoder: weights (1), state (2); decoder: weights"
    assert values_of(cell) == ["weights", "state"]
    assert BY_NAME["attention_kind"].surprises(cell)
    assert not BY_NAME["attention_kind"].surprises("encoder: weights; decoder: weights")
    assert not BY_NAME["scale"].surprises("not seen: it computes attention by itself")
    assert BY_NAME["row_sums"].surprises("1 to 2")
