"""Items become batches."""

import itertools

from passes import batch_of

from analysis_lib import load_model
from analysis_lib.capture.batching import make_batches
from analysis_lib.models.tokenization import Encoded


def test_batches_hold_every_utterance_once_within_the_budget(tiny_folder):
    loaded = load_model(str(tiny_folder("bert")))
    lengths = [3, 9, 4, 4, 30, 12, 2, 5, 5]
    ids = [[7 + i] * length for i, length in enumerate(lengths)]
    texts = [Encoded({"input_ids": row}, [False] * len(row)) for row in ids]
    groups = list(range(len(ids)))
    for budget, padding in itertools.product((1, 10, 24, 10**6), (0, 3, 10**6)):
        batches = make_batches(loaded, texts, groups, True, budget, padding)
        found = {}
        for batch in batches:
            assert batch.tokens.mask.numel() <= budget or len(batch.tokens.mask) == 1
            assert (~batch.tokens.mask).sum() <= padding
            for row, real, group in zip(
                batch.inputs["input_ids"], batch.tokens.mask, batch.groups, strict=True
            ):
                found[int(group)] = row[real].tolist()
                assert (row[~real] == loaded.tokenizer.pad_token_id).all()
        assert found == dict(enumerate(ids))
    assert len([*make_batches(loaded, texts, groups, True, 10**6, 10**6)]) == 1
    assert len([*make_batches(loaded, texts, groups, True, 10**6, 0)]) == len({*lengths})
    assert len([*make_batches(loaded, texts, groups, True, 1)]) == len(ids)
    # By length 2, 3, 4, 4, 5, 5, 9, 12, 30: 7 places are padded up to 5, 30 up to 9, and 18 more
    # for 30 than for 12.
    batches = make_batches(loaded, texts, groups, True, 10**6, 7)
    assert [batch.tokens.mask.sum(1).sort().values.tolist() for batch in batches] == [
        [2, 3, 4, 4, 5, 5],
        [9, 12],
        [30],
    ]


def test_special_tokens_count_or_not(tiny_folder):
    loaded = load_model(str(tiny_folder("bert")))
    batch = batch_of(loaded, ("Hi", "Attention, attention!"), special_tokens=True)
    assert batch.tokens.counts.tolist() == batch.tokens.mask.sum(1).tolist() == [3, 6]
    batch = batch_of(loaded, ("Hi", "Attention, attention!"), special_tokens=False)
    assert batch.tokens.counts.tolist() == [1, 4]
    assert batch.tokens.mask.sum(1).tolist() == [3, 6]
    assert batch.tokens.type_masks.sum(-1).tolist() == [
        [1, 1, 0, 0, 0, 0, 1],
        [1, 1, 0, 0, 0, 1, 3],
    ]
