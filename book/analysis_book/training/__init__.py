"""Models trained here: small ones, pretraining with checkpoints, and text classifiers."""

from typing import TYPE_CHECKING

from analysis_lib.lazy import lazily

if TYPE_CHECKING:
    from analysis_book.training.callback import GeometryCallback
    from analysis_book.training.dynamics import load_runs
    from analysis_book.training.pretraining import Pretraining, pretrain
    from analysis_book.training.recipes import held_out_scores
    from analysis_book.training.runs import checkpoints, run_identity
    from analysis_book.training.text_classifiers import accuracy, finetune, predict, self_attention

__getattr__, __dir__ = lazily(__name__)
