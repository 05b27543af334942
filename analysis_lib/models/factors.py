"""Attention that a module computes by itself: a softmax of products, multiplied by values.

Modules that do not call transformers' attention interface multiply queries by keys, take the
softmax of a function of the products, and multiply values by the result; or they call PyTorch's own
attention. Each of these steps is a function of PyTorch, and a ``TorchFunctionMode`` sees all
functions of PyTorch that run inside it.
"""

import string
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm)
_SUMS_OF_PRODUCTS = (torch.baddbmm, Tensor.baddbmm)
_SOFTMAXES = (functional.softmax, torch.softmax, Tensor.softmax)
_SCALINGS = {
    **dict.fromkeys(
        (torch.mul, Tensor.mul, Tensor.mul_, Tensor.__mul__, Tensor.__rmul__, Tensor.__imul__), 1
    ),
    **dict.fromkeys(
        (torch.div, Tensor.div, Tensor.div_, Tensor.__truediv__, Tensor.__itruediv__), -1
    ),
}
# Functions that mask pairs or leave values as they are, but add no bias; others might add one.
_NOT_ADDING = {
    *(
        torch.masked_fill,
        Tensor.masked_fill,
        Tensor.masked_fill_,
        torch.where,
        Tensor.where,
        Tensor.to,
        Tensor.float,
    ),
    *(Tensor.type, Tensor.view, Tensor.reshape, Tensor.contiguous, Tensor.type_as, Tensor.double),
    *(functional.dropout, torch.dropout, Tensor.unflatten, Tensor.flatten, *_SCALINGS),
}
# Limit of the numbers that are added to scores to mask them. Early BERT added -10,000, and a weight
# of exp(-9,000) is zero.
_MASKED = -9000.0


@dataclass
class Product:
    """The product of a matrix and a transposed matrix, followed through later steps.

    Attributes:
        left: * x row x dim.
        right: * x column x dim, with the leading dimensions of ``left``, or 1 where they are
            shared.
        scale: the factor by which the product has been multiplied since.
        added: whether a bias may have been added to it.
        scores: the input of the softmax, once it was taken.
    """

    left: Tensor
    right: Tensor
    scale: float = 1.0
    added: bool = False
    scores: Tensor | None = None


@dataclass
class OwnAttention:
    """The inputs of attention that a module has computed by itself.

    Attributes:
        query: utterance x head x token x head_dim, before scaling.
        key: utterance x head x key x head_dim; heads may share keys.
        value: utterance x head x key x value_dim.
        mask: True at visible pairs, utterance x 1 x token x key; None if all are visible.
        bias: the term added to the scores, or None.
        scaling: the factor of the scores, before the bias is added.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    bias: Tensor | None
    scaling: float


# Function that receives the attention of a module; it returns an output to use instead, utterance x
# head x token x value_dim, or None.
Receive = Callable[[OwnAttention], Tensor | None]


class AttentionSeen(TorchFunctionMode):
    """A context that passes attention computed without transformers' interface to ``receive``.

    Attributes:
        utterances: the number of texts, images or sounds that the model reads.
        receive: receives the attention; None while nothing is to be captured.
        softmax: called for each softmax of products, whether or not it is part of an attention.
    """

    def __init__(
        self,
        utterances: int,
        receive: Receive | None = None,
        softmax: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__()
        self.utterances = utterances
        self.receive = receive
        self.softmax = softmax
        # By the id of a tensor: the tensor, kept so that its id is not reused, and the product
        # behind it.
        self._made: dict[int, tuple[Tensor, Product]] = {}

    def begin(self, receive: Receive) -> None:
        """Start to capture attention."""
        self.receive = receive

    def end(self) -> None:
        """Stop capturing, and forget the products that did not become attention."""
        self.receive = None
        self._made.clear()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.receive is None:
            return function(*args, **kwargs)
        if function is functional.scaled_dot_product_attention:
            return self._fused(*args, **kwargs)
        factors = _factors(function, args, kwargs)
        weights = None if factors is None else self._product(factors.first)
        if weights is not None and weights.scores is not None:
            return self._weighted(weights, factors, function(*args, **kwargs))
        made = function(*args, **kwargs)
        if factors is not None and isinstance(made, Tensor) and factors.plain:
            added = function in _SUMS_OF_PRODUCTS
            self._keep(made, Product(factors.left, factors.right, factors.scale, added))
        elif isinstance(made, Tensor):
            self._pass_on(function, made, args, kwargs)
        return made

    def _product(self, tensor: object) -> Product | None:
        return self._made[id(tensor)][1] if id(tensor) in self._made else None

    def _keep(self, made: Tensor, product: Product) -> None:
        self._made[id(made)] = made, product

    def _pass_on(self, function: Callable, made: Tensor, args: tuple, kwargs: dict) -> None:
        """Note that a tensor is still a product after scaling, masking or a softmax."""
        sources = [value for value in (*args, *kwargs.values()) if self._product(value) is not None]
        if not sources or made.numel() != sources[0].numel():
            return
        product = self._product(sources[0])
        if function in _SOFTMAXES:
            read = args[0] if args else kwargs["input"]
            dim = args[1] if len(args) > 1 else kwargs.get("dim")
            is_over_columns = dim in (-1, read.dim() - 1)
            shape = product.left.shape[-2], product.right.shape[-2]
            if is_over_columns and read.shape[-2:] == shape and product.scores is None:
                self.softmax()
                self._keep(made, replace(product, scores=read))
            return
        scale = product.scale
        factors = [value for value in args if _is_number(value)]
        if function in _SCALINGS and factors:
            scale *= float(factors[0]) ** _SCALINGS[function]
        added = product.added or function not in _NOT_ADDING
        self._keep(made, replace(product, scale=scale, added=added))

    def _weighted(self, weights: Product, factors: "_Factors", plain: Tensor) -> Tensor:
        """Receive the attention that a product of weights and values completes."""
        scores = weights.scores
        heads = scores.shape[:-2]
        if scores.dim() == 3 and scores.shape[0] % self.utterances == 0:
            heads = (self.utterances, scores.shape[0] // self.utterances)
        self._made.clear()
        if len(heads) != 2:
            return plain
        query = _by_head(weights.left, heads)
        key = _by_head(weights.right, heads)
        value = _by_head(factors.right.transpose(-1, -2), heads)
        if query is None or key is None or value is None or value.shape[-2] != key.shape[-2]:
            return plain
        scores = scores.reshape(*heads, *scores.shape[-2:])
        added = scores - weights.scale * (query @ key.transpose(-1, -2))
        mask, bias = _mask_and_bias(added)
        if not weights.added:
            bias = None
        output = self.receive(OwnAttention(query, key, value, mask, bias, weights.scale))
        return plain if output is None else factors.arranged(output, plain)

    def _fused(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Receive a call of PyTorch's own attention."""
        plain = functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        self.softmax()
        if query.dim() != 4:
            return plain
        mask = attn_mask
        bias = None
        if is_causal:
            mask = torch.ones(
                query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device
            ).tril()
        if mask is not None and mask.dtype != torch.bool:
            mask, bias = _mask_and_bias(mask)
        if mask is not None:
            mask = (
                mask.expand(query.shape[0], -1, query.shape[-2], -1)
                if mask.dim() == 4
                else mask[None, None]
            )
        scaling = query.shape[-1] ** -0.5 if scale is None else scale
        output = self.receive(OwnAttention(query, key, value, mask, bias, scaling))
        return plain if output is None else output.to(plain.dtype)


