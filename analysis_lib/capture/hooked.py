"""Attention that does not call transformers' interface, reached by hooks: DeBERTa, MPNet, CANINE and CvT.

Hooks on the projections see queries, keys and values; a hook on the dropout of the attention weights sees the weights.
What these models add to q·k is in ``deberta.py`` and :func:`_position_terms`; CANINE's windows are in ``windows.py``.
"""

from functools import partial

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from analysis_lib.capture.activations import SCORES, WEIGHTS
from analysis_lib.capture.current_layer import CurrentLayer
from analysis_lib.capture.deberta import disentangled_terms
from analysis_lib.capture.projections import ProjectionHooks, projected_by_head, score_sums
from analysis_lib.capture.tokens import Tokens
from analysis_lib.capture.windows import Window, joined, rows_of_windows, visibility_of_windows
from analysis_lib.models import TOKEN_TYPES
from analysis_lib.models.parts import Attention


class HookedAttention:
    """Captures the attention of modules that do not call the interface."""

    def __init__(self, layer: CurrentLayer, projections: ProjectionHooks):
        self.layer = layer
        self.projections = projections
        self.windows: list[Window] = []

    def attach(self, module: nn.Module, spec: Attention) -> RemovableHandle:
        """Attach the hook on the attention weights of a module; the caller removes the handle."""
        return module.get_submodule(spec.weights).register_forward_pre_hook(partial(self._capture, module, spec))

    def _capture(self, module: nn.Module, spec: Attention, _dropout: nn.Module, args: tuple) -> None:
        """Called with the weights on their way into dropout; the hooks on projections have seen the rest by then."""
        layer, call = self.layer, self.projections.call
        heads = getattr(module, spec.heads)
        query, key, value = projected_by_head(module, spec, call.projected, heads)
        self.windows.append(Window(query, key, value, call.key_input, args[0].view(*query.shape[:3], -1)))
        tokens = layer.activations.tokens
        if sum(window.query.shape[2] for window in self.windows) < tokens.mask.shape[1]:
            return  # CANINE's local attention has more windows to come.
        windows, self.windows = self.windows, []
        query, key, value, key_input = joined(windows)
        visibility = visibility_of_windows(windows, tokens, self._key_tokens(query.shape[2], key.shape[2]))
        layer.take(query, key, value, key_input, visibility.keys)
        if SCORES in layer.needs:
            position, position_query = _position_terms(module, call.arguments, query, tokens)
            inputs = layer.vectors(key_input, visibility.keys)
            layer.activations.scores = score_sums(
                module, spec, call, query, heads, inputs, visibility, position, position_query
            )
        if WEIGHTS in layer.needs:
            layer.activations.rows = rows_of_windows(windows, visibility)

    def _key_tokens(self, queries: int, keys: int) -> Tokens:
        """CvT reduces the map that keys are projected from: its keys are fewer than its queries."""
        tokens = self.layer.activations.tokens
        if queries == keys:
            return tokens
        return self.layer.unpadded(keys, int((tokens.types[0] == TOKEN_TYPES.index("cls")).sum()))


def _position_terms(
    module: nn.Module, arguments: dict[str, object], query: Tensor, tokens: Tokens
) -> tuple[Tensor | None, Tensor | None]:
    """``position`` and ``position_query`` of :class:`ScoreSums`, before scaling."""
    if arguments.get("position_bias") is not None:
        # MPNet adds its bias after scaling by 1/√head_dim.
        return arguments["position_bias"] * query.shape[-1] ** 0.5, None
    if arguments.get("rel_embeddings") is not None:
        return disentangled_terms(module, arguments, query, tokens)
    return None, None
