"""The self-attention classifier: the equations of its block, and the entropy in its loss."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from analysis_lib.models.architectures import (
    SelfAttentionConfig,
    SelfAttentionForSequenceClassification,
)
from analysis_lib.models.architectures.self_attention import mean_normalised_entropy


def test_the_block_is_equations_1_and_2_residual_and_norm():
    torch.manual_seed(0)
    config = SelfAttentionConfig(
        vocab_size=11, hidden_size=6, initializer_range=0.7, embedding_std=1.0, num_labels=2
    )
    model = SelfAttentionForSequenceClassification(config).double().eval()
    block = model.encoder.layers[0]
    torch.nn.init.normal_(block.attention.key.bias)
    ids = [3, 7, 7, 2]
    x = model.encoder.word_embeddings.weight.detach().numpy()[ids]
    q, k, v = (
        x @ part.weight.detach().numpy().T + part.bias.detach().numpy()
        for part in (block.attention.query, block.attention.key, block.attention.value)
    )
    y = np.zeros_like(x)
    for i in range(4):
        scores = np.array([math.exp(q[i] @ k[j] / math.sqrt(6)) for j in range(4)])
        y[i] = sum(scores[j] / scores.sum() * v[j] for j in range(4))
    total = x + y
    normed = (total - total.mean(1, keepdims=True)) / np.sqrt(total.var(1, keepdims=True) + 1e-12)
    logits = (
        normed[0] @ model.classifier.weight.detach().numpy().T
        + model.classifier.bias.detach().numpy()
    )
    # Padding after the text changes nothing.
    padded, mask = torch.tensor([[*ids, 0, 0]]), torch.tensor([[1, 1, 1, 1, 0, 0]])
    found = model(padded, mask)
    assert np.allclose(found.logits.detach().numpy(), logits, atol=1e-12)


def test_the_entropy_of_the_loss_is_scipys():
    torch.manual_seed(1)
    settings = {
        "vocab_size": 9,
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "initializer_range": 1.5,
        "num_labels": 2,
    }
    model = (
        SelfAttentionForSequenceClassification(SelfAttentionConfig(**settings, entropy_weight=0.3))
        .double()
        .eval()
    )
    ids, mask = (
        torch.tensor([[3, 4, 5, 6], [7, 3, 0, 0]]),
        torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]),
    )
    weights = [layer.detach().numpy() for layer in model.encoder(ids, mask).attentions]
    rows = [
        stats.entropy(layer[text, 0, query, :keys], base=keys)
        for layer in weights
        for text, keys in ((0, 4), (1, 2))
        for query in range(keys)
    ]
    found = model(ids, mask, torch.tensor([0, 1]))
    assert mean_normalised_entropy(torch.stack(found.attentions), mask).item() == pytest.approx(
        np.mean(rows), abs=1e-12
    )
    cross = torch.nn.functional.cross_entropy(found.logits, torch.tensor([0, 1]))
    assert found.loss.item() == pytest.approx(cross.item() + 0.3 * np.mean(rows), abs=1e-12)


def test_a_text_of_one_token_has_no_entropy():
    weights = torch.ones(1, 2, 1, 2, 2) / 2
    weights[0, 1, 0] = torch.tensor([[1.0, 0.0], [0.5, 0.5]])
    assert mean_normalised_entropy(weights, torch.tensor([[1, 1], [1, 0]])).item() == pytest.approx(
        1
    )


def test_padding_has_no_part_in_the_gradient_of_the_entropy():
    torch.manual_seed(4)
    settings = {"vocab_size": 9, "hidden_size": 6, "num_labels": 2, "entropy_weight": 0.7}
    model = SelfAttentionForSequenceClassification(SelfAttentionConfig(**settings)).double()
    texts, labels = [torch.tensor([2, 5, 6, 7, 3]), torch.tensor([2, 8, 3])], torch.tensor([0, 1])

    def gradients(batches):
        model.zero_grad()
        for ids, chosen in batches:
            padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
            mask = (padded > 0).long()
            output = model(padded, mask, torch.tensor(chosen))
            # Of the mean over rows, what belongs to these texts.
            rows = sum(map(len, ids)) / sum(map(len, texts))
            entropy = mean_normalised_entropy(torch.stack(output.attentions), mask)
            (0.7 * entropy * rows).backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    together = gradients([(texts, labels.tolist())])
    assert together.isfinite().all()
    assert together.abs().max() > 0
    alone = gradients([([texts[0]], [0]), ([texts[1]], [1])])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-12)
