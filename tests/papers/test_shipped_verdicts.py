"""What ships was made by today's code: no page has to say that it was not."""

import pytest

from analysis_book.papers.fosse import trials
from analysis_book.training.dynamics import DESCRIPTION, load_runs
from analysis_lib.measurement import shipped, shipping


@pytest.mark.parametrize("run", sorted(shipping.descriptions(DESCRIPTION)))
def test_a_run_of_training_is_shown_as_today_s_code_gives_it(run):
    (measured,) = load_runs([run]).values()
    assert measured.code_warning == ""


@pytest.mark.parametrize(
    "name", sorted(p.parent.name for p in shipping.home().glob("*/verdicts.csv"))
)
def test_a_model_is_shown_as_today_s_code_gives_it(name):
    assert shipped(name).code_warning == ""


def test_classifiers_are_shown_as_today_s_code_gives_them():
    assert trials.code_warning() == ""
