"""Schedules: how a learning rate or a share of random actions changes over a run. Plain numbers.

Each shape is a function of a step, counted from 0, and of the number of steps. Steps are gradient steps,
updates or env steps.
"""

from __future__ import annotations

import math


def constant(step: int, steps: int) -> float:
    """1."""
    return 1.0


def linear(step: int, steps: int) -> float:
    """Falls from 1 at step 0 to 0 at step `steps`."""
    return 1.0 - step / steps


def cosine(step: int, steps: int) -> float:
    """Falls from 1 to 0 as half a cosine (Loshchilov and Hutter 2017, arXiv:1608.03983, eq. 5)."""
    return 0.5 * (1.0 + math.cos(math.pi * step / steps))


def staircase(step: int, steps: int) -> float:
    """1; a tenth from half of the steps on; a hundredth from three quarters.

    32k and 48k of 64k steps in He et al. 2015, arXiv:1512.03385, section 4.2.
    """
    return 1.0 if step < steps // 2 else 0.1 if step < steps * 3 // 4 else 0.01


_SHAPES = {"constant": constant, "linear": linear, "cosine": cosine, "step": staircase}


def learning_rate(kind: str, highest: float, step: int, steps: int, warmup: int = 0) -> float:
    """The learning rate of a step.

    Args:
      kind: "constant", "linear", "cosine" or "step" (`staircase`).
      highest: the rate that the schedule scales.
      step: counted from 0.
      steps: how many the run has.
      warmup: steps over which the rate first grows linearly; the schedule scales it meanwhile.
    """
    growth = min(1.0, (step + 1) / warmup) if warmup else 1.0
    return highest * growth * _SHAPES[kind](step, steps)


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
