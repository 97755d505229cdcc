"Learning rates against the recorded ones of the nanoVLM reference."
import json
import math

from nanovlm_nb.training.schedule import get_lr


def test_get_lr_is_the_recorded_schedule_without_its_overshoot(golden):
    curves = json.loads((golden/'lr_schedule.json').read_text())
    whole, clipped = 0, 0
    for c in curves:
        top, n = c['max_lr'], c['max_steps']
        exact = math.isclose(.03*n, round(.03*n))
        whole += exact
        for it, want in enumerate(c['lr']):
            if want > top*(1+1e-9):
                assert not exact and it == math.floor(.03*n)  # only the last warm-up step, only if it is a broken one
                assert get_lr(it, top, n) == top
                clipped += 1
            else: assert math.isclose(get_lr(it, top, n), want, rel_tol=1e-12)
    assert whole and clipped
