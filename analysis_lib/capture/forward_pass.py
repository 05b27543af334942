"""One forward pass of a model, with hooks on its blocks.

The activations of a layer are passed on when its block is done, and not kept.
"""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from analysis_lib.capture.activations import (
    CROSS,
    EMBEDDINGS,
    FURTHER,
    LOSS,
    MASKED,
    OF_ATTENTION,
    OUTPUT,
    Activations,
    CurrentLayer,
    Receive,
)
from analysis_lib.capture.hooked import HookedAttention
from analysis_lib.capture.inputs import Batch
from analysis_lib.capture.interface import IMPLEMENTATION, InterfaceAttention, attended_by
from analysis_lib.capture.interventions import Changes
from analysis_lib.capture.outputs import Output, ask, compared, head_of, masking, predicted
from analysis_lib.capture.projections import ProjectionHooks
from analysis_lib.capture.stack_tokens import class_tokens, map_vectors, stack_tokens, token_count
from analysis_lib.capture.tokens import Tokens
from analysis_lib.capture.vectors import Vectors, wide
from analysis_lib.errors import AnalysisError
from analysis_lib.models import LoadedModel
from analysis_lib.models.calls import call_with_first, first_of_call, first_vectors, with_first
from analysis_lib.models.devices import without_gradients
from analysis_lib.models.factors import AttentionSeen
from analysis_lib.models.pairs import MEDIA
from analysis_lib.models.parts import Attention, Stack
from analysis_lib.models.probe import attention_restored


class NotCaptured(AnalysisError):
    """A block whose attention is not computed as in the probe, such as windows of a long text."""


def captured_pass(
    loaded: LoadedModel,
    batch: Batch,
    needs: frozenset[str],
    receive: Receive,
    maps: str = "flatten",
    changes: Changes | None = None,
) -> Tensor:
    """One forward pass; the arguments are those of :func:`checked_pass.run`, without its check.

    Returns:
        The output of the model, utterance x token x width or image x channel x height x width.

    Raises:
        NotCaptured: the attention of a block was not captured.
    """
    blocks = _Blocks(loaded, CurrentLayer(batch, needs, changes), receive, maps)
    comparing = needs & {OUTPUT, LOSS}
    with without_gradients(loaded.outer):
        head = head_of(loaded, batch, "next") if LOSS in needs else None
        plain = ask(loaded, batch, head) if changes and comparing else None
        with _capturing(loaded, blocks):
            given = ask(loaded, batch, head)
            output = given.output
            blocks.finish(output)
        if comparing:
            plain = plain or given
            last = blocks.layer.activations
            ids = batch.inputs.get("input_ids")
            count = last.tokens.mask.shape[1]
            vectors = [_by_token(given_out(part.output), count) for part in (given, plain)]
            tokens = blocks.layer.tokens_of(vectors[0].shape[1]).on(vectors[0].device)
            output_change = compared(given, plain, vectors, ids, tokens)
            receive(Activations(last.layer, last.stack, "", last.tokens, output=output_change))
        if EMBEDDINGS in needs:
            last = blocks.layer.activations
            # One vector for an item, which may have several sequences in the last stack.
            tokens = blocks.layer.unpadded(1)
            pair = tuple(wide(output[name]) for name in loaded.layout.embeddings)
            receive(Activations(last.layer, last.stack, "", tokens, embeddings=pair))
        if MASKED in needs:
            last = blocks.layer.activations
            predictions = _of_masked(loaded, batch, maps, changes)
            receive(Activations(last.layer, last.stack, "", last.tokens, output=predictions))
    if blocks.missed and (changes or needs & OF_ATTENTION):
        count = sum(1 for _ in loaded.attending)
        raise NotCaptured(
            f"{loaded.name}: attention was captured in {count - len({*blocks.missed})} of {count} "
            f"layers, and not in {blocks.missed[0]}, which computes it in another way for these "
            "items than for an example of a few tokens"
        )
    return given_out(output)


