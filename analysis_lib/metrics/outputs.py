"""Effects of an intervention on the output vectors of a model and on its predictions of tokens."""

from analysis_lib.capture import LOSS, MASKED, OUTPUT, Activations
from analysis_lib.metrics.accumulator import Columns, LayerSums, Metric


class _OfTokens(Metric):
    """Means over tokens of quantities that each token has."""

    counts = "tokens"
    on_request = True
    columns: tuple[str, ...]

    def update(self, activations: Activations) -> None:
        output = activations.output
        layer = activations.layer
        if output is None or output.masked != (MASKED in self.needs):
            return
        for name in self.columns:
            values = getattr(output, name).double() * output.counted[name]
            self.add((name, layer), values.sum(1), activations)
        counts = output.counted[self.columns[0]].sum(1).double()
        self.add(("tokens", layer), counts, activations)

    def rows(self, sums: LayerSums) -> Columns:
        tokens = sums["tokens"]
        means = {name: sums[name] / tokens for name in self.columns}
        return {**means, "tokens": tokens.astype(int)}


class OutputChange(_OfTokens):
    """Cosine of a model's output vectors with and without an intervention.

    Columns: layer (the last), cosine in [−1, 1] of the vector of a token to that without the
    intervention, mean over tokens, with its 95 % interval; and tokens. Without an intervention it
    is 1. Made on request, because the model runs twice.
    """

    name = "output_change"
    needs = frozenset({OUTPUT})
    interval = "cosine"
    limits = (-1, 1)
    columns = ("cosine",)


class NextTokenLoss(_OfTokens):
    """Loss of a causal language model at the next token, and how much interventions change it.

    Columns: layer (the last), loss, −ln p of the token that follows, in nats, mean over tokens that
    have one, with its 95 % interval; kl, the Kullback-Leibler divergence Σ p ln(p / p') of the
    prediction p' from the one without the intervention p, in nats, 0 without one; and tokens. Made
    on request, because it needs the model's head.
    """

    name = "next_token_loss"
    needs = frozenset({LOSS})
    interval = "loss"
    columns = ("loss", "kl")


class MaskedTokenLoss(_OfTokens):
    """Loss of a masked language model at tokens that it does not see.

    In a separate pass, 15 % of the tokens of each text are masked, at least one and no special
    ones; the choice depends on the text alone.

    Columns: layer (the last), loss, −ln p of the token that was masked, in nats, mean over these
    tokens, with its 95 % interval; kl, as in :class:`NextTokenLoss`; and tokens, the number of
    masked tokens. Made on request, because it needs the model's head.
    """

    name = "masked_token_loss"
    needs = frozenset({MASKED})
    interval = "loss"
    columns = ("loss", "kl")
