"""Mixture of experts: the gate, routed experts with the routing weight inside, and the shared expert.

The routing weight multiplies the inner activation before the second projection, which is quantized: applying it after
would move the quantizer's scale. Ties of the gate go to the lowest expert number. Every function maps each row alone.

Shape legend: t rows, d hidden, E experts, k chosen per row, I inner width.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional

from engine.models.deepseek_v41.arithmetic import Arithmetic
from engine.models.deepseek_v41.config import MoeConfig
from engine.models.deepseek_v41.weights import MoeWeights


@dataclass(frozen=True, slots=True)
class RowTokens:
    """What routing and n-grams need to know of t rows besides their streams."""

    ids: torch.Tensor  # int64 [t]
    is_image: torch.Tensor | None = None  # bool [t]; None if no row belongs to an image

    def take(self, rows: torch.Tensor | slice) -> "RowTokens":
        """Return some rows."""
        return RowTokens(self.ids[rows], None if self.is_image is None else self.is_image[rows])


@dataclass(frozen=True, slots=True)
class Routes:
    """Which experts rows go to."""

    experts: torch.Tensor  # int64 [t, k], ascending
    weights: torch.Tensor  # [t, k]


class Gate:
    """Chooses experts; biases steer the choice only, never the weights."""

    def __init__(self, weights: MoeWeights, config: MoeConfig, top_k: int, arithmetic: Arithmetic) -> None:
        self._weights = weights
        self._config = config
        self._top_k = top_k
        self._arithmetic = arithmetic

    def forward(self, x: torch.Tensor, tokens: RowTokens) -> Routes:
        """Route rows x [t, d]."""
        config = self._config
        scores = functional.softplus(
            self._arithmetic.linear(x, self._weights.gate) / config.gate_temp, threshold=60
        ).sqrt()
        experts = self._choose(scores, tokens).sort(1).values
        weights = scores.gather(1, experts)
        if config.norm_top_k and self._top_k > 1:
            weights = weights / (weights.sum(1, keepdim=True) + config.weight_eps)
        return Routes(experts, weights * config.route_scale)

    def _choose(self, scores: torch.Tensor, tokens: RowTokens) -> torch.Tensor:
        weights = self._weights
        if weights.token_experts is not None:
            return weights.token_experts[tokens.ids]
        if weights.bias is not None:
            bias = weights.bias.expand_as(scores)
            if tokens.is_image is not None and weights.bias_vl is not None:
                bias = torch.where(tokens.is_image[:, None], weights.bias_vl, bias)
            scores = scores + bias
        return scores.sort(dim=1, descending=True, stable=True).indices[:, : self._top_k]


def swiglu(projected: torch.Tensor, limit: float) -> torch.Tensor:
    """Return [t, I] from [t, 2 I] (gate, then up): the gate is clamped from above, the other on both sides."""
    gate, up = projected.chunk(2, -1)
    return functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


_STACKED_EXPERTS = 16
"""So few experts are computed in one product, whether rows go to them or not; more would only waste work."""


class Moe:
    """The feed-forward sublayer."""

    def __init__(self, weights: MoeWeights, config: MoeConfig, top_k: int, arithmetic: Arithmetic) -> None:
        self._weights = weights
        self._limit = config.swiglu_limit
        self._gate = Gate(weights, config, top_k, arithmetic)
        self._arithmetic = arithmetic

    def forward(self, x: torch.Tensor, tokens: RowTokens) -> torch.Tensor:
        """Map [t, d] to [t, d]."""
        routes = self._gate.forward(x, tokens)
        entering = self._arithmetic.activation(x)
        routed = self._all_rows if self._arithmetic.fixed_shapes else self._grouped
        return routed(entering, routes) + self._shared(entering)

    def _grouped(self, entering: torch.Tensor, routes: Routes) -> torch.Tensor:
        """Return the routed experts' sum [t, d]: rows are sorted by expert, so that each runs once over its own."""
        top_k = routes.experts.shape[1]
        experts, order = routes.experts.flatten().sort(stable=True)
        hit, counts = experts.unique_consecutive(return_counts=True)
        parts = list(zip(hit.tolist(), counts.tolist(), strict=True))
        inner = self._by_expert(entering[order.div(top_k, rounding_mode="floor")], self._weights.w13, parts)
        inner = swiglu(inner, self._limit) * routes.weights.flatten()[order, None]
        made = self._by_expert(self._arithmetic.activation(inner), self._weights.w2, parts)
        each = torch.empty_like(made)
        each[order] = made
        return each.unflatten(0, (-1, top_k)).sum(1)

    def _by_expert(self, rows: torch.Tensor, weights: torch.Tensor, parts: list[tuple[int, int]]) -> torch.Tensor:
        """Apply `weights` [E, out, in] to rows [n, in] that are sorted by expert; `parts`: (expert, rows) in order."""
        made = [
            self._arithmetic.linear(own, weights[expert])
            for own, (expert, _) in zip(rows.split([count for _, count in parts]), parts, strict=True)
        ]
        return torch.cat(made)

    def _all_rows(self, entering: torch.Tensor, routes: Routes) -> torch.Tensor:
        """Return the same with products whose shapes do not depend on how rows are routed: experts see every row."""
        weights = self._weights
        num_experts = weights.w13.shape[0]
        if num_experts > _STACKED_EXPERTS:
            return self._one_by_one(entering, routes)
        # Weight [E, t, 1] of every row in every expert, zero where it is not routed.
        share = entering.new_zeros(len(entering), num_experts).scatter_(1, routes.experts, routes.weights)
        inner = swiglu(entering.expand(num_experts, -1, -1) @ weights.w13.mT, self._limit) * share.t()[:, :, None]
        return (self._arithmetic.activation(inner) @ weights.w2.mT).sum(0)

    def _one_by_one(self, entering: torch.Tensor, routes: Routes) -> torch.Tensor:
        out = torch.zeros_like(entering)
        for expert in routes.experts.unique().tolist():
            weight = (routes.weights * (routes.experts == expert)).sum(1, keepdim=True)
            inner = swiglu(self._arithmetic.linear(entering, self._weights.w13[expert]), self._limit) * weight
            out += self._arithmetic.quantized_linear(inner, self._weights.w2[expert])
        return out

    def _shared(self, entering: torch.Tensor) -> torch.Tensor:
        shared = self._weights.shared
        inner = swiglu(self._arithmetic.linear(entering, shared.w13), self._limit)
        return self._arithmetic.quantized_linear(inner, shared.w2)
