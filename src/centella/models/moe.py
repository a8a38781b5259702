"""A mixture of experts in place of a decoder layer's gated network (Shazeer et al. 2017).

    p = softmax(router(norm(x)))                     over experts, in f32
    S = the k experts with the largest p             weighed by p, or by p over their sum
    y = x + r sum over e in S of p_e down_e(act(gate_e(norm(x))) up_e(norm(x)))

One path serves a token and a prompt: `expert_linear` multiplies each row with the weights of its
own experts, and no token's choice comes to the host.
"""

from __future__ import annotations

from centella.dtypes import Array, f32
from centella.errors import DTypeError
from centella.models.llama_config import LlamaConfig
from centella.models.norm import Norm
from centella.nn import Linear, Module
from centella.nn.module import parameter
from centella.ops.experts.op import up_planes
from centella.specs import Shape
from centella.tensors.functional import linear, softmax, sum, topk
from centella.tensors.qtensor import QTensor
from centella.tensors.tensor import Tensor, apply_with

Weight = Tensor | QTensor


class Experts(Module):
    """The weights of all experts of a layer, one after the other.

    Attributes:
        gate_proj, up_proj: [experts, inner, hidden]; down_proj: [experts, hidden, inner]. Quantised
            ones are a QTensor each, of the rows of all experts.
    """

    gate_proj: Weight
    up_proj: Weight
    down_proj: Weight

    def __init__(self, experts: int, hidden: int, inner: int) -> None:
        self.experts = experts
        self.gate_proj = parameter(experts, inner, hidden)
        self.up_proj = parameter(experts, inner, hidden)
        self.down_proj = parameter(experts, hidden, inner)

    def sources(self, path: str, name: str, shape: Shape) -> tuple[tuple[str, Shape], ...]:
        """Each expert is a module of its own in a checkpoint."""
        return tuple((f"{path}{e}.{name}.weight", shape[1:]) for e in range(self.experts))

    def arranged(self, name: str, data: Array) -> Array:
        """Rows of all experts, by expert."""
        return data.reshape(self.experts, -1, data.shape[-1])

    def takes_planes(self, name: str) -> bool:
        """All of them."""
        return True

    def keeps_order(self, name: str) -> bool:
        """Rows stay where they are."""
        return True


class Router(Linear):
    """Scores of the experts; never quantised, since small differences decide."""

    def takes_planes(self, name: str) -> bool:
        """Nothing."""
        return False


class SparseMLP(Module):
    """A router, and the experts among which it chooses for each token.

    Attributes:
        gate: the router, [experts, hidden].
    """

    def __init__(self, config: LlamaConfig) -> None:
        c = config
        self.picks: int = c.num_experts_per_tok
        self.normalised: bool = c.norm_topk_prob
        self.activation: str = c.activation
        self.residual_multiplier: float = c.residual_multiplier
        self.gate: Router = Router(c.hidden_size, c.num_experts, bias=False)
        self.experts: Experts = Experts(c.num_experts, c.hidden_size, c.moe_intermediate_size)

    def forward(self, x: Tensor, norm: Norm | None, residual: Tensor | None = None) -> Tensor:
        """[batch, tokens, hidden] to the same; a residual is added to it."""
        h = (x if norm is None else norm(x)).reshape(-1, x.shape[-1])
        shares, ids = self.route(h)
        experts = self.experts
        opened = self.products(h, experts.gate_proj, ids, up=experts.up_proj)
        # [tokens, picks, inner]
        whole = None if residual is None else residual.reshape(h.shape)
        extras = {"shares": shares, "residual": whole}
        return self.products(opened, experts.down_proj, ids, **extras).reshape(x.shape)

    def products(
        self, x: Tensor, weight: Weight, ids: Tensor, up: Weight | None = None,
        **extras: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Products with the experts of the ids; with `up` these are gated (`expert_linear`)."""
        attrs: dict[str, object] = {"gate": "" if up is None else self.activation}
        both = [weight] if up is None else [weight, up]
        formats = list(dict.fromkeys(w.format.name if isinstance(w, QTensor) else w.dtype.name
                                     for w in both))  # fmt: skip
        if len(formats) > 1:
            raise DTypeError(
                "experts: expected gate_proj and up_proj of one format, got "
                f"{' and '.join(formats)}"
            )
        if isinstance(weight, QTensor):
            attrs |= {"format": weight.format.name, "experts": self.experts.experts}
        planes, *ups = (w.planes if isinstance(w, QTensor) else (w,) for w in both)
        extras |= dict(zip(up_planes(len(planes)), ups[0], strict=True)) if ups else {}
        return apply_with("expert_linear", (x, *planes, ids), "extras", extras, attrs)

    def route(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """Of each token [tokens, hidden] the picks' shares, f32, and ids: [tokens, picks]."""
        shares, ids = topk(softmax(linear(h, self.gate.weight, dtype=f32)), self.picks)
        if self.normalised:
            shares = shares / sum(shares, -1, keepdims=True)
        if self.residual_multiplier != 1.0:
            shares = shares * self.residual_multiplier
        return shares, ids
