"""The gated delta rule: step by step as it is defined, and in chunks as it is trained.

Shapes: B sequences, T tokens, H heads, S elements of a key or value. A head's state M is (S, S), first index the key's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the name that everyone gives it

CHUNK = 64


def delta_rule_by_steps(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """q, k, v (B, T, H, S), g (log decay) and beta (B, T, H) -> read-outs (B, T, H, S). The definition.

    For each token: M = exp(g) M;  M += k (beta (v - k M));  o = q M / sqrt(S).
    """
    m = torch.zeros(*q.shape[0::2], q.shape[-1], q.shape[-1], dtype=q.dtype, device=q.device)  # (B, H, S, S)
    read = []
    for t in range(q.shape[1]):
        m = m * g[:, t, :, None, None].exp()
        held = torch.einsum("bhk,bhkv->bhv", k[:, t], m)
        delta = beta[:, t, :, None] * (v[:, t] - held)
        m = m + k[:, t, :, :, None] * delta[:, :, None, :]
        read.append(torch.einsum("bhk,bhkv->bhv", q[:, t], m))
    return torch.stack(read, dim=1) * q.shape[-1] ** -0.5


def delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunk: int = CHUNK) -> Tensor:
    """What ``delta_rule_by_steps`` gives, a chunk of tokens at a time; shapes as there.

    Within a chunk that begins with state M, let G be the running sum of g. Token i adds k_i d_i with
        d_i = beta_i (v_i - exp(G_i) k_i M - sum_{j<i} exp(G_i - G_j) (k_i . k_j) d_j),
    which is a triangular system (I + A) d = beta v - (beta exp(G) k) M. With X = (I + A)^-1, u = X beta v and
    w = X beta exp(G) k, so d = u - w M, and the state behind the chunk is linear in M:
        M' = (exp(G_last) I - K^T w) M + K^T u,   K_i = exp(G_last - G_i) k_i.
    All chunks' matrices are made at once; one small product a chunk is left that must wait for the one before.
    """
    n_tokens, size = q.shape[1], q.shape[-1]
    padding = -n_tokens % chunk  # of zeros: beta = 0 adds nothing, g = 0 keeps what is there

    def chunks(x: Tensor) -> Tensor:
        """(B, T, H, ...) -> (C, B, H, L, ...): chunks outermost, so that each one's matrices lie side by side."""
        x = F.pad(x, [0, 0] * (x.dim() - 2) + [0, padding]) if padding else x
        return x.unflatten(1, (-1, chunk)).movedim((1, 3), (0, 2))

    q, k, v = chunks(q), chunks(k), chunks(v)
    g, beta = chunks(g).cumsum(-1), chunks(beta)[..., None]  # (C, B, H, L), (C, B, H, L, 1)
    causal = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril()
    decay = (g[..., :, None] - g[..., None, :]).masked_fill(~causal, -torch.inf).exp()  # (C, B, H, L, L)
    grown = g.exp()[..., None]
    inverse: Tensor = _UnitLowerInverse.apply((beta * k @ k.mT * decay).tril(-1))
    u, w = inverse @ (beta * v), inverse @ (beta * grown * k)  # (C, B, H, L, S)

    last = g[..., -1:]
    behind = ((last - g).exp()[..., None] * k).mT  # (C, B, H, S, L)
    keep = last.exp()[..., None] * torch.eye(size, dtype=q.dtype, device=q.device) - behind @ w
    add = behind @ u  # (C, B, H, S, S)
    states = [torch.zeros_like(add[0])]
    for kept, added in zip(keep[:-1].unbind(), add[:-1].unbind(), strict=True):
        states.append(added + kept @ states[-1])
    m = torch.stack(states)

    read = (q * grown) @ m + (q @ k.mT * decay) @ (u - w @ m)
    return read.movedim((0, 2), (1, 3)).flatten(1, 2)[:, :n_tokens] * size**-0.5


class _UnitLowerInverse(torch.autograd.Function):
    """(I + A)^-1 for strictly lower triangular A (..., L, L), L a power of two.

    Blocks of twice the size from those of the last: [[P, 0], [C, Q]]^-1 = [[P^-1, 0], [-Q^-1 C P^-1, Q^-1]].
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        n = a.shape[-1]
        assert n & (n - 1) == 0, f"{n} rows; want a power of two"
        index = torch.arange(n, device=a.device)
        x = torch.eye(n, dtype=a.dtype, device=a.device)
        half = 1
        while half < n:
            row, column = index[:, None] // half, index[None, :] // half
            c = a * ((row == column + 1) & (column % 2 == 0))  # the block C of each pair
            x = x - (x @ c @ x if half > 1 else c)  # blocks of one row are 1
            half *= 2
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return -(x.mT @ gradients[0] @ x.mT).tril(-1)