@dataclass
class _Factors:
    """The factors of a product.

    Attributes:
        first: the first factor, as it was given.
        left: * x row x dim.
        right: * x column x dim.
        plain: whether the product has the axes * x row x column.
        scale: the factor that the same function multiplies the product by.
        order: the positions of the axes * x row x column in the product, if it has another order.
    """

    first: Tensor
    left: Tensor
    right: Tensor
    plain: bool = True
    scale: float = 1.0
    order: tuple[int, ...] | None = None

    def arranged(self, output: Tensor, plain: Tensor) -> Tensor:
        """Output by head in the shape and order of the product."""
        if self.order is not None:
            as_made = output.reshape([plain.shape[axis] for axis in self.order])
            return as_made.permute([self.order.index(axis) for axis in range(plain.dim())]).to(
                plain.dtype
            )
        return output.reshape(plain.shape).to(plain.dtype)


def _factors(function: Callable, args: tuple, kwargs: dict) -> _Factors | None:
    """The factors of a product of two stacks of matrices; None if a function computes none."""
    if function in _PRODUCTS:
        left, right = (*args, *kwargs.values())[:2]
        scale = 1.0
    elif function in _SUMS_OF_PRODUCTS:
        left, right = args[1:3]
        scale = float(kwargs.get("alpha", 1))
    elif function is torch.einsum and len(args) == 3:
        return _of_einsum(*args)
    else:
        return None
    if not isinstance(left, Tensor) or min(left.dim(), right.dim()) < 3:
        return None
    return _Factors(left, left, right.transpose(-1, -2), scale=scale)


def _of_einsum(equation: str, left: Tensor, right: Tensor) -> _Factors | None:
    terms, _, made = equation.replace(" ", "").partition("->")
    first, _, second = terms.partition(",")
    if "..." in first:
        # The same leading axes in both factors, such as blocks of tokens.
        axes = string.ascii_uppercase[: left.dim() + len("...") - len(first)]
        first, second, made = (part.replace("...", axes) for part in (first, second, made))
    letters = {*first, *second, *made}
    summed = [letter for letter in first if letter in second and letter not in made]
    rows = [letter for letter in first if letter not in second]
    columns = [letter for letter in second if letter not in first]
    if not letters <= {*string.ascii_letters} or not len(summed) == len(rows) == len(columns) == 1:
        return None
    batch = [letter for letter in first if letter not in (*summed, *rows)]
    if {*made} != {*batch, *rows, *columns}:
        return None
    kept = [letter for letter in made if letter in batch]
    turned = "".join(kept)
    as_left = torch.einsum(f"{first}->{turned}{rows[0]}{summed[0]}", left)
    as_right = torch.einsum(f"{second}->{turned}{columns[0]}{summed[0]}", right)
    order = tuple(made.index(letter) for letter in (*kept, *rows, *columns))
    return _Factors(left, as_left, as_right, order == tuple(range(len(order))), order=order)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)


def _by_head(part: Tensor, sizes: tuple[int, int]) -> Tensor | None:
    """Utterance x head x token x dim; None if the shape does not fit the sizes."""
    utterances, heads = sizes
    if part.dim() == 4 and part.shape[0] == utterances and part.shape[1] in (1, heads):
        return part
    if part.dim() == 3 and part.shape[0] == utterances * heads:
        return part.reshape(utterances, heads, *part.shape[1:])
    return None


def _mask_and_bias(added: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The visible pairs and their bias, from the term added to the scores; None without any."""
    allowed = added > _MASKED
    bias = torch.where(allowed, added, 0)
    bias = bias if bias.any() else None
    if allowed.all():
        return None, bias
    of_first_head = allowed[:, :1]
    if (allowed == of_first_head).all():
        return of_first_head, bias
    return allowed, bias
