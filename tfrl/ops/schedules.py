"""Schedules: how a learning rate or a share of random actions changes over a run. Plain numbers."""

from __future__ import annotations

import math


def learning_rate(kind: str, highest: float, step: int, steps: int, warmup: int = 0) -> float:
    """The learning rate of a step.

    Args:
      kind: the shape of the schedule. "constant"; "linear": falls from `highest` to 0; "cosine": the same as
        half a cosine (Loshchilov and Hutter 2017, arXiv:1608.03983, eq. 5); "step": a tenth from half of the
        steps on, and a hundredth from three quarters (He et al. 2015, arXiv:1512.03385, section 4.2).
      highest: the rate that the schedule scales.
      step: counted from 0; gradient steps or updates.
      steps: how many the run has.
      warmup: steps over which the rate first grows linearly; the schedule scales it meanwhile.
    """
    shape = 1.0
    if kind == "linear":
        shape = 1.0 - step / steps
    elif kind == "cosine":
        shape = 0.5 * (1.0 + math.cos(math.pi * step / steps))
    elif kind == "step":
        shape = 1.0 if step < steps // 2 else 0.1 if step < steps * 3 // 4 else 0.01
    growth = min(1.0, (step + 1) / warmup) if warmup else 1.0
    return highest * growth * shape


def exploration(kind: str, start: float, end: float, step: int, steps: int) -> float:
    """Epsilon, the share of random actions: from `start` to `end` over `steps`, then `end`.

    Mnih et al. 2015, Nature 518, extended data table 1: linear from 1 to 0.1 over a million frames.

    Args:
      kind: "linear", or "exponential": each step multiplies it by the same factor. That needs ends above 0.
      start: at step 0.
      end: from step `steps` on; steps = 0 is `end` at once.
      step: counted from 0, in env steps.
      steps: how long it takes.
    """
    if step >= steps:
        return end
    if kind == "exponential":
        return start * (end / start) ** (step / steps)
    return start + (end - start) * (step / steps)
