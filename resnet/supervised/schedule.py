"""Learning rates by step."""

from __future__ import annotations

import math


def learning_rate(kind: str, highest: float, step: int, steps: int, warmup: int) -> float:
    """The rate of gradient step `step`, counted from 0, of `steps`.

    kind: "constant"; "step": a tenth from half of the steps on and a hundredth from three quarters (32k and
    48k of 64k in He et al. 2015, section 4.2); "cosine": down to 0 (Loshchilov and Hutter 2017,
    arXiv:1608.03983).
    warmup: steps over which the rate first grows linearly.
    """
    growth = min(1.0, (step + 1) / warmup) if warmup else 1.0
    if kind == "step":
        return highest * growth * (1.0 if step < steps // 2 else 0.1 if step < steps * 3 // 4 else 0.01)
    if kind == "cosine":
        return highest * growth * 0.5 * (1.0 + math.cos(math.pi * step / steps))
    return highest * growth
