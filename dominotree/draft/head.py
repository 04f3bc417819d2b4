"""The Domino head: a GRU over the tokens drafted so far and a low-rank correction of the logits.

The one home of two formulae (Domino, section 3): the GRU step and `dL = W2 SiLU(W1 [H; S])`.
Shapes: B batch, T tokens, H hidden, G GRU state, R low rank, V vocabulary, M candidates; `...` any leading dimensions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Linear = Callable[[Tensor, Tensor], Tensor]  # how to multiply [..., K] by the rows of [N, K]


class DominoHead(nn.Module):
    """Weights under their published names: `prefix_gru.weight_{ih,hh}_l0`, `embed_proj.{0,2}.weight`."""

    def __init__(self, hidden_size: int, gru_hidden_dim: int, emb_dim: int, vocab_size: int) -> None:
        super().__init__()
        self.prefix_gru = nn.GRU(hidden_size, gru_hidden_dim, batch_first=True, bias=False)
        self.embed_proj = nn.Sequential(
            nn.Linear(hidden_size + gru_hidden_dim, emb_dim, bias=False),
            nn.SiLU(),
            nn.Linear(emb_dim, vocab_size, bias=False),
        )

    @property
    def output_rows(self) -> Tensor:  # [V, R]
        """W2, whose rows belong to the vocabulary."""
        return cast(Tensor, self.embed_proj[2].weight)

    @property
    def hidden_size(self) -> int:
        """H, the drafter's hidden size."""
        return self.prefix_gru.input_size

    @property
    def input_weight(self) -> Tensor:  # [3G, H]
        """W_ih of the GRU."""
        return cast(Tensor, self.prefix_gru.weight_ih_l0)

    @property
    def state_weight(self) -> Tensor:  # [3G, G]
        """W_hh of the GRU."""
        return cast(Tensor, self.prefix_gru.weight_hh_l0)

    @property
    def _first_weight(self) -> Tensor:  # [R, H + G]
        return cast(Tensor, self.embed_proj[0].weight)

    def initial_state(self, batch_size: int) -> Tensor:  # [B, G]
        """The state before any token: zeros."""
        return self.state_weight.new_zeros(batch_size, self.prefix_gru.hidden_size)

    def advance(
        self,
        token_embeds: Tensor,  # [..., H]
        state: Tensor,  # [..., G]
    ) -> Tensor:  # [..., G]
        """The prefix state after one more token."""
        return self.step(self.input_gates(token_embeds), state)

    def prefix_states(self, token_embeds: Tensor) -> Tensor:  # [B, T, H] -> [B, T, G]
        """The prefix state after each of T tokens known beforehand (teacher forcing); entry t has seen t+1 tokens."""
        input_gates = self.input_gates(token_embeds)
        state = self.initial_state(token_embeds.shape[0])
        states = []
        for gates in input_gates.unbind(dim=1):
            state = self.step(gates, state)
            states.append(state)
        return torch.stack(states, dim=1)

    def low_rank(
        self,
        hidden: Tensor,  # [..., H]
        state: Tensor,  # [..., G]
    ) -> Tensor:  # [..., R]
        """`SiLU(W1 [H; S])`, the part of the correction that the vocabulary shares."""
        return self.embed_proj[1](self.embed_proj[0](torch.cat([hidden, state], dim=-1)))

    def position_part(self, hidden: Tensor) -> Tensor:  # [..., H] -> [..., R]
        """`W1 H`, what every state meets at one position."""
        return F.linear(hidden, self._first_weight[:, : self.hidden_size])

    def low_rank_after(
        self,
        position_part: Tensor,  # [..., R] of `position_part`
        state: Tensor,  # [..., G]
    ) -> Tensor:  # [..., R]
        """`low_rank` up to rounding, for many states at one position."""
        return self.embed_proj[1](position_part + F.linear(state, self._first_weight[:, self.hidden_size :]))

    def correction(
        self,
        hidden: Tensor,  # [..., H]
        state: Tensor,  # [..., G]
        rows: Tensor | None = None,  # [M, R] rows of W2, default all of them
    ) -> Tensor:  # [..., M] or [..., V]
        """`dL = W2 SiLU(W1 [H; S])`, over the given rows only; in the rows' dtype."""
        rows = self.output_rows if rows is None else rows
        return F.linear(self.low_rank(hidden, state).to(rows.dtype), rows)

    def input_gates(
        self,
        token_embeds: Tensor,  # [..., H]
        linear: Linear = F.linear,
    ) -> Tensor:  # [..., 3G]
        """`W_ih x`, the part of a step that the token alone decides."""
        return linear(token_embeds, self.input_weight)

    def first_step(self, input_gates: Tensor) -> Tensor:  # [..., 3G] -> [..., G]
        """`step` from the initial state, without the products with zeros."""
        _, update, new = input_gates.chunk(3, dim=-1)
        candidate = torch.tanh(new)
        return torch.lerp(candidate, torch.zeros_like(candidate), torch.sigmoid(update))

    def step(
        self,
        input_gates: Tensor,  # [..., 3G] of `input_gates`
        state: Tensor,  # [..., G]
        linear: Linear = F.linear,
    ) -> Tensor:  # [..., G]
        """One step of the GRU: reset and update gate, then a new state between the candidate and the old one."""
        size = state.shape[-1]
        recurrent = linear(state, self.state_weight)
        reset, keep = torch.sigmoid(input_gates[..., : 2 * size] + recurrent[..., : 2 * size]).chunk(2, dim=-1)
        candidate = torch.tanh(torch.addcmul(input_gates[..., 2 * size :], reset, recurrent[..., 2 * size :]))
        # Under autocast the gates are in half precision, the state is not.
        return torch.lerp(candidate.to(state.dtype), state, keep.to(state.dtype))
