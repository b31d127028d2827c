from __future__ import annotations

import numpy as np
import pytest

from autopar.cost.pipeline import simulate
from autopar.stages.schedules import make_schedule


def test_one_stage_adds_up():
    schedule = make_schedule("1f1b", 1, 3)
    result = simulate(schedule, [2.0], [3.0], update_s=[5.0])
    assert result == (3 * 5.0 + 5.0, (20.0,))
    assert result.bubble == 0


def test_the_slowest_stage_sets_the_pace():
    m, forward_s, backward_s = 50, np.array([1.0, 4.0, 2.0]), np.array([2.0, 8.0, 4.0])
    result = simulate(make_schedule("1f1b", 3, m), forward_s, backward_s)
    # Stage 1 works throughout, but for: stage 0's first task (1), its own second forward pass being
    # shorter than both passes of stage 2 (6 − 4), and stage 0's last backward pass (2).
    assert result.step_s == pytest.approx(m * 12 + 1 + 2 + 2)
    assert result.busy_s == (m * 3, m * 12, m * 6)
    assert result.bubble == pytest.approx(1 - m * 21 / (3 * result.step_s))


def test_a_transfer_delays_the_receiver():
    schedule = make_schedule("inference", 2, 2)
    # mesh 0: 0-1, 1-2. mesh 1: the first comes at 1 and takes 1 to arrive: 2-5; then 1 more: 6-9.
    assert simulate(schedule, [1.0, 3.0], transfer_s=[1.0]).step_s == 9


def test_updates_of_stages_that_share_a_mesh_follow_each_other():
    schedule = make_schedule("gpipe", 2, 1, num_meshes=1)
    assert simulate(schedule, [1, 1], [1, 1], update_s=[10, 20]).step_s == 34