def _of_masked(loaded: LoadedModel, batch: Batch, maps: str, changes: Changes | None) -> Output:
    """The predictions of masked tokens by a masked language model, in a separate pass."""
    hidden, which = masking(loaded, batch)
    head = head_of(loaded, hidden, "masked")
    plain = given = ask(loaded, hidden, head)
    if changes:
        blocks = _Blocks(loaded, CurrentLayer(hidden, frozenset(), changes), lambda _: None, maps)
        with _capturing(loaded, blocks):
            given = ask(loaded, hidden, head)
    ids = batch.inputs["input_ids"]
    return predicted(given, plain, ids, which, batch.tokens.on(ids.device))


def given_out(output: ModelOutput) -> Tensor:
    """The last hidden vectors of a model's output.

    For a backbone they are its last feature map; without hidden vectors, the first output.
    """
    if isinstance(output, ModelOutput):
        if output.get("last_hidden_state") is not None:
            return output.last_hidden_state
        if output.get("feature_maps") is not None:
            return output.feature_maps[-1]
    # Such as logits, or one vector per text.
    return first_vectors(output)


def _by_token(output: Tensor, count: int) -> Tensor:
    """The output as utterance x token x width.

    Positions of a feature map (as of SegFormer) or of a grid become tokens.
    """
    if output.dim() == 4 and output[0, :, :, 0].numel() == count != output[0, 0].numel():
        return output.flatten(1, 2)
    return map_vectors(output, (), "positions") if output.dim() == 4 else output


@contextmanager
def _capturing(loaded: LoadedModel, blocks: "_Blocks") -> Iterator[None]:
    """A context in which the model runs with all hooks and our attention function.

    On leaving it, the model is as it was.
    """
    specs = [spec for _, spec in loaded.attending]
    parts = _parts_on_interface(loaded)
    handles = []
    with attention_restored(loaded.model) as implementations:
        eager = {id(config) for config, name in implementations if name == "eager"}
        try:
            handles.extend(blocks.attach())
            for part in parts:
                part.set_attn_implementation(IMPLEMENTATION)
            computed = blocks.seen if any(spec.own for spec in specs) else nullcontext()
            with attended_by(blocks.interface.own, blocks.interface.attend, eager), computed:
                yield
        finally:
            for handle in handles:
                handle.remove()


def _parts_on_interface(loaded: LoadedModel) -> list[PreTrainedModel]:
    """The models whose attention calls transformers' interface: all of it, or some of its parts.

    Modules that compute attention by themselves keep their implementation; they may read another
    mask for our function.
    """
    by_part: dict[PreTrainedModel, set[bool]] = {}
    for block, spec in loaded.attending:
        part = loaded.model
        path = loaded.paths[block]
        for module, above in loaded.paths.items():
            # The innermost comes last.
            if isinstance(module, PreTrainedModel) and path.startswith(f"{above}."):
                part = module
        by_part.setdefault(part, set()).add(not spec.hooked and not spec.own)
    on_interface = [part for part, calls in by_part.items() if True in calls]
    if len(on_interface) < len(by_part):
        return on_interface
    return [loaded.model] if on_interface else []


class _Blocks:
    """Hooks on the blocks: they number the layers and pass each layer's activations to ``receive``.

    Attributes:
        missed: the blocks whose attention was not captured.
    """

    def __init__(self, loaded: LoadedModel, layer: CurrentLayer, receive: Receive, maps: str):
        self.loaded = loaded
        self.receive = receive
        self.maps = maps
        self.missed: list[str] = []
        self.layer = layer
        self.projections = ProjectionHooks(layer)
        self.interface = InterfaceAttention(self.layer, self.projections, receive)
        self.hooked = HookedAttention(self.layer, self.projections)
        self.seen = AttentionSeen(len(layer.batch.groups))
        self._count = 0
        self._tokens: dict[tuple[str, int, int], Tokens] = {}
        # Paths of the blocks that have attention.
        self._attending: set[str] = set()
        # First blocks whose output another module changes before the second block.
        self._amended: set[nn.Module] = set()
        # The latest layer of each stack, and its output.
        self._latest: dict[str, tuple[Activations, Tensor]] = {}
        # The tokens of that output, where long vectors do not count.
        self._short: dict[str, Tokens] = {}

    def attach(self) -> Iterator[RemovableHandle]:
        """Attach all hooks; the caller removes the handles."""
        names = self.loaded.paths
        numbers = itertools.count(sum(1 + len(blocks) for blocks in self.loaded.stacks.values()))
        for stack, blocks in self.loaded.stacks.items():
            beside = [(CROSS, stack.cross)] if stack.cross else []
            beside += zip(FURTHER, stack.further, strict=False)
            for name, spec in beside:
                for block in blocks:
                    module = block.get_submodule(spec.module)
                    yield from self.projections.attach(module, spec, changing=False)
                    yield from self._attend(module, spec)
                    self.interface.beside[module] = next(numbers), name
            for index, block in enumerate(blocks):
                spec = stack.attention_of(index)
                # Before each block, not only the first: blocks that share weights run in any order.
                yield block.register_forward_pre_hook(
                    partial(self._before, stack, names[block]), with_kwargs=True
                )
                yield block.register_forward_hook(partial(self._after, stack), with_kwargs=True)
                if spec is not None:
                    self._attending.add(names[block])
                    module = block.get_submodule(spec.module)
                    # Nothing can be changed inside blocks that read token x utterance x width.
                    yield from self.projections.attach(
                        module, spec, changing=not stack.tokens_first
                    )
                    yield from self._attend(module, spec)
            for module, name in names.items():
                if name == stack.amended:
                    self._amended.add(blocks[0])
                    yield module.register_forward_hook(
                        partial(self._after, stack), with_kwargs=True
                    )

    def _attend(self, module: nn.Module, spec: Attention) -> Iterator[RemovableHandle]:
        """Attach the hooks that capture the attention of a module."""
        if spec.hooked:
            yield self.hooked.attach(module, spec)
            return
        self.interface.own[module] = spec
        if spec.own:
            yield from self.interface.attach(module, self.seen)

    def _before(
        self, stack: Stack, name: str, _block: nn.Module, args: tuple, kwargs: dict
    ) -> tuple[tuple, dict] | None:
        given = first_of_call(args, kwargs)
        changed = None
        hidden = self._of_tokens(stack, given)
        if self.layer.activations is None or self.layer.activations.stack != stack.name:
            self._begin(stack, "", hidden, args)
            if ("residual", self.layer.activations.layer) in self.layer.changes:
                hidden = self._changed(stack, hidden, args)
                changed = call_with_first(args, kwargs, self._as_given(stack, hidden, given))
            self._hand_on(stack, hidden, args)
        self._begin(stack, name, hidden, args)
        return changed

    def _after(
        self,
        stack: Stack,
        module: nn.Module,
        args: tuple,
        _kwargs: dict,
        output: Tensor | tuple | list,
    ) -> Tensor | tuple | list | None:
        if module in self._amended:
            return None
        given = first_vectors(output)
        hidden = self._of_tokens(stack, given)
        if ("residual", self.layer.activations.layer) not in self.layer.changes:
            self._hand_on(stack, hidden, args)
            return None
        hidden = self._changed(stack, hidden, args)
        self._hand_on(stack, hidden, args)
        return with_first(output, self._as_given(stack, hidden, given))

    def _of_tokens(self, stack: Stack, given: Tensor) -> Tensor:
        """The input or output of a block as utterance x token x width; a map is left as it is.

        A grid of tokens has its positions on two axes. Vectors that the model appends after all
        texts are left out.
        """
        if self.loaded.layout.maps:
            return given
        if given.dim() == 2:
            # The tokens of one image, without an axis of images.
            return given.unsqueeze(0)
        hidden = given.transpose(0, 1) if stack.tokens_first else given.flatten(1, -2)
        return (
            hidden[:, : self._stack_tokens(stack, hidden, ()).mask.shape[1]]
            if stack.padded
            else hidden
        )

    def _as_given(self, stack: Stack, hidden: Tensor, given: Tensor) -> Tensor:
        """The vectors of :meth:`_of_tokens`, changed, in the shape of the block's output."""
        if stack.padded:
            return torch.cat([hidden, given[:, hidden.shape[1] :]], 1)
        return hidden.transpose(0, 1) if stack.tokens_first else hidden.reshape(given.shape)

    def _changed(self, stack: Stack, hidden: Tensor, args: tuple) -> Tensor:
        """The residual stream after interventions.

        In a feature map, interventions apply to the vectors at its positions.
        """
        is_map = hidden.dim() == 4
        vectors = map_vectors(hidden, args, "positions") if is_map else hidden
        vectors = self.layer.changed("residual", vectors, self._vector_tokens(stack, hidden, args))
        return vectors.mT.reshape(hidden.shape) if is_map else vectors

    def _begin(self, stack: Stack, name: str, hidden: Tensor, args: tuple) -> None:
        tokens = self._stack_tokens(stack, hidden, args)
        short = self._short.get(stack.name)
        # A token's queries, keys and values count if the input of the layer does. A stage may merge
        # patches, so shapes can differ.
        if name and short is not None and short.mask.shape == tokens.mask.shape:
            tokens = short
        self.layer.activations = Activations(self._count, stack.name, name, tokens)
        self._count += 1

    def _stack_tokens(self, stack: Stack, hidden: Tensor, args: tuple) -> Tokens:
        if self.loaded.layout.maps:
            return self.layer.unpadded(token_count(hidden), ["cls"] * class_tokens(hidden, args))
        count = len(self.layer.batch.groups)
        sequences = 1
        if self.loaded.kind in MEDIA:
            # An image may be cut into crops.
            sequences = len(hidden) // count
        if len(hidden) != sequences * count:
            raise AnalysisError(
                f"{self.loaded.name} makes {len(hidden)} sequences of {count} {self.loaded.kind}s: "
                "give tokens_per_batch=1, so that it reads each alone"
            )
        key = (stack.name, sequences, hidden.shape[1])
        if key not in self._tokens:
            self._tokens[key] = stack_tokens(
                self.loaded, self.layer.batch, stack.tokens, hidden.shape[1], args, sequences
            )
        return self._tokens[key]

    def _vector_tokens(self, stack: Stack, hidden: Tensor, args: tuple) -> Tokens:
        """Tokens behind the output of the layer: a stage may merge patches."""
        tokens = self.layer.activations.tokens
        return (
            tokens
            if token_count(hidden) == tokens.mask.shape[1]
            else self._stack_tokens(stack, hidden, args)
        )

    def _hand_on(self, stack: Stack, hidden: Tensor, args: tuple) -> None:
        activations = self.layer.activations
        if activations.part in self._attending and not activations.attended:
            self.missed.append(activations.part)
        # Parts of a model may lie on different devices, known only once a part has computed.
        tokens = activations.tokens = activations.tokens.on(hidden.device)
        if stack.cross is None:
            self.layer.encoded = tokens
        if self.loaded.layout.maps:
            hidden = map_vectors(hidden, args, self.maps)
            tokens = self.layer.unpadded(hidden.shape[1]).on(hidden.device)
        else:
            tokens = self._vector_tokens(stack, hidden, args).on(hidden.device)
        limit = self.layer.changes.limits.get(activations.layer)
        if limit is not None:
            every = self._stack_tokens(stack, hidden, args).on(hidden.device)
            tokens = self._short[stack.name] = every.shorter_than(limit, wide(hidden))
        if "final" in self.layer.needs and not self.loaded.layout.maps:
            self._latest[stack.name] = activations, hidden
        if "hidden" in self.layer.needs:
            activations.spaces["hidden"] = self.layer.vectors(hidden, tokens)
        self.receive(activations)

    def finish(self, output: ModelOutput) -> None:
        """Report the final output of each stack, if it is not the output of its last block."""
        *_, last = self.loaded.stacks
        if not isinstance(output, ModelOutput):
            return
        given = {
            "encoder": output.get("encoder_last_hidden_state"),
            last.name: output.get("last_hidden_state"),
        }
        for name, (layer, hidden) in self._latest.items():
            final = given.get(name)
            if (
                final is not None
                and final.shape == hidden.shape
                and final.data_ptr() != hidden.data_ptr()
            ):
                tokens = self._short.get(name, layer.tokens).on(final.device)
                spaces = {"final": Vectors(wide(final).unsqueeze(1), tokens)}
                self.receive(Activations(layer.layer, name, "", layer.tokens, spaces))
